"""`check.derivation` names the first wrong formula of a backward pass, and what is wrong with it."""

import json

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import check, nn, ops
from tinygrad_mha.files import python_files

T, C, D, D_V = 3, 5, 7, 11
RNG = np.random.default_rng(0)
SHAPES = {"X": (T, C), "W_Q": (C, D), "W_K": (C, D), "W_V": (C, D_V), "W_O": (D_V, C), "b": (C,)}
INPUTS = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}
ALLOW = np.tri(T, dtype=bool)
NOT_FINITE = "not finite, first at [0, 0]: a division by 0, or a logarithm or root of a negative number?"
NO_GRADIENT = "it does not depend on dY: by the chain rule, each term has a gradient as a factor"
WRONG_SUM = "a sum over axis {1} is wrong: a sum over axis {0} is right"


def attend(X, W_Q, W_K, W_V, W_O, b):
    Q, K, V = (X @ W_Q).named("Q"), (X @ W_K).named("K"), (X @ W_V).named("V")
    S = ((Q @ K.mT) / D**0.5).named("S")
    M = ops.where(ALLOW, S, -np.inf).named("M")
    P = M.softmax().named("P")
    H = (P @ V).named("H")
    return H @ W_O + b


RIGHT = {
    "db": lambda dY: dY.sum(axis=0),
    "dW_O": lambda dY, H: H.T @ dY,
    "dH": lambda dY, W_O: dY @ W_O.T,
    "dV": lambda dH, P: P.T @ dH,
    "dP": lambda dH, V: dH @ V.T,
    "dM": lambda dP, P: P * (dP - (P * dP).sum(axis=-1, keepdims=True)),
    "dS": lambda dM: np.where(ALLOW, dM, 0),
    "dQ": lambda dS, K: dS @ K / D**0.5,
    "dK": lambda dS, Q: dS.T @ Q / D**0.5,
    "dW_Q": lambda dQ, X: X.T @ dQ,
    "dW_K": lambda dK, X: X.T @ dK,
    "dW_V": lambda dV, X: X.T @ dV,
    "dX": lambda dQ, dK, dV, W_Q, W_K, W_V: dQ @ W_Q.T + dK @ W_K.T + dV @ W_V.T,
}


def test_right_formulas_pass_in_the_order_of_the_backward_pass():
    verdict = check.derivation(attend, INPUTS, RIGHT)
    assert verdict.ok
    assert verdict.first_wrong is None
    names = [finding.name for finding in verdict.findings]
    assert sorted(names) == sorted(RIGHT)
    assert names[:6] == ["db", "dW_O", "dH", "dP", "dM", "dS"]
    assert all(f.details["difference"] < 1e-12 for f in verdict.findings)


@pytest.mark.parametrize(
    ("name", "formula", "cause"),
    [
        (
            "dM",
            lambda dP, P: P * dP,
            "a row sum is missing or wrong: subtract a term with a sum over axis -1",
        ),
        ("dM", lambda dP, P: dP - (P * dP).sum(axis=-1, keepdims=True), "a factor P is missing"),
        (
            "dM",
            lambda dP, P: P * (1 - P) * dP,
            "each element of P depends on others too, the formula has its own alone",
        ),
        (
            "dM",
            lambda dP, P: P * (dP - (P * dP).sum()),
            "a sum over axis None is wrong: a sum over axis -1 with keepdims=True is right",
        ),
        ("dM", lambda dP, P: P * ((P * dP).sum(axis=-1, keepdims=True) - dP), "the sign is wrong, of every element"),
        ("dQ", lambda dS, K: dS @ K, "a factor of 1/sqrt(7) is missing"),
        ("dK", lambda dS, Q: (dS.T @ Q / D**0.5).T, "a transpose: dK.mT is right"),
        ("db", lambda dY: dY, "the sum over a broadcast axis is missing: db.sum(axis=(0,)) is right"),
        ("db", lambda dY: dY.mean(axis=0), "a mean over axis 0 is wrong: a sum over axis 0 is right"),
        ("db", lambda dY: dY.sum(axis=0, keepdims=True), "the shape: db.reshape(5,) is right"),
        ("dM", lambda dP, P: np.where(ALLOW, RIGHT["dM"](dP, P), 1), "it is not 0 where it must be: a mask is missing"),
        ("dX", lambda dQ, W_Q, dV, W_V: dQ @ W_Q.T + dV @ W_V.T, "what comes through K is missing"),
        ("dX", lambda dV, W_V: dV @ W_V.T, "what comes through Q, K is missing"),
        (
            "dX",
            lambda dQ, dK, W_Q, W_K: dQ @ W_Q.T - 2 * dK @ W_K.T,
            "what comes through V is missing; what comes through K times -2 should come once",
        ),
        ("dK", lambda dS, K: dS.T @ K / D**0.5, "with Q in place of K it is right"),
        ("dX", lambda dY: np.ones((T, C)), NO_GRADIENT),
        ("dX", lambda **_: np.full((T, C), np.nan), NOT_FINITE),
        ("dW_Q", lambda dQ, X: X @ dQ, "an operand is transposed: with X.mT in place of X it is right"),
        ("dP", lambda dH, V: dH @ V, "an operand is transposed: with V.mT in place of V it is right"),
        ("dV", lambda dH, P: P @ dH, "an operand is transposed: with P.mT in place of P it is right"),
        ("db", lambda dY: dY.sum(axis=1), WRONG_SUM.format(-2, 1)),
        ("dM", lambda dP, P: P * (dP - (P * dP).sum(axis=0, keepdims=True)), WRONG_SUM.format(-1, 0)),
        ("dM", lambda dP, P: P * (dP - np.sum(P * dP, 0, keepdims=True)), WRONG_SUM.format(-1, 0)),
        ("db", lambda dY: np.einsum("ij->j", dY) / T, "a factor of 3 is missing"),
        (
            "dH",
            lambda dY, W_O: (dY @ W_O.T).astype(np.float32),
            "numbers are rounded to float32: compute in float64",
        ),
        ("dQ", lambda dS, K: -dS @ K, "a factor of -1/sqrt(7) is missing"),
    ],
)
def test_one_wrong_formula_is_the_only_one_and_its_cause_is_named(name, formula, cause):
    verdict = check.derivation(attend, INPUTS, RIGHT | {name: formula})
    assert [finding.name for finding in verdict.failed] == [name]
    assert verdict.first_wrong == name
    assert verdict.failed[0].cause == cause


def test_of_two_wrong_formulas_the_one_nearer_to_the_output_is_the_first():
    wrong = {"dX": lambda dQ: dQ[:, :C], "dM": lambda dP, P: P * dP}
    verdict = check.derivation(attend, INPUTS, wrong)
    assert [finding.name for finding in verdict.failed] == ["dM", "dX"]
    assert verdict.first_wrong == "dM"


def test_a_missing_mask_is_named():
    def forward(x):
        return (x.relu().named("a") * 3.0).named("y")

    verdict = check.derivation(forward, {"x": RNG.standard_normal((T, C))}, {"dx": lambda da: da})
    assert verdict.failed[0].cause == "it is not 0 where it must be: a mask is missing"


@pytest.mark.parametrize("part", ["first", "second"])
def test_each_mean_of_a_layer_norm_is_named_if_it_is_missing(part):
    def forward(x):
        centered = x - x.mean(axis=-1, keepdims=True)
        sigma = ((centered**2).mean(axis=-1, keepdims=True) ** 0.5).named("sigma")
        return {"sigma": sigma, "y": centered / sigma}

    def dx(dy, y, sigma):
        first = dy.mean(axis=-1, keepdims=True) if part != "first" else 0
        second = y * (dy * y).mean(axis=-1, keepdims=True) if part != "second" else 0
        return (dy - first - second) / sigma

    verdict = check.derivation(forward, {"x": RNG.standard_normal((T, C))}, {"dx": dx})
    cause = "a row mean is missing or wrong: subtract a term with a mean over axis -1"
    assert verdict.failed[0].cause == cause


def test_a_missing_factor_may_be_broadcast_or_divide():
    def forward(x, w):
        return (x / w).named("n") * w

    inputs = {"x": RNG.standard_normal((T, C)), "w": RNG.standard_normal(C)}
    verdict = check.derivation(forward, inputs, {"dn": lambda dY: dY, "dx": lambda dn: dn})
    assert [finding.cause for finding in verdict.failed] == ["a factor w is missing", "a factor 1 / w is missing"]


def test_the_worst_element_is_shown_with_both_references():
    def formula(dH, V):
        wrong = dH @ V.T
        wrong[1, 2] += 0.5
        return wrong

    finding = check.derivation(attend, INPUTS, {"dP": formula}).failed[0]
    assert finding.example["element"] == (1, 2)
    assert finding.example["formula"] == pytest.approx(finding.example["autodiff"] + 0.5)
    assert finding.example["finite differences"] == pytest.approx(finding.example["autodiff"], rel=1e-5, abs=1e-6)


def test_a_formula_that_writes_to_its_arguments_changes_nothing():
    def formula(dP, P):
        dP *= P
        return dP - P * dP.sum(axis=-1, keepdims=True)

    assert check.derivation(attend, INPUTS, RIGHT | {"dM": formula}).ok


def test_an_error_of_a_formula_is_its_finding():
    verdict = check.derivation(attend, INPUTS, {"dP": lambda dH, V: dH @ V, "dV": RIGHT["dV"]})
    assert verdict.first_wrong == "dP"
    assert "raises ValueError: matmul" in verdict.failed[0].message


@pytest.mark.parametrize("order", [1, -1])
def test_the_gradients_of_inputs_come_after_those_of_the_stages_computed_from_them(order):
    wrong = {name: (lambda **_: np.zeros(1)) for name in ("dX", "dW_Q", "dQ", "dK", "dW_O")[::order]}
    names = [finding.name for finding in check.derivation(attend, INPUTS, wrong).failed]
    assert names[0] == "dW_O"
    assert max(names.index("dQ"), names.index("dK")) < names.index("dX")
    assert names.index("dQ") < names.index("dW_Q")


def test_a_formula_without_return_is_told():
    verdict = check.derivation(attend, INPUTS, {"dS": lambda dM: None})
    assert verdict.failed[0].message == "raises TypeError: the formula returns None: does it end with return?"


def test_a_detached_path_is_found_by_finite_differences():
    verdict = check.derivation(lambda x: x * x.detach(), {"x": RNG.standard_normal(T)}, {"dx": lambda dY, x: dY * x})
    assert verdict.failed[0].message == "autodiff and finite differences disagree"


def test_a_gradient_that_is_zero_everywhere_proves_nothing():
    verdict = check.derivation(lambda S: S.softmax().sum(), {"S": RNG.standard_normal((T, C))}, {"dS": lambda S: 0 * S})
    assert verdict.findings[0].status == "does not apply"


def test_a_module_and_ids_can_be_checked():
    class Tied(nn.Module):
        def __init__(self):
            self.table = tg.Tensor(RNG.standard_normal((C, D)), requires_grad=True)

        def forward(self, ids, targets):
            E = ops.take(self.table, ids).named("E")
            return ops.cross_entropy((E @ self.table.mT).named("Z"), targets)

    def backprop_loss(Z, targets):
        P = np.exp(Z - Z.max(axis=-1, keepdims=True))
        P /= P.sum(axis=-1, keepdims=True)
        return (P - np.eye(C)[targets]) / len(Z)

    def dtable(dE, dZ, E, ids):
        total = dZ.T @ E
        np.add.at(total, ids, dE)
        return total

    inputs = {"ids": np.array([1, 4, 1]), "targets": np.array([4, 1, 0])}
    model = Tied()
    assert check.derivation(model, inputs, {"dZ": backprop_loss, "dtable": dtable}).ok
    assert model.table.dtype == np.float64
    assert model.table.grad is None
    verdict = check.derivation(model, inputs, {"dtable": lambda dZ, E: dZ.T @ E})
    assert verdict.failed[0].cause == "what comes through E is missing"


def test_the_verdict_is_a_table_and_plain_data():
    verdict = check.derivation(attend, INPUTS, RIGHT | {"dM": lambda dP, P: P * dP})
    lines = str(verdict).splitlines()
    assert lines[0] == "attend: FAILED, the first wrong formula is dM"
    assert lines[1].split() == ["gradient", "shape", "difference"]
    assert json.loads(json.dumps(verdict.to_dict()))["first_wrong"] == "dM"
    assert "row sum" in verdict._repr_html_()


@pytest.mark.parametrize(
    ("forward", "formulas", "error", "message"),
    [
        (lambda x: x.tanh(), {"dS": lambda: 0}, ValueError, "no stage for dS; they can be given for dx, dY"),
        (lambda x: x.tanh(), [np.tanh], TypeError, "formulas must be a dict, such as {'dS': function}, got list"),
        (lambda x: x.tanh(), {"dx": 1.0}, TypeError, "the formula of dx must be a function, got float"),
        (lambda x: x.tanh(), {}, ValueError, "no formulas; they can be given for dx, dY"),
        (lambda x: x.tanh(), {"dx": lambda dZ: dZ}, ValueError, "asks for dZ; there are x, Y, dY"),
        (lambda x: x.tanh(), {"dY": lambda dY: dY}, ValueError, "asks for dY"),
        (lambda x: x.numpy(), {}, TypeError, "a ndarray"),
        (lambda x: x.astype(np.float32), {}, TypeError, "float32"),
        (lambda x: x.exp().named("x") + x, {}, ValueError, "two stages are called 'x'"),
        (lambda x: x * np.nan, {}, ValueError, "nan"),
        (lambda x: x + np.random.default_rng().standard_normal(3), {}, ValueError, "not deterministic"),
    ],
)
def test_what_cannot_be_judged_is_an_error(forward, formulas, error, message):
    with pytest.raises(error, match=message):
        check.derivation(forward, {"x": RNG.standard_normal(3)}, formulas)


def loop(dY):
    while True:
        pass


def leave(dY):
    raise SystemExit(0)


@pytest.mark.parametrize(("formula", "says"), [(leave, "sys.exit(0)"), (loop, "endless loop")])
def test_a_formula_that_exits_or_never_returns_has_failed(formula, says, monkeypatch):
    monkeypatch.setattr(python_files, "SECONDS", 0.05)
    verdict = check.derivation(lambda x: x * x, {"x": np.ones(3)}, {"dx": formula})
    assert says in verdict.failed[0].message


def test_a_forward_pass_that_exits_proves_nothing():
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\)"):
        check.derivation(lambda x: leave(x), {"x": np.ones(3)}, {"dx": lambda dY: dY})
