"""The exercises of docs/teaching.md: starters fail, solutions pass, and wrong answers are explained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.cli import main

ROOT = Path(__file__).parent.parent
EXERCISES = ROOT / "examples" / "exercises"
NAMES = ["softmax_rule", "causal_attention", "cached_attention"]


@pytest.fixture
def load(own_primitives):
    def load(path, *change):
        """What a file defines, after a change of its text: what was there, and what a student writes instead."""
        text = path.read_text()
        if change:
            assert change[0] in text
        names = {"__name__": path.stem}
        exec(compile(text.replace(*change) if change else text, str(path), "exec"), names)
        return names

    return load


def test_every_exercise_has_a_solution():
    assert sorted(path.stem for path in EXERCISES.glob("*.py")) == sorted(NAMES)
    assert sorted(path.stem for path in (EXERCISES / "solutions").glob("*.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_passes_the_check_of_its_starter(load, name):
    assert load(EXERCISES / "solutions" / f"{name}.py")["check"]().ok
    checks = [
        (folder / f"{name}.py").read_text().split("def check")[1] for folder in (EXERCISES, EXERCISES / "solutions")
    ]
    assert checks[0] == checks[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmax_rule", "the first wrong formula is dS"),
        ("causal_attention", "row 0 depends on row 1, which comes later"),
        ("cached_attention", "must call cache.append once with the keys and values of x"),
    ],
)
def test_a_starter_is_a_program_that_fails_with_a_message(name, message):
    command = [sys.executable, str(EXERCISES / f"{name}.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1, done.stderr
    assert message in " ".join(done.stdout.split())


def test_the_commands_in_the_exercises_judge_them_too(capsys, own_primitives):
    gradcheck, check = ["gradcheck", "--shape", "3x5"], ["check", "--causal"]
    for name, (command, *options), function in [
        ("softmax_rule", gradcheck, "softmax_of_rows"),
        ("causal_attention", check, "attend"),
        ("cached_attention", check, "Attention"),
    ]:
        for folder, code in ((EXERCISES, 1), (EXERCISES / "solutions", 0)):
            tg.ops.REGISTRY.pop("softmax_of_rows", None)
            assert main([command, f"{folder / name}.py:{function}", *options]) == code, name
            assert ("FAILED" in capsys.readouterr().out) == (code == 1)


RULES = {
    "P * dP": "a row sum is missing",
    "P * (1 - P) * dP": "each element of softmax depends on others too",
    "P * (dP - (P * dP).sum())": "a sum over axis -1 with keepdims=True is right",
    "P * (dP - (P * dP).sum(axis=-1))": "a sum over axis -1 with keepdims=True is right",
    "P * (dP - (P * dP).sum(axis=0, keepdims=True))": "a sum over axis -1 is right",
    "P * (dP - (P * dP).mean(axis=-1, keepdims=True))": "a sum over axis -1 is right",
    "dP - (P * dP).sum(axis=-1, keepdims=True)": "a factor P is missing",
    "P * ((P * dP).sum(axis=-1, keepdims=True) - dP)": "the sign is wrong, of every element",
    "P * (dP - dP.sum(axis=-1, keepdims=True))": "a row sum is missing or wrong",
    "dP": "it is dP, unchanged",
    "P": "it is P, unchanged",
    "P * (1 - P)": "it does not depend on dP",
    "P * dP * dP": "dP must be a factor of each term exactly once",
    "P * (dP - P)": "dP must be a factor of each term exactly once",
    "np.zeros_like(P)": "it is 0 everywhere",
    "P * np.nan": "not finite, first at [0, 0]",
    "print(P)": "",  # returns None
}


@pytest.mark.parametrize("answer", RULES)
def test_a_wrong_rule_of_softmax_is_explained(load, answer):
    (finding,) = load(EXERCISES / "softmax_rule.py", "return dP ", f"return {answer} ")["check"]().failed
    assert RULES[answer] in finding.cause
    assert RULES[answer] or "does it end with return?" in finding.message


def test_a_rule_of_another_shape_is_told_the_shape(load):
    (finding,) = load(EXERCISES / "softmax_rule.py", "return dP ", "return (P * dP).sum(axis=-1) ")["check"]().failed
    assert finding.message == "has the shape (3,), expected (3, 5)"


def test_no_message_on_a_rule_contains_the_answer(load):
    for answer in RULES:
        tg.ops.REGISTRY.pop("softmax_of_rows", None)
        (finding,) = load(EXERCISES / "softmax_rule.py", "return dP ", f"return {answer} ")["check"]().failed
        assert "P * dS" not in finding.cause
        assert "dS -" not in finding.cause


ATTENTIONS = {  # what is changed in the solution, and the claim and the words that the student reads first
    ("/ q.shape[-1] ** 0.5", ""): ("scale", "the scores are not divided by sqrt(d_k)"),
    (" ** 0.5", ""): ("scale", "divided by d_k instead of sqrt(d_k)"),
    ("q.shape[-1] ** 0.5", "np.sqrt(q.shape[-1])"): ("dtype", "np.sqrt of an integer"),
    ("axis=-1", "axis=-2"): ("softmax", "the softmax is over the queries"),
    ("np.where(allow, scores, -np.inf)", "scores"): ("causality", "there is no causal mask"),
    ("np.where(allow,", "np.where(allow.mT,"): ("causality", "the polarity of the causal mask is inverted"),
    ("-np.inf", "0"): ("softmax", "hidden scores are set to 0"),
    ("-np.inf", "-1e4"): ("exclusion", "a finite constant (such as -1e4)"),
    ("n_k - n_q,", "n_k - n_q + 1,"): ("causality", "lets a token see the next one (off by one)"),
    ("n_k - n_q,", "0,"): ("chunking", "aligned at the top left corner"),
    (" - scores.max(axis=-1, keepdims=True)", ""): ("overflow", "the largest score of each row is not subtracted"),
}


@pytest.mark.parametrize("change", ATTENTIONS)
def test_a_wrong_attention_is_explained(load, change):
    verdict = load(EXERCISES / "solutions" / "causal_attention.py", *change)["check"]()
    claim, cause = ATTENTIONS[change]
    assert verdict.failed[0].name == claim
    assert cause in verdict.failed[0].cause


def test_a_mask_that_hides_every_key_of_a_query_is_explained(load):
    answer = load(EXERCISES / "solutions" / "causal_attention.py", "n_k - n_q,", "n_k - n_q - 1,")
    with np.errstate(invalid="ignore"):
        problem = answer["check"]().problem
    assert "in row 0 of 0 to 6: does the mask hide every key of such a query" in problem


def test_another_kind_of_attention_does_not_pass_as_the_solution(load):
    e = "np.exp(scores - scores.max(axis=-1, keepdims=True))"
    other = load(EXERCISES / "solutions" / "causal_attention.py", e, "(1.5 + np.tanh(scores)) * allow")
    assert tg.check.attention(other["attend"], causal=True).ok
    (finding,) = other["check"]().failed
    assert finding.name == "formula"
    assert "from softmax(Q K^T / sqrt(d_k)) V, masked (row" in finding.message


CACHES = {
    ("np.tri(T, first + T, first,", "np.tri(T, first + T,"): "mask from the wrong corner (top-left)",
    ("first, dtype", "first if cache is None else first + T, dtype"): "no causal mask with a cache",
    ("np.tri(T, first + T, first,", "np.tri(T,"): "operands could not be broadcast together",
    ("np.arange(first, first + T)", "np.arange(T)"): "position not offset",
    ("np.arange(first, first + T)", "np.arange(first + bool(first), first + bool(first) + T)"): "position off by one",
    ("k, v = cache.append(k, v)", "v, k = cache.append(k, v)"): "keys and values exchanged",
    ("k, v = cache.append(k, v)", "k, v = cache.append(v, k)"): "keys and values exchanged",
    ("k, v = cache.append(k, v)", "k, v = cache.append(q, v)"): "queries in place of keys",
    ("k, v = cache.append(k, v)", "k, v = cache.append(k, k)"): "keys in place of values",
    ("q.shape[-1] ** 0.5", "(first + T) ** 0.5"): "or their number is used",
    ("k, v = cache.append(k, v)", "cache.append(k, v)"): "shapes (1,5) and (1,12) not aligned",
    ("k, v = cache.append(k, v)", "k, v = cache.append(k, v); first = cache.length"): "operands could not be broadcast",
}


@pytest.mark.parametrize("change", CACHES)
def test_a_wrong_cache_is_explained(load, change):
    verdict = load(EXERCISES / "solutions" / "cached_attention.py", *change)["check"]()
    assert CACHES[change] in verdict.first_divergence.cause


POSITIONS = "x = x + nn.positions.sinusoidal(np.arange(first, first + T), x.shape[-1]).astype(x.dtype)"
RESULT = "return ops.where(allow, scores, -np.inf).softmax() @ v"
SAME_WITH_AND_WITHOUT_A_CACHE = {  # and not what was asked for: the claim that fails, and the words
    (RESULT, "ops.where(allow, scores, -np.inf); return x * 0"): ("start", "the result is 0 everywhere"),
    (RESULT, "ops.where(allow, scores, -np.inf); return v[-T:]"): ("start", "each token sees itself alone"),
    ("np.tri(T, first + T, first,", "np.eye(T, first + T, first,"): ("start", "each token sees itself alone"),
    (POSITIONS, ""): ("start", "no positions are added"),
    ("np.arange(first, first + T)", "np.arange(first + 1, first + T + 1)"): ("start", "the first position is 1, not 0"),
    (RESULT, "return nn.MultiHeadAttention(12, 1, rng=0)(x, cache=cache, causal=True)"): ("start", "another layer"),
    ("show = edit or (lambda name, tensor: tensor)", "show = lambda name, tensor: tensor"): ("show", "Q, K, V, scores"),
}


@pytest.mark.parametrize("change", SAME_WITH_AND_WITHOUT_A_CACHE)
def test_what_is_wrong_with_and_without_a_cache_alike_is_refused(load, change):
    if "MultiHeadAttention" in change[1]:
        body = load(EXERCISES / "cached_attention.py", "show = edit or", f"{change[1]}\n        show = edit or")
    else:
        body = load(EXERCISES / "solutions" / "cached_attention.py", *change)
    (finding,) = body["check"]().failed
    claim, words = SAME_WITH_AND_WITHOUT_A_CACHE[change]
    assert finding.name == claim
    assert words in finding.message + finding.cause


def test_a_cache_of_x_from_which_keys_are_computed_again_is_refused_with_the_counts(load):
    answer = load(
        EXERCISES / "solutions" / "cached_attention.py",
        "        q, k, v = show",
        "        n = T\n"
        "        if cache is not None:\n"
        "            x, _ = cache.append(x, x)\n"
        "            T, first = x.shape[-2], 0\n"
        "            cache = None\n"
        "        result = self.attend(x, T, show)\n"
        "        return result[-n:]\n\n"
        "    def attend(self, x, T, show, cache=None, first=0):\n"
        "        q, k, v = show",
    )
    (finding,) = answer["check"]().failed
    assert finding.name == "work"
    assert "15 rows of Q, 5 rows of K, 15 rows of V, 15 rows of scores are computed" in finding.message


def test_a_use_of_a_cache_that_is_not_there_is_explained(load):
    answer = load(EXERCISES / "solutions" / "cached_attention.py", "        if cache is not None:\n    ", "")
    assert "behind `if cache is not None`" in answer["check"]().problem


def test_only_a_program_that_reaches_its_end_prints_solved(tmp_path):
    solution = (EXERCISES / "solutions" / "softmax_rule.py").read_text()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for old, new, last in [("P * (dP", "P * (dP", "solved"), ("return P", "sys.exit(0); return P", "not solved yet")]:
        (tmp_path / "answer.py").write_text(solution.replace(old, new))
        command = [sys.executable, str(tmp_path / "answer.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.stdout.splitlines()[-1] == last, done.stderr
