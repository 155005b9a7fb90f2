"""Tests of `gradcheck`: what it catches, what it passes, and what it refuses to judge."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import Tensor, gradcheck, ops
from tinygrad_mha.check.differences import Line

pytestmark = pytest.mark.usefixtures("own_primitives")


def failed_report(f, *inputs, **options):
    """The report of a check that must fail."""
    with pytest.raises(tg.GradcheckError) as caught:
        gradcheck(f, *inputs, **options)
    assert not caught.value.report.ok
    return caught.value.report


def make_primitive(forward, *rules):
    return ops.primitive(forward).vjps(*rules)


# ------------------------------------------------------------------------------------------------------------- catches


def test_a_right_gradient_has_no_note():
    assert [entry.note for entry in tg.gradcheck(lambda x: x * x, np.arange(1.0, 4.0)).entries] == [""]


def test_a_rule_off_by_a_thousandth_is_caught(rng):
    cube = make_primitive(with_name("cube", lambda x: x**3), lambda g, y, x: 3.003 * g * x * x)
    report = failed_report(cube, rng.standard_normal((2, 3)))
    assert report.worst.relative == pytest.approx(0.001, rel=0.01)


def test_a_rule_off_by_a_thousandth_in_one_element_is_caught(rng):
    tilt = np.ones((2, 3))
    tilt[1, 2] = 1.001
    double = make_primitive(with_name("double", lambda x: 2 * x), lambda g, y, x: 2 * g * tilt)
    assert failed_report(double, rng.standard_normal((2, 3))).worst.index == (1, 2)


def test_one_wrong_element_among_thousands_is_found(rng):
    tilt = np.ones((53, 59))
    tilt[31, 7] = 1.01
    double = make_primitive(with_name("double", lambda x: 2 * x), lambda g, y, x: 2 * g * tilt)
    report = failed_report(double, rng.standard_normal((53, 59)))
    assert report.worst.index == (31, 7)


def test_a_wrong_element_that_a_random_direction_cannot_see_is_caught(rng):
    # The error is 1e-3 of its own element, and 1e-6 of the derivative along any direction that moves all elements.
    weights = np.array([1e3, 1e2, 1.0])
    weigh = make_primitive(with_name("weigh", lambda x: weights * x), lambda g, y, x: g * weights * [1, 1, 1.001])
    assert failed_report(lambda x: weigh(x).sum(), 1e-3 * rng.standard_normal(3)).worst.index == (2,)


def test_a_wrong_sign_is_caught(rng):
    difference = make_primitive(with_name("difference", lambda a, b: a - b), lambda g, y, a, b: g, lambda g, y, a, b: g)
    report = failed_report(difference, rng.standard_normal(3), rng.standard_normal(3))
    assert [e.status for e in report.entries] == ["ok", "wrong"]


def test_a_wrong_sign_in_the_softmax_rule_is_caught(rng):
    bad = make_primitive(
        with_name("bad_softmax", lambda x: ops.softmax(x)),
        lambda g, y, x: y * (g + (g * y).sum(axis=-1, keepdims=True)),
    )
    failed_report(bad, rng.standard_normal((3, 5)))


def test_a_missing_transpose_is_caught_on_square_matrices(rng):
    product = make_primitive(
        with_name("product", lambda a, b: a @ b), lambda g, y, a, b: g @ b, lambda g, y, a, b: a.mT @ g
    )
    report = failed_report(product, rng.standard_normal((3, 3)), rng.standard_normal((3, 3)))
    assert [e.status for e in report.entries] == ["wrong", "ok"]


def test_a_missing_contribution_is_caught(rng):
    square = make_primitive(with_name("square", lambda x: x * x), lambda g, y, x: g * x)
    assert failed_report(square, rng.standard_normal(3)).worst.relative == pytest.approx(0.5)


def test_a_wrong_rule_of_a_tiny_function_is_caught(rng):
    # Tolerances follow the size of the gradient: an absolute one would let everything below it pass.
    tiny = make_primitive(with_name("tiny", lambda x: 1e-12 * x * x), lambda g, y, x: 2.002e-12 * g * x)
    failed_report(tiny, rng.standard_normal(3))


def test_a_wrong_second_derivative_is_caught_though_the_first_is_right(rng):
    cube = make_primitive(with_name("cube", lambda x: x**3), lambda g, y, x: g * 3 * np.square(as_array(x)))
    x = rng.standard_normal(3)
    assert gradcheck(cube, x).ok
    report = failed_report(cube, x, order=2)
    assert {(e.order, e.name): e.status for e in report.entries}[2, "x"] == "wrong"


def test_a_detached_path_is_named_as_cut(rng):
    report = failed_report(lambda x: Tensor(x.numpy()) * 2.0, rng.standard_normal(3))
    assert report.entries[0].status == "cut"
    assert "does not reach" in str(report)


def test_one_detached_factor_is_caught(rng):
    failed_report(lambda x: x * x.detach(), rng.standard_normal(3))


def test_the_error_of_a_wrong_rule_is_the_same_at_every_step(rng):
    cube = make_primitive(with_name("cube", lambda x: x**3), lambda g, y, x: 3.3 * g * x * x)
    report = failed_report(cube, rng.standard_normal(2))
    errors = [error for step, error in report.entries[0].sweep if 1e-7 < step < 1e-2]
    assert len(errors) >= 4
    assert max(errors) < 1.01 * min(errors)  # no step size makes the error go away


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "f",
    [lambda x: x.softmax().sum(), lambda x: ops.layer_norm(x).sum(), lambda x: x - x, lambda x: (x * 0.0).sum()],
    ids=["softmax sum", "layer norm sum", "x - x", "times zero"],
)
def test_a_check_that_cannot_fail_is_refused(f, rng):
    report = failed_report(f, rng.standard_normal((3, 5)))
    assert report.entries[0].status == "vacuous"
    assert "could not fail" in str(report)
    assert report.verdict == "proves nothing, because the gradient of x is zero everywhere"


def test_a_dead_relu_is_refused():
    assert failed_report(lambda x: x.relu(), np.array([-1.0, -2.0])).entries[0].status == "vacuous"


def test_an_expected_zero_gradient_can_be_declared(rng):
    report = gradcheck(lambda x: x.softmax().sum(), rng.standard_normal((3, 5)), zero=["x"])
    assert report.entries[0].status == "zero"
    with pytest.raises(ValueError, match="y"):
        gradcheck(lambda x: x.tanh(), rng.standard_normal(3), zero=["y"])


def test_dropout_is_refused_as_not_deterministic(rng):
    draw = np.random.default_rng(0)
    report = failed_report(lambda x: x * (draw.random(x.shape) < 0.5), rng.standard_normal((5, 7)))
    assert "not deterministic" in report.problem
    assert report.verdict.startswith("proves nothing, because it is not deterministic")


def test_the_generators_of_a_module_are_put_back(rng):
    dropout = tg.nn.Dropout(0.5, rng=0)
    (generator,) = dropout.generators().values()
    before = generator.bit_generator.state
    failed_report(dropout, rng.standard_normal((5, 7)))
    assert generator.bit_generator.state == before


def test_dropout_that_resets_its_seed_passes(rng):
    def f(x):
        return x * (np.random.default_rng(0).random(x.shape) < 0.5)

    assert gradcheck(f, rng.standard_normal((5, 7))).ok


def test_values_that_are_not_finite_are_refused():
    with np.errstate(divide="ignore"):
        assert "inf or nan" in failed_report(lambda x: x.log(), np.array([0.0, 1.0])).problem


def test_a_function_without_floating_inputs_is_refused():
    with pytest.raises(ValueError, match="nothing to check"):
        gradcheck(lambda i: Tensor(1.0), np.array([1, 2]))


def test_a_function_that_returns_an_array_is_refused():
    with pytest.raises(TypeError, match="must return tensors"):
        gradcheck(lambda x: x.numpy(), np.array([1.0]))


@pytest.mark.parametrize("order", [0, 3])
def test_an_order_other_than_one_or_two_is_refused(order):
    with pytest.raises(ValueError, match="order"):
        gradcheck(lambda x: x, np.ones(2), order=order)


# -------------------------------------------------------------------------------------------------------------- passes


def test_an_ignored_input_is_reported_and_passes(rng):
    report = gradcheck(lambda a, b: a.tanh(), rng.standard_normal(3), rng.standard_normal(3))
    assert [e.status for e in report.entries] == ["ok", "ignored"]


def test_float32_is_checked_in_float64(rng):
    x = rng.standard_normal((3, 5)).astype(np.float32)
    seen = []

    def f(x):
        seen.append(x.dtype)
        return x.softmax()

    report = gradcheck(f, x, order=2)
    assert set(seen) == {np.dtype(np.float64)}
    assert report.worst.relative < 1e-7


@pytest.mark.parametrize(
    ("given", "checked"),
    [
        (np.float64(0.3), 1),
        (0.3, 1),
        (np.array([0.3, 0.4], np.float32), 2),
        ([0.3, 0.4], 2),
        ([[1, 0.4, 2], (3, 4, 5)], 6),
        (Tensor([0.3, 0.4]), 2),
    ],
    ids=str,
)
def test_numbers_lists_arrays_and_tensors_are_inputs(given, checked):
    assert gradcheck(lambda x: x.tanh(), given).entries[0].checked == checked


def test_lists_of_integers_and_of_arrays_are_passed_on(rng):
    def f(w, ids, arrays):
        assert isinstance(ids, list)
        assert isinstance(arrays, list)
        return ops.take(w, np.array(ids)) * arrays[1]

    report = gradcheck(f, rng.standard_normal((5, 3)), [4, 0], [np.ones(2), np.full(3, 2.0)])
    assert [e.name for e in report.entries] == ["w"]


@pytest.mark.parametrize("order", [1, 2])
def test_a_function_that_takes_a_gradient_inside_is_checked(order):
    def f(x):
        (g,) = tg.grad((x**3).sum(), x, create_graph=True)
        return g * g  # 9 x^4

    x = np.array([0.7, -1.3])
    report = gradcheck(f, x, order=order)
    assert report.ok
    assert report.worst.absolute < 1e-6
    assert failed_report(lambda x: f(x).detach() * x, x).entries[0].status == "wrong"


def test_inputs_with_overlapping_memory_are_checked_element_by_element():
    assert gradcheck(lambda x: x * x, np.broadcast_to([1.0, 2.0], (3, 2))).entries[0].checked == 6
    assert gradcheck(lambda x: x * x, np.broadcast_to(np.ones((2, 1, 3)), (2, 1, 3))).ok


def test_the_same_array_given_three_times_is_three_inputs(rng):
    x = rng.standard_normal((3, 5))
    assert [e.checked for e in gradcheck(ops.attention, x, x, x).entries] == [15, 15, 15]


def test_integers_and_masks_are_passed_on(rng):
    allow = np.tri(3, dtype=bool)
    report = gradcheck(
        lambda q, k, v, allow, n: ops.attention(q, k, v, allow) * n, *rng.standard_normal((3, 3, 5)), allow, 2
    )
    assert [e.name for e in report.entries] == ["q", "k", "v"]


def test_several_outputs_are_checked_together(rng):
    assert gradcheck(lambda x: (x.tanh(), x * x), rng.standard_normal(3)).ok
    assert gradcheck(lambda x: {"a": x.tanh(), "b": [1] and x.exp()}, rng.standard_normal(3)).ok
    half_wrong = make_primitive(with_name("half", lambda x: x / 2), lambda g, y, x: g)
    failed_report(lambda x: (x.tanh(), half_wrong(x)), rng.standard_normal(3))


def test_a_kink_is_reported_and_passes():
    report = gradcheck(lambda x: x.relu(), np.array([0.0, 1.5, -0.7]))
    assert [kink.index for kink in report.entries[0].kinks] == [(0,)]
    assert "kink" in str(report)


def test_the_slopes_to_the_left_and_right_begin_at_the_point():
    x = np.zeros(1)
    line = Line(x, np.ones(1), lambda: [x * x])
    np.testing.assert_allclose(line.one_sided(0.5), (-0.5, 0.5))


def test_a_rule_that_gives_a_tie_of_max_to_the_first_has_kinks():
    first = make_primitive(
        with_name("first_max", lambda x: x.max()),
        lambda g, y, x: g * (np.arange(x.size) == np.argmax(as_array(x))),
    )
    assert [kink.index for kink in gradcheck(first, np.array([1.0, 2.0, 2.0])).entries[0].kinks] == [(1,), (2,)]


@pytest.mark.parametrize("f", [abs, lambda x: ops.maximum(x, 0.0), lambda x: x.max()], ids=["abs", "maximum", "max"])
def test_a_rule_that_takes_the_middle_of_a_kink_agrees_with_the_central_difference(f):
    assert not gradcheck(f, np.array([0.0, 0.0, -0.7])).entries[0].kinks


def test_a_gradient_outside_the_two_slopes_of_a_kink_is_wrong():
    bad = make_primitive(
        with_name("bad_relu", lambda x: np.maximum(x, 0)), lambda g, y, x: g * (x > 0) + 3 * g * (x == 0)
    )
    failed_report(bad, np.array([0.0, 1.5]))


def test_a_kink_closer_than_the_step_is_not_reported():
    report = gradcheck(lambda x: x.relu(), np.array([1e-7, -1e-7, 2.0]))
    assert not report.entries[0].kinks


def test_large_values_do_not_excuse_a_wrong_rule(rng):
    square = make_primitive(with_name("square", lambda x: x * x), lambda g, y, x: 2.002 * g * x)
    failed_report(lambda x: 1e9 + square(x), rng.standard_normal(5) + 3)


def test_rounding_excuses_an_error_of_a_ten_thousandth_at_most(rng):
    square = make_primitive(with_name("square", lambda x: x * x), lambda g, y, x: (2 + 3e-4) * g * x)
    failed_report(lambda x: 1e5 + square(x), np.ones(1))


def test_the_step_is_relative_to_the_element_that_moves():
    units = np.array([1e18, 1.0])
    assert gradcheck(lambda x: (x / units).tanh(), 0.7 * units).ok
    triple = make_primitive(with_name("triple", lambda x: 3 * x), lambda g, y, x: 3.03 * g)
    failed_report(lambda x: (triple(x) / 1e18).tanh(), np.array([0.1e18]))


def test_a_wrong_rule_is_no_kink_where_the_slope_changes_fast():
    # Beside its minimum, the slopes of x^2 to the left and to the right enclose this rule, but not for small steps.
    square = make_primitive(with_name("square", lambda x: x * x), lambda g, y, x: g * 2 * x * (1 + 2e-5))
    assert failed_report(square, np.array([1e-3])).entries[0].kinks == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_the_worst_element(place):
    factor = np.full(3, 3.0)
    factor[place] = np.nan
    double = make_primitive(with_name("double", lambda x: 2 * x), lambda g, y, x: g * factor)
    assert failed_report(double, np.array([1.0, -2.0, 3.0])).worst.index == (place,)


def test_a_function_that_is_infinite_beside_the_point_does_not_agree_with_any_rule():
    bad = make_primitive(with_name("wall", lambda x: np.where(x > 1, np.inf, x)), lambda g, y, x: 3 * g)
    failed_report(bad, np.ones(1))


def test_a_right_rule_passes_though_every_difference_has_rounding_errors(rng):
    assert gradcheck(lambda x: 1e10 + x * x, rng.standard_normal(5) + 3).ok


@pytest.mark.parametrize(("n", "checked"), [(199, 199), (200, 200), (201, 200), (1009, 200)])
def test_of_a_tensor_of_more_than_200_elements_200_are_compared(n, checked, rng):
    assert gradcheck(lambda x: x.tanh(), rng.standard_normal(n)).entries[0].checked == checked


def test_truncation_does_not_excuse_a_wrong_rule():
    # (L(x + h) - L(x - h)) / 2h of x^3 is 3 x^2 + h^2: at h = 0.1 it would meet this rule exactly.
    cube = make_primitive(with_name("cube", lambda x: x**3), lambda g, y, x: g * (3 * x * x + 0.01))
    failed_report(cube, np.array([1.0]))


def test_steep_and_large_functions_pass(rng):
    assert gradcheck(lambda x: (50 * x).tanh(), rng.standard_normal(5) * 0.02).ok
    assert gradcheck(lambda x: 1e9 + x * x, rng.standard_normal(5) + 3).ok
    assert gradcheck(lambda x: x.exp() * 1e12, rng.standard_normal(5)).ok
    assert gradcheck(lambda x: x.log(), np.array([1e-5, 1e5, 3.0])).ok


# -------------------------------------------------------------------------------------------- inputs are not changed


def test_inputs_and_gradients_are_left_alone(rng):
    x = Tensor(rng.standard_normal((2, 3)).astype(np.float32), requires_grad=True)
    before, x.grad = x.numpy().copy(), np.ones((2, 3), np.float32)
    gradcheck(lambda x: x.tanh(), x, order=2)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x.numpy(), before)
    np.testing.assert_array_equal(x.grad, np.ones((2, 3)))


class Scaled:
    """The least that gradcheck needs of a module."""

    def __init__(self, rng):
        self.weight = Tensor(rng.standard_normal((3, 5)).astype(np.float32), requires_grad=True)
        self.frozen = Tensor(rng.standard_normal(5).astype(np.float32))

    def named_parameters(self):
        return [("weight", self.weight), ("frozen", self.frozen)]

    def forward(self, x):
        return (x @ self.weight).tanh() * self.frozen

    __call__ = forward


def test_a_module_is_checked_by_input_and_named_parameter_and_restored(rng):
    module = Scaled(rng)
    arrays = module.weight._data, module.frozen._data
    report = gradcheck(module, rng.standard_normal((2, 3)), order=2)
    assert [e.name for e in report.entries if e.order == 1] == ["x", "weight", "frozen"]
    assert (module.weight._data, module.frozen._data) == arrays or all(
        a is b for a, b in zip((module.weight._data, module.frozen._data), arrays, strict=True)
    )
    assert module.weight.requires_grad
    assert not module.frozen.requires_grad


def test_a_module_is_restored_after_an_exception(rng):
    module = Scaled(rng)
    with pytest.raises(ValueError, match="matmul"):
        gradcheck(module, rng.standard_normal((2, 4)))
    assert module.weight.dtype == np.float32
    assert not module.frozen.requires_grad


# ---------------------------------------------------------------------------------------------------------- the report


def test_the_report_reads_as_text_and_as_data(rng):
    cube = make_primitive(with_name("cube", lambda x: x**3), lambda g, y, x: 3.3 * g * x * x)
    report = failed_report(cube, rng.standard_normal((2, 3)))
    text = str(report)
    assert "gradcheck of cube: FAILED" in text
    assert "analytic" in text
    assert "numeric" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is False
    assert data["worst"]["name"] == "x"
    assert len(data["worst"]["index"]) == 2
    assert math.isclose(data["worst"]["relative"], 0.3 / 3.3, rel_tol=1e-4)


def test_the_report_of_a_passing_check_names_its_worst_element(rng):
    report = gradcheck(lambda x: x.tanh(), rng.standard_normal((2, 3)))
    assert report.ok
    assert report.worst.absolute < 1e-9
    assert report.worst.index in np.ndindex(2, 3)


@pytest.mark.parametrize("order", [1, 2])
def test_without_elements_nothing_is_proved(order):
    report = failed_report(ops.tanh, np.ones((0, 3)), order=order)
    assert report.verdict == "proves nothing, because no input has an element that can move: nothing was compared"
    assert {entry.status for entry in report.entries} == {"empty"}


def test_an_empty_input_beside_others_is_said_not_to_be_compared(rng):
    report = gradcheck(lambda x, w: ops.concat(x, w, axis=0) * 2, rng.standard_normal((2, 3)), np.ones((0, 3)))
    assert [entry.status for entry in report.entries] == ["ok", "empty"]
    assert "nothing was compared: it has no elements" in str(report)


@pytest.mark.parametrize("columns", [50, 80, 100])
def test_the_lines_of_a_report_fit_the_terminal_and_keep_their_numbers(columns, rng, monkeypatch):
    long = "h.0.attn.projection_of_the_queries_and_keys.weight"
    x = Tensor(rng.standard_normal((2, 3, 5, 7)), name=long)
    wide = str(gradcheck(lambda x: x.tanh(), x, order=2))
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(gradcheck(lambda x: x.tanh(), x, order=2))
    assert max(map(len, text.splitlines())) <= columns
    assert text.split() == wide.split()


def test_raises_can_be_turned_off(rng):
    assert not gradcheck(lambda x: x - x, rng.standard_normal(3), raises=False).ok


def test_a_seed_decides_the_cotangent(rng):
    x = rng.standard_normal((2, 3))
    reports = [gradcheck(lambda x: x.tanh(), x, seed=seed).worst for seed in (7, 7, 8)]
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def with_name(name, f):
    f.__name__ = name
    return f


def as_array(x):
    return x.numpy() if isinstance(x, Tensor) else x
