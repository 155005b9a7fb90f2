"""The content of the walkthrough page: numbers, equations and dependence of rows are those of the run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha.nn.positions import Position, rotary
from tinygrad_mha.viz.diagram import heat
from tinygrad_mha.viz.page import document, equations, measure

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
    monkeypatch.setattr(document, "GOOD_CHARACTERS", len(tg.walkthrough(mha, x).html) - 1)
    short = numbers(tg.walkthrough(mha, x))
    assert short["X"].dtype == np.float32
    np.testing.assert_allclose(short["X"], x, rtol=1e-7)


def test_what_float32_cannot_hold_stays_float64(rng, monkeypatch):
    monkeypatch.setattr(document, "GOOD_CHARACTERS", 0)
    x = rng.standard_normal((5, 5))
    x[1, 2] = 1e200
    assert numbers(tg.walkthrough(attention(rng), x))["X"][1, 2] == 1e200


def test_infinity_and_nan_are_shown_without_a_warning(rng):
    x = rng.standard_normal((5, 5))
    x[3, 1], x[4, 0] = np.nan, np.inf
    page = tg.walkthrough(attention(rng), x)
    assert np.array_equal(numbers(page)["X"], x, equal_nan=True)
    assert np.isnan(numbers(page)["Y"][3]).all()
    assert np.isneginf(numbers(page)["masked_1"][0, 1:]).all()
    assert block(page, "data")["decode"][4]["difference"] is None


# --------------------------------------------------------------------------------------------------------------------
# Equations: each one on the page is evaluated as it is written


def evaluate(equation, values, gradients, causal):
    """Both sides of an equation: ∂Q_1 becomes d_Q_1, a matrix product remains a matrix product."""
    names = {**values, **{f"d_{name}": g for name, g in gradients.items()}}
    n = len(values["X"])
    allowed, positions = np.tri(n, dtype=bool) if causal else np.ones((n, n), dtype=bool), np.arange(n)
    names |= {
        "mask": lambda s: np.where(allowed, s, -np.inf),
        "where_allowed": lambda s: np.where(allowed, s, 0.0),
        "softmax": lambda s: tg.ops.softmax(s),
        "rotate": lambda x: rotary(x, positions),
        "rotate_back": lambda x: rotary(x, -positions),
        "row_sum": lambda x: x.sum(axis=1, keepdims=True),
        "column_sum": lambda x: np.atleast_2d(x).sum(axis=0, keepdims=True),
        "sum": np.sum,
        "concat": lambda *hs: np.concatenate(hs, axis=1),
        "sigmoid": tg.ops.sigmoid,
        "tanh": np.tanh,
    }
    left, _, right = equation.replace(equations.WORD_JOINER, "").replace("\u00a0", " ").partition(" = ")
    if " | " in right:
        right = f"concat({right.replace(' | ', ', ')})"
    right = re.sub(r"(\S+) where allowed", r"where_allowed(\1)", right).replace(" + …", "")
    replaced = {
        "row sum": "row_sum",
        "column sum": "column_sum",
        "′": "_back",
        "∂": "d_",
        "ᵀ": ".T",
        "·": "*",
        "−": "-",
    }
    for old, new in replaced.items():
        left, right = left.replace(old, new), right.replace(old, new)
    right = re.sub(r"(\w+)²", r"\1 ** 2", re.sub(r"√(\d+)", r"\1 ** 0.5", right))
    return eval(left, names), eval(right, names)


def split_sum(text):
    """The terms of a sum; a + in brackets is part of a term."""
    terms = [""]
    for part in re.split(r"( \+ )", text):
        if part == " + " and terms[-1].count("(") == terms[-1].count(")"):
            terms.append("")
        else:
            terms[-1] += part
    return terms


def assert_every_equation_holds(page, causal=True):
    """Compare both sides of all equations; return those with a cut sum, by what they are of, and all left sides."""
    values, gradients = numbers(page), numbers(page, "gradient")
    cut, made = {}, set()
    for walk in block(page, "data")["walks"]:
        for step in walk:
            for equation in step["forward"] + step["backward"]:
                if " = " not in equation:
                    assert equation in ("X", "∂Y")  # where a pass begins
                    continue
                left, right = evaluate(equation, values, gradients, causal)
                made.add(equation.split()[0])
                if equation.endswith("…"):
                    terms = split_sum(equation.partition(" = ")[2].removesuffix(" + …"))
                    cut.setdefault(equation.split()[0], {}).update(
                        {term: evaluate(f"X = {term}", values, gradients, causal)[1] for term in terms}
                    )
                else:
                    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=equation)
    for name, terms in cut.items():  # each head shows its own terms of the sum
        np.testing.assert_allclose(sum(terms.values()), gradients[name.removeprefix("∂")], rtol=1e-9, atol=1e-12)
    constants = {
        name
        for name in values
        if name.startswith(("W_", "b_", "alibi_", "relative_", "constant_", "temp", "gate", "X"))
    }
    free = {name for name in gradients if name.startswith("relative_")}
    assert made >= set(values) - constants | {f"∂{name}" for name in set(gradients) - {"Y"} - free}
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_equation_holds_for_the_numbers_of_the_run(rng, options, causal):
    mha = attention(rng, **options).astype(np.float64)
    page = tg.walkthrough(mha, rng.standard_normal((5, 5)), causal=causal, grad=rng.standard_normal((5, 3)))
    assert_every_equation_holds(page, causal)


def equations_of(page, head=0):
    return {step["out"]: step["forward"] + step["backward"] for step in block(page, "data")["walks"][head]}


def test_equations_read_as_in_the_paper(rng):
    page = tg.walkthrough(attention(rng, bias=True), rng.standard_normal((5, 5)))
    shown = {
        name: [text.replace(equations.WORD_JOINER, "~") for text in texts] for name, texts in equations_of(page).items()
    }
    projected = [("Q_1", "∂scores_1 / √7 @ K_1"), ("K_1", "∂scores_1ᵀ / √7 @ Q_1"), ("V_1", "S_1ᵀ @ ∂H_1")]
    for name, gradient in projected:
        forward = f"{name} = X @ W_{name[0]}1 + b_{name[0]}1"
        parameters = [f"∂W_{name[0]}1 = Xᵀ @ ∂{name}", f"∂b_{name[0]}1 = column sum( ∂{name} )"]
        assert shown.pop(name) == [forward, f"∂{name} = {gradient}", *parameters]
    assert shown == {
        "X": ["X", "∂X = ∂Q_1 @ W_Q1ᵀ + ∂K_1 @ W_K1ᵀ + ∂V_1 @ W_V1ᵀ + …"],
        "scores_1": ["scores_1 = Q_1 @ K_1ᵀ / √7", "∂scores_1 = ∂masked_1 where\u00a0allowed"],
        "masked_1": ["masked_1 = mask( scores_1 )", "∂masked_1 = S_1 * ( ∂S_1 − row sum(~∂S_1 * ~S_1))"],
        "S_1": ["S_1 = softmax( masked_1 )", "∂S_1 = ∂H_1 @ V_1ᵀ"],
        "H_1": ["H_1 = S_1 @ V_1", "∂H_1 = ∂Concat [:,0:11]"],
        "Concat": ["Concat = H_1 | H_2", "∂Concat = ∂Y @ W_Oᵀ"],
        "Y": ["Y = Concat @ W_O + b_O", "∂Y", "∂W_O = Concatᵀ @ ∂Y", "∂b_O = column sum( ∂Y )"],
    }


GPTS = {
    "GPT-2": {},
    "no bias": {"bias": False},
    "rotary, grouped": {"position": "rotary", "n_kv_head": 1},
    "alibi": {"position": "alibi"},
    "Llama": {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 2},
}


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
def test_every_equation_of_a_gpt_layer_holds(rng, options):
    config = tg.nn.GPTConfig(vocab_size=13, block_size=7, n_layer=2, n_head=2, n_embd=12, **options)
    page = tg.walkthrough(tg.nn.GPT(config).astype(np.float64), rng.integers(0, 13, 7), layer=1)
    assert_every_equation_holds(page)
    assert "other" not in {form for pair in forms_of(page).values() for form in pair}


def test_a_walk_has_ten_steps_under_a_mask_and_nine_without(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5))
    outs = [[step["out"] for step in walk] for walk in block(tg.walkthrough(mha, x), "data")["walks"]]
    assert outs[1] == ["X", "Q_2", "K_2", "V_2", "scores_2", "masked_2", "S_2", "H_2", "Concat", "Y"]
    (walk, _) = block(tg.walkthrough(mha, x, causal=False), "data")["walks"]
    assert [step["out"] for step in walk] == ["X", "Q_1", "K_1", "V_1", "scores_1", "S_1", "H_1", "Concat", "Y"]


def forms_of(page):
    """The explanations that the page selects, as page.js does: (forward, backward) of each step."""
    forms = json.loads(document.read_page_file("words.json"))["forms"]

    def select(kind, equation):
        text = re.sub(r"([A-Za-z]+)_[A-Za-z0-9]+", r"\1", equation)
        return next((key for key, form in forms[kind].items() if re.fullmatch(form, text)), "other")

    return {
        out: (select("forward", texts[0]), select("backward", texts[1])) for out, texts in equations_of(page).items()
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_step_of_our_own_attention_has_an_explanation(rng, options, causal):
    forms = forms_of(tg.walkthrough(attention(rng, **options), rng.standard_normal((5, 5)), causal=causal))
    assert "other" not in {form for pair in forms.values() for form in pair}
    biased = "position" in options and options["position"] != "rotary"
    assert forms.get("masked_1", ("", ""))[0] == "biased" * biased + "_" * (biased and causal) + "masked" * causal


# --------------------------------------------------------------------------------------------------------------------
# Attention of the user's own


def doubled(name, tensor):
    return tensor * 2 if name == "scores" else tensor


class Temperature(tg.nn.MultiHeadAttention):
    """Its forward has other scores, its per_head does not know."""

    def forward(self, x, causal=False, edit=None):
        def change(name, tensor):
            return doubled(name, tensor if edit is None else edit(name, tensor))

        return super().forward(x, causal=causal, edit=change)


class Biased(tg.nn.MultiHeadAttention):
    def forward(self, x, **options):
        return super().forward(x, bias=np.eye(x.shape[-2], dtype=x.dtype), **options)


class LooksAhead(tg.nn.MultiHeadAttention):
    def forward(self, x, causal=False, **options):
        return super().forward(x, causal=False, **options)


class Gated(tg.nn.MultiHeadAttention):
    """The same values as per_head, but no gradient through the weights."""

    def forward(self, x, **options):
        return super().forward(x, edit=lambda name, t: t.detach() if name == "weights" else t, **options)


@pytest.mark.parametrize(
    ("variant", "step"),
    [(Temperature, "masked_1"), (Biased, "masked_1"), (LooksAhead, "masked_1"), (Gated, "the gradient of X")],
)
def test_an_attention_whose_forward_differs_from_its_per_head_is_refused(rng, variant, step):
    mha = variant(5, n_head=2, d_k=7, d_v=11, rng=0)
    with pytest.raises(ValueError, match=f"forward and per_head of this {variant.__name__} differ") as error:
        tg.walkthrough(mha, rng.standard_normal((5, 5)))
    assert f" {step}." in str(error.value)


class AlwaysCausal(tg.nn.MultiHeadAttention):
    def forward(self, x):
        return super().forward(x, causal=True)


def test_a_forward_that_is_always_causal_agrees_with_a_causal_per_head_only(rng):
    mha, x = AlwaysCausal(5, n_head=2, rng=0), rng.standard_normal((5, 5))
    assert block(tg.walkthrough(mha, x), "data")["decode"] == []  # it takes no cache
    with pytest.raises(ValueError, match="differ first in Y"):
        tg.walkthrough(mha, x, causal=False)


class Variant(tg.nn.MultiHeadAttention):
    """A variant that changes both: scores times a learned temperature plus a bias, and a gate on the output."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.temperature = tg.Tensor([[1.5]], requires_grad=True)
        self.gate = tg.Tensor(np.random.default_rng(1).standard_normal((5, 3)), requires_grad=True)
        self.bias = np.random.default_rng(2).standard_normal((7, 7))

    def forward(self, x, causal=False):
        n = x.shape[-2]
        scale = lambda name, t: (t * self.temperature + self.bias[:n, :n]) if name == "scores" else t  # noqa: E731
        return super().forward(x, causal=causal, edit=scale) * tg.ops.sigmoid(x @ self.gate)

    def per_head(self, x, causal=False):
        steps = []
        n = x.shape[-2]
        for i in range(self.n_head):
            columns = slice(7 * i, 7 * i + 7), slice(11 * i, 11 * i + 11)
            weights = self.wq[:, columns[0]], self.wk[:, columns[0]], self.wv[:, columns[1]]
            q, k, v = (x @ w.named(f"W_{name}{i + 1}") for w, name in zip(weights, "QKV", strict=True))
            q, k, v = q.named(f"Q_{i + 1}"), k.named(f"K_{i + 1}"), v.named(f"V_{i + 1}")

            def observe(name, t, i=i):
                if name == "scores":
                    return (t * self.temperature + self.bias[:n, :n]).named(f"scores_{i + 1}")
                return t.named({"masked": "masked", "weights": "S", "heads": "H"}[name] + f"_{i + 1}")

            steps.append(tg.ops.attend(q, k, v, tg.nn.causal(n) if causal else None, observe=observe))
        concat = tg.ops.concat(steps, axis=-1).named("Concat")
        return (concat @ self.wo) * tg.ops.sigmoid(x @ self.gate).named("G")


def test_the_equations_of_a_variant_are_its_own(rng):
    mha = Variant(5, n_head=2, d_k=7, d_v=11, d_out=3, rng=0).astype(np.float64)
    page = tg.walkthrough(mha, rng.standard_normal((5, 5)), grad=rng.standard_normal((5, 3)))
    made = assert_every_equation_holds(page)
    assert {"∂temperature", "∂gate", "∂G"} < made
    shown = equations_of(page)
    assert shown["scores_1"][0] == "scores_1 = Q_1 @ K_1ᵀ / √7 * temperature + constant_1"
    assert shown["Y"][0] == "Y = Concat @ W_O * G"
    assert shown["G"][0] == "G = sigmoid( X @ gate )"
    forms = forms_of(page)
    assert [name for name, (forward, _) in forms.items() if forward == "other"] == ["scores_1", "G", "Y"]
    assert forms["Q_1"] == ("Q", "other")
    np.testing.assert_allclose(numbers(page)["Y"], mha(tg.Tensor(numbers(page)["X"]), causal=True).data, rtol=1e-9)


class Power(Position):
    rotates = True

    def rotate(self, x, positions):
        return (x + 1.0) * x


def test_the_formula_of_a_position_object_is_written_out(rng):
    page = tg.walkthrough(attention(rng, position=Power()).astype(np.float64), rng.standard_normal((5, 5)))
    assert_every_equation_holds(page)
    assert equations_of(page)["Q_1"][0] == "Q_1 = ( X @ W_Q1 + 1) * (\u2060X @ \u2060W_Q1)"


class Long(Position):
    rotates = True

    def rotate(self, x, positions):
        for _ in range(40):
            x = tg.ops.tanh(x) + x
        return x


class Fused(tg.nn.MultiHeadAttention):
    """Its per_head computes each head in one operation, without a name for scores and weights."""

    def per_head(self, x, causal=False):
        heads, allow = [], tg.nn.causal(x.shape[-2]) if causal else None
        for i in range(self.n_head):
            columns = slice(7 * i, 7 * i + 7)
            q, k, v = (
                (x @ w[:, columns].named(f"W_{name}{i + 1}")).named(f"{name}_{i + 1}")
                for name, w in zip("QKV", (self.wq, self.wk, self.wv), strict=True)
            )
            heads.append(tg.ops.attention(q, k, v, allow).named(f"H_{i + 1}"))
        return (tg.ops.concat(heads, axis=-1).named("Concat") @ self.wo).named("Y")


def test_a_fused_operation_is_written_with_its_mask(rng):
    mha = Fused(5, n_head=2, d_k=7, rng=0).astype(np.float64)
    page = tg.walkthrough(mha, rng.standard_normal((5, 5)))
    shown = equations_of(page)
    assert list(shown) == ["X", "Q_1", "K_1", "V_1", "H_1", "Concat", "Y"]
    assert shown["H_1"][0] == "H_1 = attention( Q_1 , K_1 , V_1 , condition 5×5)"
    assert shown["V_1"][1] == "∂V_1 = softmax(mask( Q_1 @ K_1ᵀ / √7))ᵀ @ ∂H_1"
    values, gradients = numbers(page), numbers(page, "gradient")
    assert "where\u00a0allowed" in shown["Q_1"][1]
    for equation in [*shown["V_1"], shown["Q_1"][0], shown["Q_1"][2]]:
        left, right = evaluate(equation, values, gradients, causal=True)
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=equation)


def test_a_step_of_many_operations_says_only_what_it_is_computed_from(rng):
    page = tg.walkthrough(attention(rng, position=Long()), rng.standard_normal((5, 5)))
    shown = equations_of(page)
    assert shown["Q_1"][0] == "Q_1 = f( X , W_Q1 )"
    assert re.fullmatch(r"∂W_Q1 = f\((\S| )*\)", shown["Q_1"][2])
    assert shown["S_1"][0] == "S_1 = softmax( masked_1 )"


def test_what_the_page_needs_must_have_a_name(rng):
    class Unnamed(tg.nn.MultiHeadAttention):
        def per_head(self, x, causal=False):
            return self(x, causal=causal)

    with pytest.raises(ValueError, match=r"must name the matrices X, Q_1, V_1, H_1, \.\.\.; it names .*Concat"):
        tg.walkthrough(Unnamed(5, n_head=2, rng=0), rng.standard_normal((5, 5)))


def test_decoding_says_where_it_differs(rng):
    class Length(tg.nn.MultiHeadAttention):
        """Its values depend on the number of tokens, which a cache does not reproduce."""

        def forward(self, x, cache=None, **options):
            return super().forward(x, cache=cache, **options) * float(x.shape[-2])

        def per_head(self, x, **options):
            return (super().per_head(x, **options) * float(x.shape[-2])).named("Y")

    page = tg.walkthrough(Length(5, n_head=2, rng=0), rng.standard_normal((5, 5)))
    assert [step["agrees"] for step in block(page, "data")["decode"]] == [False] * 5


# --------------------------------------------------------------------------------------------------------------------
# Dependence


def test_causal_rows_depend_on_earlier_rows_and_without_a_mask_on_all(rng):
    mha, x = attention(rng), rng.standard_normal((5, 5)).astype(np.float32)
    assert np.array_equal(reached(tg.walkthrough(mha, x))["Y"]["X"], np.tri(5, dtype=bool))
    assert reached(tg.walkthrough(mha, x, causal=False))["Y"]["X"].all()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_reach_of_rows_equals_that_of_one_derivative_at_a_time(rng, options):
    mha, x = attention(rng, **options), rng.standard_normal((5, 5))
    found = reached(tg.walkthrough(mha, x))
    mha.astype(np.float64)
    y = mha.per_head(tg.Tensor(x, requires_grad=True, name="X"), causal=True)
    order = [t for t in tg.engine.toposort([y]) if t.ndim <= 2]
    names = measure.name_tensors(y, mha)
    tensors = {names[id(t)]: t for t in order if names.get(id(t)) in block(tg.walkthrough(mha, x), "data")["matrices"]}
    for name, made in tensors.items():
        if not name.startswith(("W_", "b_", "X", "relative_")):
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


def test_a_query_with_one_visible_key_has_no_influence_on_its_weights(rng):
    found = reached(tg.walkthrough(attention(rng), rng.standard_normal((5, 5))))
    assert not found["S_1"]["Q_1"][0].any()
    assert found["S_1"]["Q_1"][1:].any(axis=1).all()


def test_a_bias_of_keys_changes_scores_but_not_weights(rng):
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
# Arguments


def test_the_module_is_not_changed(rng):
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


def test_a_batch_of_one_and_a_list_are_accepted(rng):
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
def test_errors_say_what_was_expected_and_what_came(rng, call, error, words):
    with pytest.raises(error, match=words):
        call(attention(rng), rng.standard_normal((5, 5)))


def test_errors_of_a_gpt_say_what_was_expected_and_what_came():
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


def test_token_text_cannot_become_markup(rng):
    page = tg.walkthrough(attention(rng), np.eye(5), tokens=HOSTILE)
    assert block(page, "data")["tokens"] == HOSTILE
    harmless = tg.walkthrough(attention(rng), np.eye(5), tokens=WORDS)
    assert page.html.count("<") == harmless.html.count("<")
    assert not set("\u2028\u2029\x00") & set(page.html)


def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_script_and_style(rng):
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


def test_a_notebook_shows_the_page_in_a_frame(rng):
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
    monkeypatch.setattr(document, "GOOD_CHARACTERS", 150_000)
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
    monkeypatch.setattr(document, "GOOD_CHARACTERS", 10)
    monkeypatch.setattr(document, "MAX_CHARACTERS", 10_000)
    with pytest.raises(ValueError, match=r"5 tokens and 2 heads would have 0\.1 MB even with 16 columns"):
        tg.walkthrough(attention(rng), np.eye(5))


def test_each_language_writes_percent_in_one_way():
    for file in ("words.json", "model_words.json", "lab_words.json"):
        words = json.loads(document.read_page_file(file))
        signs = {(lang, text) for lang in document.LANGUAGES for text in words[lang].values() if "%" in text}
        assert signs == ({("en", "{number}\u00a0%"), ("zh", "{number}%")} if file == "words.json" else set())


def test_both_languages_say_the_same_things():
    words = json.loads(document.read_page_file("words.json"))
    forms, signs = words.pop("forms"), words.pop("signs")
    assert set(words) == set(document.LANGUAGES)
    assert list(words["en"]) == list(words["zh"])
    for key, english in words["en"].items():
        for pattern in (r"\{(\w+)\}", r"\[(\w+)\]"):
            assert set(re.findall(pattern, english)) == set(re.findall(pattern, words["zh"][key])), key
    explained = {f"{prefix}_{form}" for form in [*forms["forward"], "other"] for prefix in ("why", "name")}
    explained |= {f"back_{form}" for form in [*forms["backward"], "other"]} | {"why_X_layer", "why_Concat_one"}
    explained |= {"loss_half_squares", "loss_given", "loss_next_token", "why_bias", "why_rotate", "why_shared"}
    built = {key for key in words["en"] if key.startswith(("why_", "back_", "name_", "loss_"))}
    assert built == explained
    quoted = set(
        re.findall(r"'([a-zA-Z_]+)'", document.read_page_file("common.js") + document.read_page_file("page.js"))
    )
    assert set(words["en"]) - built <= quoted | {
        "input",
        "parameter",
        "attention",
        "output",
        "constant",
        *signs.values(),
    }


def test_the_files_of_the_page_are_installed_with_the_package():
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert "viz/page/*" in pyproject["tool"]["setuptools"]["package-data"]["tinygrad_mha"]


def test_colours_of_the_page_are_those_of_the_graphs():
    script = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(document.__file__).parent.glob("*.js")))
    light = re.search(r"LIGHT = (\{.*?\});", script, re.DOTALL)[1]
    shown = json.loads(re.sub(r"(\w+):", r'"\1":', light))
    value, weight, gradient = (heat.PALETTES[name] for name in ("value", "attention", "gradient"))
    assert shown == {
        "zero": list(heat.ZERO),
        "values": [list(value[0]), list(value[2])],
        "attention": [list(weight[0]), list(weight[2])],
        "gradients": [list(gradient[0]), list(gradient[2])],
    }
    (power,) = re.findall(r"Math\.abs\(part\)\) \*\* ([\d.]+)", script)
    for part in (0.1, 0.5, 0.9):
        step = round(part ** float(power) * heat.STEPS)
        assert heat.colour_of(part, 1.0, "value") == heat.COLOURS["value"][step]


class Gained(tg.nn.MultiHeadAttention):
    """Multiplies the result by a constant matrix and by a parameter whose name begins like that of a key."""

    gain = None

    def per_head(self, x, causal=False):
        parts = super().per_head(x, causal=causal) @ np.arange(25.0).reshape(5, 5)
        return (parts * self.gain).named("Y")

    def forward(self, x, causal=False, edit=None):
        return self.per_head(x, causal)


def test_a_constant_has_one_title_and_belongs_to_tokens_only_where_scores_are_made_from_it(rng):
    mha = Gained(5, n_head=2, d_k=7, d_v=11, bias=False, rng=0)
    mha.gain = tg.Tensor(np.ones((1, 5)), requires_grad=True, name="K_gain")
    page = tg.walkthrough(mha.astype(np.float64), rng.standard_normal((5, 5)), grad=rng.standard_normal((5, 5)))
    matrices = block(page, "data")["matrices"]
    assert "constant_2" not in matrices
    assert matrices["constant_1"]["tokens"] == [False, False]
    assert not matrices["K_gain"]["cached"]


@pytest.mark.parametrize("path", ["per_head", "edit"])
def test_attention_weights_are_known_as_such_whichever_way_an_attention_shows_its_steps(rng, path):
    class Shown(tg.nn.Module):
        """An attention that shows its steps to `edit` only."""

        def __init__(self, attention):
            self.attention = attention

        def forward(self, x, edit=None):
            return self.attention(x, causal=True, edit=edit)

    mha = tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
    page = tg.walkthrough(mha if path == "per_head" else Shown(mha), rng.standard_normal((3, 5)))
    matrices = block(page, "data")["matrices"]
    assert [matrices[name]["kind"] for name in ("S_1", "S_2", "H_1")] == ["attention", "attention", ""]


def test_of_a_translator_one_attention_is_to_be_chosen():
    model = tg.nn.Transformer(11, 13, d_model=6, n_head=2, n_layer=1, d_ff=7, max_len=5, seed=0)
    with pytest.raises(TypeError, match=r"got Transformer\. Of this model, choose one attention: encoder\.0\.attn, "):
        tg.walkthrough(model, [1, 2])
    assert (
        tg.walkthrough(model.encoder[0].attn, np.eye(3, 6, dtype=np.float32), causal=False).summary
        == "3 tokens and 2 heads"
    )
