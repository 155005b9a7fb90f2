"""What the walkthrough page holds: true numbers, true equations, true dependence, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.nn.positions import rotary

# The module, which in its package stands behind the function of the same name.
module = sys.modules[tg.walkthrough.__module__]
observed = sys.modules["tinygrad_mha.viz.page.measure"]

WORDS = ["the", "cat", "sat", "on", "mats"]

KINDS = {
    "plain": {},
    "one head": {"n_head": 1},
    "bias": {"bias": True},
    "shared keys": {"n_head": 4, "n_kv_head": 2, "bias": True},
    "rotary": {"position": "rotary", "d_k": 6, "bias": True},
    "alibi": {"position": "alibi"},
    "relative": {"position": tg.nn.Relative(num_buckets=4, max_distance=4)},
}


def attention(rng, **options):
    mha = tg.nn.MultiHeadAttention(**({"d_model": 5, "n_head": 2, "d_k": 7, "d_v": 11, "d_out": 3, "rng": 0} | options))
    for parameter in mha.parameters():
        if parameter.ndim == 1:
            parameter.assign_(rng.standard_normal(parameter.shape))
    return mha


def block(page, name):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page.html, re.S)[1])


def unpack(matrix, what="values"):
    ((kind, text),) = matrix[what].items()
    return np.frombuffer(base64.b64decode(text), "<" + kind).reshape(matrix["rows"], matrix["columns"])


def numbers(page, what="values"):
    matrices = block(page, "data")["matrices"]
    return {name: unpack(matrix, what) for name, matrix in matrices.items() if matrix[what]}


def reached(page):
    """{made: {from: boolean matrix}}, as a reader of the page would decode it."""
    data = block(page, "data")
    found = {}
    for made, sources in data["reach"]["pairs"].items():
        for source, index in sources.items():
            shape = data["matrices"][made]["rows"], data["matrices"][source]["rows"]
            bits = np.frombuffer(base64.b64decode(data["reach"]["patterns"][index]), np.uint8)
            found.setdefault(made, {})[source] = np.unpackbits(bits)[: shape[0] * shape[1]].reshape(shape).astype(bool)
    return found


# --------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_are_those_of_the_layer(rng, causal):
    mha = attention(rng)
    x, g = rng.standard_normal((5, 5)), rng.standard_normal((5, 3))
    page = tg.walkthrough(mha, x, causal=causal, grad=g)
    y, trace = mha(tg.Tensor(x, requires_grad=True), causal=causal, trace=True)
    y.backward(g)
    values, gradients = numbers(page), numbers(page, "gradient")
    fields = {"Q": "q", "K": "k", "V": "v", "scores": "scores", "S": "weights", "H": "heads"}
    fields |= {"masked": "masked"} if causal else {}
    for name, field in fields.items():
        for head in range(2):
            tensor = getattr(trace, field)
            np.testing.assert_allclose(values[f"{name}_{head + 1}"], tensor.data[head], rtol=1e-12)
            np.testing.assert_allclose(gradients[f"{name}_{head + 1}"], tensor.grad[head], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(values["Y"], y.data, rtol=1e-12)
    np.testing.assert_allclose(gradients["W_O"], mha.wo.grad, rtol=1e-6)
    np.testing.assert_allclose(gradients["W_K2"], mha.wk.grad[:, 7:], rtol=1e-5, atol=1e-7)
    assert np.array_equal(gradients["Y"], g)


def test_float32_numbers_are_exact(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5)).astype(np.float32)
    values = numbers(tg.walkthrough(mha, x))
    assert values["Y"].dtype == np.float32
    assert np.array_equal(values["Y"], mha.per_head(x, causal=True).data)
    assert np.array_equal(values["W_Q2"], mha.wq.data[:, 7:])


def test_float64_numbers_are_exact_in_a_small_page_and_have_seven_digits_in_a_large_one(rng, monkeypatch):
    mha, x = attention(rng), rng.standard_normal((5, 5))
    exact = numbers(tg.walkthrough(mha, x))
    assert np.array_equal(exact["X"], x)
    monkeypatch.setattr(module, "GOOD_BYTES", len(tg.walkthrough(mha, x).html) - 1)
    short = numbers(tg.walkthrough(mha, x))
    assert short["X"].dtype == np.float32
    np.testing.assert_allclose(short["X"], x, rtol=1e-7)


def test_what_float32_cannot_hold_stays_float64(rng, monkeypatch):
    monkeypatch.setattr(module, "GOOD_BYTES", 0)
    x = rng.standard_normal((5, 5))
    x[1, 2] = 1e200
    assert numbers(tg.walkthrough(attention(rng), x))["X"][1, 2] == 1e200


def test_infinity_and_nan_are_shown_and_nobody_is_warned(rng):
    x = rng.standard_normal((5, 5))
    x[3, 1], x[4, 0] = np.nan, np.inf
    page = tg.walkthrough(attention(rng), x)
    assert np.array_equal(numbers(page)["X"], x, equal_nan=True)
    assert np.isnan(numbers(page)["Y"][3]).all()
    assert np.isneginf(numbers(page)["masked_1"][0, 1:]).all()
    assert block(page, "data")["decode"][4]["difference"] is None


# --------------------------------------------------------------------------------------------------------------------
# Equations: each one that the page shows is computed as it stands


def computed(equation, values, gradients, causal):
    """Both sides of an equation of the page, by Python: ∂Q_1 becomes d_Q_1, a matrix product stays a matrix product."""
    names = {**values, **{f"d_{name}": g for name, g in gradients.items()}}
    n = len(values["X"])
    seen, places = np.tri(n, dtype=bool) if causal else np.ones((n, n), dtype=bool), np.arange(n)
    forward = "∂" not in equation
    names |= {
        "mask": lambda s: np.where(seen, s, -np.inf if forward else 0.0),
        "softmax": lambda s: tg.ops.softmax(s),
        "rotate": lambda x: rotary(x, places),
        "rotate_back": lambda x: rotary(x, -places),
        "row_sums": lambda x: x.sum(axis=1, keepdims=True),
        "sum_of_rows": lambda x: np.atleast_2d(x).sum(axis=0, keepdims=True),
        "concat": lambda *hs: np.concatenate(hs, axis=1),
    }
    left, _, right = equation.partition(" = ")
    if " | " in right:
        right = f"concat({right.replace(' | ', ', ')})"
    right = re.sub(r"Σᵢ (.*)", r"sum_of_rows(\1)", right).replace(" + …", "")
    for old, new in {"rotate⁻¹ ": "rotate_back", "Σⱼ": "row_sums", "∂": "d_", "ᵀ": ".T", "∘": "*", "−": "-"}.items():
        left, right = left.replace(old, new), right.replace(old, new)
    right = re.sub(r"√(\d+)", r"\1 ** 0.5", right)
    return eval(left, names), eval(right, names)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_equation_is_true(rng, options, causal):
    mha = attention(rng, **options).astype(np.float64)
    page = tg.walkthrough(mha, rng.standard_normal((5, 5)), causal=causal, grad=rng.standard_normal((5, 3)))
    values, gradients = numbers(page), numbers(page, "gradient")
    made, to_x = set(), {}
    for walk in block(page, "data")["walks"]:
        for step in walk:
            for equation in step["forward"] + step["backward"]:
                if " = " not in equation:
                    assert equation in ("X", "∂Y")  # where a walk begins
                    continue
                left, right = computed(equation, values, gradients, causal)
                made.add(equation.split()[0])
                if equation.endswith("…"):
                    to_x |= {term: computed(f"∂X = {term}", values, gradients, causal)[1] for term in terms(equation)}
                else:
                    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=equation)
    if to_x:  # each head shows its own part of the sum
        np.testing.assert_allclose(sum(to_x.values()), gradients["X"], rtol=1e-9, atol=1e-12)
    constants = {name for name in values if name.startswith(("W_", "b_", "alibi_", "relative_", "X"))}
    assert made == set(values) - constants | {f"∂{name}" for name in gradients} - {"∂Y"}


def terms(equation):
    return equation.partition(" = ")[2].removesuffix(" + …").split(" + ")


def test_a_walk_has_ten_steps_under_a_mask_and_nine_without(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5))
    outs = [[step["out"] for step in walk] for walk in block(tg.walkthrough(mha, x), "data")["walks"]]
    assert outs[1] == ["X", "Q_2", "K_2", "V_2", "scores_2", "masked_2", "S_2", "H_2", "Concat", "Y"]
    (walk, _) = block(tg.walkthrough(mha, x, causal=False), "data")["walks"]
    assert [step["kind"] for step in walk] == ["X", "Q", "K", "V", "scores", "S", "H", "Concat", "Y"]


# --------------------------------------------------------------------------------------------------------------------
# Dependence


def test_causal_rows_depend_on_earlier_rows_and_without_a_mask_on_all(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5)).astype(np.float32)
    assert np.array_equal(reached(tg.walkthrough(mha, x))["Y"]["X"], np.tri(5, dtype=bool))
    assert reached(tg.walkthrough(mha, x, causal=False))["Y"]["X"].all()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_reach_of_rows_is_that_of_one_derivative_at_a_time(rng, options):
    mha, x = attention(rng, **options), rng.standard_normal((5, 5))
    found = reached(tg.walkthrough(mha, x))
    mha.astype(np.float64)
    y = mha.per_head(tg.Tensor(x, requires_grad=True, name="X"), causal=True)
    tensors = observed.named(y, mha)
    for name, made in tensors.items():
        if not name.startswith(("W_", "b_", "X")):
            assert set(found[name]) <= set(tensors)
            for i in range(5):
                direction = rng.standard_normal(made.shape) * (np.arange(5) == i)[:, None]
                sources = [
                    s for s, t in tensors.items() if t is made or (t.node is None) or t.node.stamp < made.node.stamp
                ]
                pulled = tg.grad(made, [tensors[s] for s in sources], grad_output=direction)
                largest = max(np.abs(g.data).max() for g in pulled)
                for source, g in zip(sources, pulled, strict=True):
                    expected = np.abs(np.atleast_2d(g.data)).max(axis=1) > 1e-9 * largest
                    rows = found[name].get(source, np.zeros((5, len(expected)), dtype=bool))
                    assert np.array_equal(rows[i], expected), (name, i, source)


def test_one_visible_key_leaves_nothing_to_choose_so_its_query_reaches_nothing(rng):
    found = reached(tg.walkthrough(attention(rng), rng.standard_normal((5, 5))))
    assert not found["S_1"]["Q_1"][0].any()
    assert found["S_1"]["Q_1"][1:].any(axis=1).all()


def test_a_bias_of_keys_moves_scores_but_no_weight(rng):
    found = reached(tg.walkthrough(attention(rng, bias=True), rng.standard_normal((5, 5))))
    assert found["scores_1"]["b_K1"].all()
    assert "b_K1" not in found["S_1"]


# --------------------------------------------------------------------------------------------------------------------
# Decoding


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_decoding_computes_one_row_reads_the_rest_and_gives_the_same_y(rng, options):
    page = tg.walkthrough(attention(rng, **options).astype(np.float64), rng.standard_normal((5, 5)))
    for t, step in enumerate(block(page, "data")["decode"], 1):
        assert step["computed"] == [t - 1]
        assert step["cached"] == list(range(t - 1))
        assert step["read"] == t
        assert step["difference"] < 1e-12


def test_multiply_adds_are_those_of_the_formula(rng):
    d_model, heads, d_k, d_v, d_out = 5, 2, 7, 11, 3
    page = tg.walkthrough(attention(rng), rng.standard_normal((5, 5)))
    for t, step in enumerate(block(page, "data")["decode"], 1):
        row = d_model * heads * (2 * d_k + d_v) + heads * d_v * d_out
        assert step["products"] == row + heads * t * (d_k + d_v)
        assert step["products_without"] == t * (row + heads * t * (d_k + d_v))


def test_without_a_mask_there_is_no_decoding(rng):
    assert block(tg.walkthrough(attention(rng), np.eye(5), causal=False), "data")["decode"] == []


# --------------------------------------------------------------------------------------------------------------------
# What it is asked of


def test_nothing_of_the_module_is_changed(rng):
    mha = attention(rng, dropout=0.5)
    mha.wk.requires_grad = False
    before = mha.state_dict(), mha.heads.dropout.rng.bit_generator.state
    with tg.no_grad():
        values = numbers(tg.walkthrough(mha, rng.standard_normal((5, 5))))
    assert mha.training
    assert mha.wq.grad is None
    assert not mha.wk.requires_grad
    assert mha.heads.dropout.rng.bit_generator.state == before[1]
    assert all(np.array_equal(a, before[0][name]) for name, a in mha.state_dict().items())
    np.testing.assert_allclose(values["S_1"] @ values["V_1"], values["H_1"], rtol=1e-12)  # no weight was dropped


def test_the_default_loss_is_half_the_sum_of_squares(rng):
    page = tg.walkthrough(attention(rng), rng.standard_normal((5, 5)))
    assert np.array_equal(numbers(page, "gradient")["Y"], numbers(page)["Y"])
    assert block(page, "data")["facts"]["loss"] == "half_squares"
    given = tg.walkthrough(attention(rng), rng.standard_normal((5, 5)), grad=tg.Tensor(np.ones((5, 3))))
    assert block(given, "data")["facts"]["loss"] == "given"


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layer_of_a_gpt_has_the_models_own_input_and_gradients(rng, norm_first):
    config = tg.nn.GPTConfig(
        vocab_size=13, block_size=7, n_layer=3, n_head=2, n_embd=10, norm_first=norm_first, dropout=0.1
    )
    model = tg.nn.GPT(config).astype(np.float64)
    ids = rng.integers(0, 13, 7)
    page = tg.walkthrough(model, ids, layer=1)
    data, values, gradients = block(page, "data"), numbers(page), numbers(page, "gradient")
    assert data["tokens"] == [str(i) for i in ids]

    model.eval()
    _, trace = model(ids, trace=True)
    np.testing.assert_allclose(values["S_2"], trace.attention[1].weights.data[1], rtol=1e-9)
    loss = model.loss(ids[:-1], ids[1:])
    loss.backward()
    attn = model.h[1].attn
    np.testing.assert_allclose(gradients["W_O"], attn.c_proj.weight.grad, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(gradients["b_O"][0], attn.c_proj.bias.grad, rtol=1e-7, atol=1e-12)
    for i, name in enumerate(("Q", "K", "V")):
        for head in range(2):
            columns = slice(10 * i + 5 * head, 10 * i + 5 * head + 5)
            np.testing.assert_allclose(
                gradients[f"W_{name}{head + 1}"], attn.c_attn.weight.grad[:, columns], rtol=1e-6, atol=1e-12
            )
    assert data["facts"]["loss_value"] == pytest.approx(loss.item(), rel=1e-12)


def test_a_batch_of_one_and_a_list_are_taken(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5)).astype(np.float32)
    assert tg.walkthrough(mha, x[None]).html == tg.walkthrough(mha, x).html
    assert tg.walkthrough(mha, x.tolist()).html == tg.walkthrough(mha, tg.Tensor(x, requires_grad=True)).html


def test_one_token_needs_no_mask(rng):
    data = block(tg.walkthrough(attention(rng), rng.standard_normal((1, 5))), "data")
    assert "masked_1" not in data["matrices"]
    assert data["tokens"] == ["1"]


WRONG = {
    "neither": (
        lambda m, x: tg.walkthrough(tg.nn.Linear(5, 5), x),
        TypeError,
        "expected a MultiHeadAttention or a GPT",
    ),
    "batch": (lambda m, x: tg.walkthrough(m, np.stack([x, x])), ValueError, r"got shape \(2, 5, 5\)"),
    "empty": (lambda m, x: tg.walkthrough(m, x[:0]), ValueError, "at least one token"),
    "long": (lambda m, x: tg.walkthrough(m, np.ones((65, 5))), ValueError, "64 tokens, got 65"),
    "wide": (lambda m, x: tg.walkthrough(m, np.ones((5, 4))), ValueError, "d_model"),
    "tokens": (lambda m, x: tg.walkthrough(m, x, tokens=WORDS[:4]), ValueError, "5 tokens; got 4"),
    "ids": (lambda m, x: tg.walkthrough(m, x, tokens=range(5)), TypeError, "tokens are strings"),
    "grad": (lambda m, x: tg.walkthrough(m, x, grad=np.ones((3, 5))), ValueError, r"\(5, 3\), got \(3, 5\)"),
    "lang": (lambda m, x: tg.walkthrough(m, x, lang="fr"), ValueError, "'en', 'zh'"),
    "layer": (lambda m, x: tg.walkthrough(m, x, layer=0), ValueError, "one attention by itself"),
}


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_bad_input_is_named(rng, call, error, words):
    with pytest.raises(error, match=words):
        call(attention(rng), rng.standard_normal((5, 5)))


def test_bad_input_of_a_gpt_is_named():
    model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=13, block_size=7, n_layer=2, n_head=2, n_embd=6))
    with pytest.raises(ValueError, match="layers 0 to 1, got layer=2"):
        tg.walkthrough(model, [1, 2], layer=2)
    with pytest.raises(TypeError, match="must be integers"):
        tg.walkthrough(model, np.ones((3, 6)))
    with pytest.raises(ValueError, match="causal=False cannot be shown"):
        tg.walkthrough(model, [1, 2], causal=False)


# --------------------------------------------------------------------------------------------------------------------
# The file

HOSTILE = ["</script><b>x", "<!--<script>", "\u2028\u2029&amp;", '"]}', "\ud800 \x00"]


def test_token_text_cannot_leave_its_place(rng):
    page = tg.walkthrough(attention(rng), np.eye(5), tokens=HOSTILE)
    assert block(page, "data")["tokens"] == HOSTILE
    calm = tg.walkthrough(attention(rng), np.eye(5), tokens=WORDS)
    assert page.html.count("<") == calm.html.count("<")
    assert not set("\u2028\u2029\x00") & set(page.html)


def test_the_page_asks_for_nothing_and_allows_nothing_but_itself(rng):
    page = tg.walkthrough(attention(rng), np.eye(5)).html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(|innerHTML|insertAdjacentHTML|document\.write", page)
    assert "{{" not in page


def test_saving_writes_the_whole_page_and_a_failure_leaves_nothing(rng, tmp_path):
    page = tg.walkthrough(attention(rng), np.eye(5), path=tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page.html
    assert page.save(tmp_path / "b.html") == tmp_path / "b.html"
    with pytest.raises(OSError, match="missing"):
        page.save(tmp_path / "missing" / "c.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]
    assert repr(page) == 'Walkthrough of 5 tokens and 2 heads: .save("page.html") writes it'


def test_a_notebook_gets_a_frame_of_its_own(rng):
    page = tg.walkthrough(attention(rng), np.eye(5), tokens=HOSTILE)
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" [^>]*></iframe>', page._repr_html_())
    assert html.unescape(frame[1]) == page.html


def test_the_same_run_gives_the_same_bytes(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5))
    assert tg.walkthrough(mha, x).html == tg.walkthrough(mha, x).html


@pytest.mark.parametrize("width", [32, 192])
def test_a_page_of_12_tokens_and_4_heads_stays_under_a_megabyte(rng, width):
    mha = tg.nn.MultiHeadAttention(width, n_head=4, rng=0)
    page = tg.walkthrough(mha, rng.standard_normal((12, width)).astype(np.float32))
    assert len(page.html.encode()) < 1_000_000


def test_wide_matrices_are_cut_to_what_fits_and_say_so(rng, monkeypatch):
    monkeypatch.setattr(module, "GOOD_BYTES", 150_000)
    mha = tg.nn.MultiHeadAttention(46, n_head=2, rng=0)
    x = rng.standard_normal((3, 46)).astype(np.float32)
    page = tg.walkthrough(mha, x)
    matrices = block(page, "data")["matrices"]
    assert len(page.html) <= 150_000
    assert matrices["W_Q1"]["shape"] == [46, 23]
    assert [matrices["W_O"][side] for side in ("rows", "columns")] == [32, 32]
    assert [matrices["X"][side] for side in ("rows", "columns")] == [3, 46]  # parameters are cut first
    np.testing.assert_array_equal(numbers(page)["W_O"], mha.wo.data[:32, :32])
    assert reached(page)["Y"]["W_O"].shape == (3, 32)


def test_a_page_that_would_be_too_large_is_refused(rng, monkeypatch):
    monkeypatch.setattr(module, "GOOD_BYTES", 10)
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"5 tokens and 2 heads would have 0\.1 MB even with 16 columns"):
        tg.walkthrough(attention(rng), np.eye(5))


def test_both_languages_say_the_same_things():
    words = json.loads(module.page_file("words.json"))
    assert set(words) == set(module.LANGUAGES)
    assert list(words["en"]) == list(words["zh"])
    for key, english in words["en"].items():
        for pattern in (r"\{(\w+)\}", r"\[(\w+)\]"):
            assert set(re.findall(pattern, english)) == set(re.findall(pattern, words["zh"][key])), key
    quoted = set(re.findall(r"'([a-zA-Z_]+)'", module.page_file("page.js")))
    built = ("why_", "back_", "name_", "loss_")  # and a kind of step or loss
    assert {key for key in words["en"] if not key.startswith(built)} <= quoted | set(module.KINDS.values())


def test_the_files_of_the_page_are_installed_with_the_package():
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert "viz/page/*" in pyproject["tool"]["setuptools"]["package-data"]["tinygrad_mha"]
