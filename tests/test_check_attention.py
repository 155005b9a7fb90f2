"""`tg.check.attention` names the fault of an attention, accepts correct ones, and says what could not be run."""

import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from faults import FAULTS, VARIANTS, PlainModule, softmax

import tinygrad_mha as tg
from tinygrad_mha.check import candidates
from tinygrad_mha.cli import main
from tinygrad_mha.files import python_files

EXAMPLES = Path(__file__).parent.parent / "examples"

# Not yet named or wrongly refused, with the reason.
MISSED: dict[str, str] = {}


def as_param(case):
    marks = [pytest.mark.xfail(strict=True, reason=MISSED[case.name])] if case.name in MISSED else []
    return pytest.param(case, id=case.name, marks=marks)


@functools.cache
def check(case):
    return case.check()


def names(verdict):
    """What a verdict says is wrong: name and cause of each failed finding."""
    return [f"{finding.name}: {finding.cause}" for finding in verdict.failed]


@pytest.mark.parametrize("case", [as_param(c) for c in FAULTS])
def test_a_fault_is_rejected_by_name(case):
    verdict = check(case)
    assert not verdict.problem, verdict.problem
    assert verdict.failed, verdict
    assert re.search(case.says, names(verdict)[0]), verdict  # what comes first is the fault, not what follows from it
    assert all(f.message for f in verdict.failed), verdict


@pytest.mark.parametrize("case", [as_param(c) for c in VARIANTS])
def test_a_correct_attention_passes(case):
    verdict = check(case)
    assert verdict.ok, verdict
    assert any(finding.status == "passed" for finding in verdict.findings)


def test_a_mask_is_tried_on_fewer_queries_than_keys():
    case = next(case for case in VARIANTS if case.name == "with_a_mask_for_more_keys_than_queries")
    assert "passed" in [finding.status for finding in check(case).findings if finding.name == "mask"]


@pytest.mark.parametrize(("seen", "cause"), [(4, "the window is off by one"), (7, "the window is ignored")])
def test_the_cause_of_a_wrong_window_is_its_length(seen, cause):
    def candidate(q, k, v, window=3):
        back = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        return softmax(np.where((back >= 0) & (back < seen), scores, -np.inf)) @ v

    verdict = tg.check.attention(candidate)
    assert [f.cause for f in verdict.failed if f.name == "window"] == [cause]


def test_one_head_is_not_counted_and_order_is_not_asked_of_a_causal_attention():
    def candidate(q, k, v):
        return tg.nn.attention(q, k, v, allow=tg.nn.causal(q.shape[-2], k.shape[-2]))

    findings = {finding.name: finding for finding in tg.check.attention(candidate).findings}
    assert findings["positions"].message == "as in softmax(Q K^T / sqrt(d_k)) V"
    assert findings["permutation"].status == "does not apply"


def test_a_division_by_the_root_of_the_number_of_keys_is_named():
    def candidate(q, k, v):
        return softmax(q @ k.swapaxes(-1, -2) * k.shape[-2] ** -0.5) @ v

    causes = [finding.cause for finding in tg.check.attention(candidate).failed]
    assert causes == ["the scores are divided by the square root of the number of keys"]


def test_the_registry_is_as_large_as_promised():
    assert len(FAULTS) >= 30
    assert len(VARIANTS) >= 14
    assert len({case.name for case in FAULTS + VARIANTS}) == len(FAULTS + VARIANTS)


# --------------------------------------------------------------------------------------------------------- the command


BAD = {
    "no_inputs": ("def candidate(): return 1", "takes"),
    "too_many": ("def candidate(a, b, c, d, e): return a", "takes"),
    "raises": ("def candidate(q, k, v): raise RuntimeError('out of order')", "out of order"),
    "raises_in_init": ("class candidate(nn.Module):\n    def __init__(self): raise KeyError('n_head')", "n_head"),
    "exits": ("def candidate(q, k, v): import sys; sys.exit()", "exit"),
    "exits_at_once": ("def candidate(q, k, v): import os; os._exit(0)", "exit"),
    "exits_with_0": ("def candidate(q, k, v): import sys; sys.exit(0)", "exit"),
    "the_file_exits": ("def candidate(q, k, v): return v\nimport sys; sys.exit(0)", "exit"),
    "the_file_raises": ("raise ValueError('no weights here')\ndef candidate(q, k, v): return v", "no weights here"),
    "the_file_is_broken": ("def candidate(q, k, v) return v", "candidate"),
    "returns_none": ("def candidate(q, k, v): pass", "None"),
    "returns_a_list": ("def candidate(q, k, v): return [[1.0, 2.0]]", "list"),
    "returns_text": ("def candidate(q, k, v): return 'done'", "str"),
    "wrong_shape": ("def candidate(q, k, v): return q.mean()", "shape"),
    "wrong_rows": ("def candidate(q, k, v): return v[..., 1:, :]", "shape"),
    "integers": ("def candidate(q, k, v): return np.zeros((*q.shape[:-1], v.shape[-1]), int)", "int"),
    "always_nan": ("def candidate(q, k, v): return np.full((*q.shape[:-1], v.shape[-1]), np.nan)", "nan"),
    "recursion": ("def candidate(q, k, v): return candidate(v, k, q)", "RecursionError"),
    "a_gpt": ("candidate = nn.GPT(nn.GPTConfig(11, 8, 1, 2, 6))", "kv_cache"),
    "needs_more": ("class candidate(nn.Module):\n    def forward(self, x, memory): return x", "memory"),
    "not_callable": ("candidate = 3", "int"),
    "missing": ("def other(q, k, v): return v", "candidate"),
}


def write(folder, code):
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\nfrom tinygrad_mha import nn, ops\n{code}\n")
    return f"{path}:candidate"


@pytest.mark.parametrize(("code", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_judged_exits_with_2_and_one_clear_reason(code, says, tmp_path, capsys):
    assert main(["check", write(tmp_path, code)]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert says in said.out + said.err


@pytest.mark.parametrize(
    "code",
    [
        "def candidate(q, k, v):\n    while True: pass",
        "def candidate(q, k, v):\n    while True:\n        try: raise ValueError\n        except Exception: pass",
        "class candidate(nn.Module):\n    def __init__(self):\n        import time; time.sleep(99)",
    ],
)
def test_an_endless_loop_ends_with_2_and_one_clear_reason(code, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(python_files, "SECONDS", 0.05)
    assert main(["check", write(tmp_path, code)]) == 2
    assert "did not return within 0.05 seconds: an endless loop?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("gradcheck", "def candidate(x=np.ones(2)):\n    while True: pass"),
        ("graph", "def candidate(x=np.ones(2)):\n    while True: pass"),
        *((command, "while True: pass") for command in ("check", "gradcheck", "graph")),
    ],
)
def test_a_loop_in_a_file_or_its_function_ends_every_command_with_2_and_one_sentence(
    command, code, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(python_files, "SECONDS", 0.05)
    assert main([command, write(tmp_path, code)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("did not return within 0.05 seconds: an endless loop?")
    assert "mine.py, line" in said
    assert "\n" not in said


def test_the_gradient_check_of_a_file_names_functions_and_modules_and_their_inputs(tmp_path, capsys):
    assert main(["gradcheck", write(tmp_path, "def candidate(q=np.ones((2, 3))): return ops.tanh(q)")]) == 0
    said = capsys.readouterr().out
    assert "gradcheck of candidate: ok" in said
    assert "  q          (2, 3)" in said
    assert main(["gradcheck", write(tmp_path, "candidate = nn.Linear(3, 2, rng=0)"), "--shape", "5x3"]) == 0
    said = capsys.readouterr().out
    assert "gradcheck of Linear: ok" in said
    assert "  weight     (3, 2)" in said


def test_after_an_endless_loop_nothing_else_is_tried(monkeypatch):
    monkeypatch.setattr(python_files, "SECONDS", 0.05)
    calls = []

    def candidate(q, k, v):
        calls.append(q.shape)
        while True:
            pass

    assert tg.check.attention(candidate).exit_code == 2
    assert len(calls) == 1


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "raise SystemExit", "import os; exit()", "quit()", "import os; os._exit(0)"]
)
def test_a_file_that_exits_proves_nothing(code, tmp_path, capsys):
    target = write(tmp_path, f"def candidate(x): return x * x\n{code}")
    for command in ("check", "gradcheck", "graph"):
        options = ["-o", str(tmp_path / "x.svg")] if command == "graph" else []
        assert main([command, target, *options]) == 2
        assert "exit" in capsys.readouterr().err


def test_the_parameters_of_a_compiled_function_are_read_from_its_documentation():
    def compiled(*args):
        """attend(query, key, value, is_causal=False) -> Tensor

        Attention (compiled).
        """

    compiled.__signature__ = 0  # as that of a function without one, which cannot be read
    empty = inspect.Parameter.empty
    expected = {"query": empty, "key": empty, "value": empty, "is_causal": None}
    assert candidates.read_parameters(compiled) == expected
    compiled.__doc__ = None
    assert candidates.read_parameters(compiled) == {}


def test_a_candidate_that_never_returns_the_same_twice_fails_by_that_name(tmp_path, capsys):
    code = "def candidate(q, k, v): return np.random.default_rng().standard_normal((*q.shape[:-1], v.shape[-1]))"
    assert main(["check", write(tmp_path, code)]) in (1, 2)
    assert re.search("same (twice|input)|determin", capsys.readouterr().out)


RIGHT = "def candidate(q, k, v): {}return np.asarray(nn.attention(q, k, v).numpy())"


def test_the_command_exits_with_0_if_all_passes_and_with_1_if_a_claim_fails(tmp_path, capsys):
    assert main(["check", write(tmp_path, RIGHT.format(""))]) == 0
    assert "candidate" in capsys.readouterr().out
    assert main(["check", write(tmp_path, RIGHT.format("q = 3 * q; "))]) == 1
    assert "scale" in capsys.readouterr().out


def test_what_a_candidate_prints_does_not_disturb_the_json(tmp_path, capfd):
    for line, code in {"": 0, "q = 3 * q; ": 1}.items():
        assert main(["check", write(tmp_path, RIGHT.format(f"print('hello'); {line}")), "--json"]) == code
        data = json.loads(capfd.readouterr().out)
        assert data["ok"] is (code == 0)
        assert {f["status"] for f in data["findings"]} <= {"passed", "failed", "does not apply"}
    assert main(["check", write(tmp_path, "def candidate(q, k, v): return None"), "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["status"] == "could not be run"


def test_what_a_candidate_of_tensors_prints_is_left_out_of_the_gradient_check_too(tmp_path, capfd):
    code = "def candidate(q, k, v):\n    import sys; print('hello'); print('hello', file=sys.stderr)"
    assert main(["check", write(tmp_path, f"{code}\n    return nn.attention(q, k, v)"), "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["ok"]
    assert not err


def test_the_command_is_a_process_with_the_same_exit_codes(tmp_path):
    target = write(tmp_path, "def candidate(q, k, v):\n    import os, sys\n    sys.exit(0)")
    done = subprocess.run([sys.executable, "-m", "tinygrad_mha", "check", target], capture_output=True, text=True)
    assert done.returncode == 2, done


def test_shapes_and_causality_can_be_given(tmp_path, capsys):
    target = write(tmp_path, "def candidate(x): return x + x.mean(axis=-2, keepdims=True)")
    assert main(["check", target, "--shape", "7x5", "--causal"]) == 1
    assert "causality" in capsys.readouterr().out
    main(["check", target, "--shape", "7x5", "--no-causal", "--json"])
    found = {f["name"]: f["status"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["causality"] == "does not apply"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def candidate(q, k, v):\n    q = 2 * q\n    return undefined_name", "(mine.py, line 5)"),
        ("def candidate(q, k, v): pass", "it returned None: does it end with return?"),
        ("def candidate(q, k, v): import sys; sys.exit()", "it called sys.exit()"),
    ],
)
def test_a_fault_of_the_code_is_told_by_its_line_without_advice_about_sizes(code, says, tmp_path, capsys):
    assert main(["check", write(tmp_path, code)]) == 2
    said = capsys.readouterr().out
    assert says in said
    assert "size" not in said


def test_a_size_that_does_not_fit_is_told_with_advice(tmp_path, capsys):
    assert main(["check", write(tmp_path, "def candidate(q, k, v): return q @ np.ones((3, 2))")]) == 2
    assert "Give inputs of its size" in capsys.readouterr().out


def test_an_input_is_asked_for_each_of_q_k_and_v():
    verdict = tg.check.attention(lambda q, k, v: v, np.ones((7, 11)))
    assert verdict.problem == "it takes q, k, v: give an input for each, got 1"


def test_a_module_without_usual_names_is_not_plainly_passed():
    class Attention(tg.nn.Module):
        def __init__(self):
            self.first, self.second, self.third = (tg.nn.Linear(12, 12, rng=i) for i in range(3))

        def forward(self, x):
            return tg.nn.attention(self.first(x), self.second(x), self.third(x))

    assert tg.check.attention(Attention()).summary.endswith("its projections have no usual names")


def test_a_class_with_a_call_of_its_own_is_not_given_options_that_it_does_not_declare():
    class Attention(tg.nn.Module):
        def __init__(self, config, rng):
            self.wq, self.wk, self.wv, self.wo = (tg.nn.Linear(config.n_embd, config.n_embd, rng=rng) for _ in "qkvo")

        def __call__(self, x):
            allow = tg.nn.causal(x.shape[-2], x.shape[-2])
            return self.wo(tg.nn.attention(self.wq(x), self.wk(x), self.wv(x), allow=allow))

    verdict = tg.check.attention(Attention)
    assert verdict.ok, verdict


# ------------------------------------------------------------------------------------------------------------ in Python


def test_of_a_tuple_the_first_part_is_checked():
    def candidate(q, k, v):
        weights = softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
        return weights @ v, weights

    tg.check.attention(candidate).raise_if_failed()


def test_a_candidate_keeps_its_weights_its_mode_and_its_inputs():
    model = PlainModule()
    before = {name: p.numpy().copy() for name, p in model.named_parameters()}
    x = np.random.default_rng(0).standard_normal((7, 12)).astype(np.float32)
    copy = x.copy()
    model.train()
    state = np.random.get_state()[1].copy()
    tg.check.attention(model, x)
    assert model.training
    assert np.array_equal(x, copy)
    assert np.array_equal(np.random.get_state()[1], state)
    for name, p in model.named_parameters():
        assert p.dtype == np.float32
        assert p.grad is None
        assert np.array_equal(p.numpy(), before[name])


def test_a_verdict_is_the_same_each_time():
    first, second = (str(tg.check.attention(PlainModule(), np.ones((7, 12)) * np.arange(12))) for _ in range(2))
    assert first == second


def test_the_smallest_example_of_a_failure_is_small_and_shows_it():
    def sees_all(q, k, v):
        return softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v

    verdict = tg.check.attention(sees_all, causal=True)
    shown = next(f for f in verdict.failed if f.example)
    assert sum(np.size(value) for value in shown.example.values()) < 30


def test_a_formula_that_differs_has_a_small_example_too():
    verdict = tg.check.attention(lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v)
    (shown,) = (f for f in verdict.failed if f.name == "scale")
    assert 0 < sum(np.size(value) for value in shown.example.values()) < 30


def test_a_failure_is_one_line_in_a_test():
    with pytest.raises(AssertionError, match="scale"):
        tg.check.attention(lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v).raise_if_failed()


def test_a_report_is_true_only_if_it_is_ok():
    assert not tg.check.attention(lambda q, k, v: v)
    assert tg.check.attention(tg.nn.attention)
    assert tg.gradcheck(lambda x: x * x, tg.Tensor([1.0, 2.0]))
    assert not tg.gradcheck(lambda x: x.detach() * x, tg.Tensor([1.0, 2.0]), raises=False)
    with pytest.raises(TypeError, match="assert_causal"):
        bool(tg.check.dependencies(lambda x: x, np.ones((3, 2))))


def test_a_formula_of_another_kind_is_not_plainly_passed():
    def sigmoid_attention(q, k, v):
        return 1 / (1 + np.exp(-q @ k.swapaxes(-1, -2))) @ v

    verdict = tg.check.attention(sigmoid_attention)
    assert verdict.exit_code == 0
    end = "passed what applies; its formula is none that this check knows (weights do not sum to 1)"
    assert verdict.summary == end
    assert end in " ".join(str(verdict).split())
    assert end in verdict._repr_html_()


def weigh(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def square_distances(q, k):
    return ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(axis=-1)


OTHER_KINDS = {
    "a Gaussian kernel, whose scores are q k^T and what keys alone give": lambda q, k: -square_distances(q, k) / 2,
    "a wider one": lambda q, k: -square_distances(q, k) / 8,
    "distances": lambda q, k: -np.sqrt(square_distances(q, k)),
    "distances to the keys twice as far": lambda q, k: -square_distances(q, 2 * k) / 2,
    "scores and the lengths of the keys": lambda q, k: q @ k.mT + np.linalg.norm(k, axis=-1)[..., None, :],
    "cosines": lambda q, k: 10 * (q @ k.mT) / np.sqrt((q * q).sum(-1)[..., None] * (k * k).sum(-1)[..., None, :]),
    "polynomials": lambda q, k: np.log((1 + q @ k.mT) ** 2 + 1),
    "bounded scores": lambda q, k: 5 * np.tanh(q @ k.mT / 5),
}


def hide_later(scores, is_causal):
    n, m = scores.shape[-2:]
    return np.where(np.tri(n, m, m - n, dtype=bool), scores, -np.inf) if is_causal else scores


@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_attention_by_another_similarity_has_no_fault_of_the_formula(kind, is_causal):
    verdict = tg.check.attention(lambda q, k, v: weigh(hide_later(OTHER_KINDS[kind](q, k), is_causal)) @ v)
    assert verdict.summary == "passed what applies; its formula is none that this check knows", str(verdict)


OTHER_WEIGHTS = {
    "sigmoids": lambda scores: 1 / (1 + np.exp(-scores)),
    "squares of positive scores": lambda scores: np.maximum(scores, 0) ** 2,
    "inverse distances": lambda scores: 1 / (1 + np.where(np.isinf(scores), np.inf, scores**2)),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_attention_by_weights_that_do_not_sum_to_1_has_no_fault_of_the_formula(kind, is_causal):
    def weighted(q, k, v):
        return OTHER_WEIGHTS[kind](hide_later(q @ k.mT / q.shape[-1] ** 0.5, is_causal)) @ v

    verdict = tg.check.attention(weighted)
    assert verdict.ok, str(verdict)
    assert verdict.summary.endswith("none that this check knows (weights do not sum to 1)")


@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
def test_weights_that_all_underflow_are_told_from_an_exp_that_overflows(is_causal):
    def attend(q, k, v, scores):
        e = np.exp(hide_later(scores(q, k), is_causal))
        return e / e.sum(axis=-1, keepdims=True) @ v

    def cause(scores):
        (finding,) = tg.check.attention(lambda q, k, v: attend(q, k, v, scores)).failed
        return finding.cause

    assert cause(lambda q, k: -square_distances(q, k) / 2).startswith("all weights of a row underflow to 0")
    assert cause(lambda q, k: q @ k.mT / q.shape[-1] ** 0.5).startswith("exp overflows: the largest score")


def test_a_missing_scale_is_noticed_beside_a_bias_of_the_positions():
    def biased(q, k, v):
        return weigh(q @ k.mT - 0.5 * np.abs(np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2]))) @ v

    finding = tg.check.attention(biased).failed[0]
    assert "not divided by sqrt(d_k)" in finding.cause
    q, k = finding.example["q"], finding.example["k"]
    assert min(q.shape[-1], len(k)) > 1  # with one key, or with d_k = 1, the scale has no effect


@pytest.mark.parametrize(("name", "says"), [("norms", "does not depend on q and k"), ("scale", "more than one key")])
def test_what_attends_to_nothing_does_not_pass_a_claim_about_weights(name, says):
    (finding,) = (f for f in tg.check.attention(lambda q, k, v: v).findings if f.name == name)
    assert finding.status == "does not apply"
    assert says in finding.message


def test_the_smallest_input_of_a_wrong_window_has_tokens_that_it_should_not_see():
    def candidate(q, k, v, window=3):
        back = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        return softmax(np.where((back >= 0) & (back < window + 1), scores, -np.inf)) @ v

    (finding,) = (f for f in tg.check.attention(candidate).failed if f.name == "window")
    assert finding.example["q"].shape[0] == 4
    assert all(x.any(axis=-1).all() for x in finding.example.values())


def test_a_window_of_another_name_is_seen_and_not_judged():
    def candidate(q, k, v, w=2):
        back = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
        return softmax(np.where((back >= 0) & (back < w), q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)) @ v

    (finding,) = (f for f in tg.check.attention(candidate).findings if f.name == "window")
    assert finding.message.startswith("it sees the last 2 keys, and no option")


def test_a_notebook_shows_a_table():
    html = tg.check.attention(lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v)._repr_html_()
    assert "<table>" in html
    assert "scale" in html


def test_each_claim_of_the_suite_is_failed_by_some_fault():
    verdicts = [check(case) for case in FAULTS if case.name not in MISSED]
    claims = {f.name for v in verdicts for f in v.findings} - {"permutation"}  # says only whether order matters
    assert claims == {f.name for v in verdicts for f in v.failed}


def test_the_example_is_accepted_and_each_broken_one_is_caught(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    verdicts = importlib.import_module("check_your_own_attention").main()
    failed = {name: [finding.name for finding in verdict.failed] for name, verdict in verdicts.items()}
    assert failed["Fading"] == []
    assert failed["FadingByShare"][0] == "causality"
    assert len(verdicts["FadingByShare"].failed[0].example["x"]) == 3  # two rows, of which the first sees itself, pass
    assert failed["FadingFromZero"] == ["cache"]
    assert "padding" in failed["FadingOverPadding"]
    assert "FadingFromZero: FAILED (cache)" in capsys.readouterr().out
