"""Sampling: temperature, top-k, top-p, and the draw of one token from logits."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_data import read_packed

from tinygrad_mha.decoding.sampling import (
    apply_temperature,
    compute_log_probabilities,
    compute_probabilities,
    draw,
    keep_top_k,
    keep_top_p,
)

logits = st.lists(st.floats(-30, 30), min_size=1, max_size=13).map(np.array)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------- temperature


def test_temperature_divides_the_logits(rng):
    x = rng.standard_normal((3, 7))
    np.testing.assert_allclose(compute_probabilities(x, 0.7), softmax(x / 0.7), rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [0, 1e-3, 1e-8, 1e-30, 1e-45, 5e-324, np.float32(1e-30)])
def test_a_tiny_temperature_gives_the_most_probable_token_without_overflow(temperature, dtype):
    x = np.array([[10, -5, 88.0, 3], [1e30, -1e30, 0, -1]], dtype)
    np.testing.assert_array_equal(compute_probabilities(x, temperature), [[0, 0, 1, 0], [1, 0, 0, 0]])


def test_a_large_temperature_is_uniform():
    np.testing.assert_allclose(compute_probabilities(np.array([3.0, -2.0, 0.0, 1.0, 5.0]), 1e12), 0.2, rtol=1e-11)


def test_greedy_decoding_takes_the_first_of_equals():
    np.testing.assert_array_equal(compute_probabilities(np.array([1.0, 5.0, 5.0]), 0), [0, 1, 0])


@given(logits, st.floats(0.01, 100))
def test_temperature_makes_the_largest_logit_zero(x, temperature):
    assert apply_temperature(x, temperature).max() == 0


@pytest.mark.parametrize("temperature", [-1, -1e-9, math.inf, math.nan, "hot", None, True])
def test_an_invalid_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        compute_probabilities(np.zeros(5), temperature)


# ---------------------------------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("k", [5, 6, 100_000])
def test_top_k_of_the_vocabulary_or_more_keeps_all(k, rng):
    x = rng.standard_normal(5)
    np.testing.assert_array_equal(keep_top_k(x, k), x)


def test_top_k_keeps_the_k_largest_of_each_row():
    x = np.array([[1.0, 4.0, 2.0, 3.0, 0.0], [9.0, 5.0, 6.0, 7.0, 8.0]])
    low = -np.inf
    np.testing.assert_array_equal(keep_top_k(x, 3), [[low, 4, 2, 3, low], [9, low, low, 7, 8]])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=11), st.integers(1, 13))
def test_top_k_keeps_exactly_k_and_the_first_of_equals(values, k):
    x = np.array(values, float)
    kept = np.flatnonzero(np.isfinite(keep_top_k(x, k)))
    np.testing.assert_array_equal(kept, sorted(np.argsort(-x, kind="stable")[:k]))


def test_top_k_of_one_is_greedy(rng):
    x = rng.standard_normal((11, 7))
    x[3] = 0.0
    np.testing.assert_array_equal(compute_probabilities(x, 100.0, top_k=1), compute_probabilities(x, 0))


@pytest.mark.parametrize("k", [0, -1, 1.5, 2.0, True, "3"])
def test_an_invalid_top_k_is_refused(k):
    with pytest.raises(ValueError, match="top_k must be an integer of at least 1"):
        compute_probabilities(np.zeros(5), top_k=k)


# ---------------------------------------------------------------------------------------------------------------- top-p


@pytest.mark.parametrize(
    ("p", "given_p", "expected"),
    [
        (0.9, [0.5, 0.41, 0.09], [0.54945055, 0.45054945, 0]),
        (0.8, [0.4, 0.3, 0.2, 0.1], [4 / 9, 3 / 9, 2 / 9, 0]),
        (0.8, [0.1, 0.3, 0.4, 0.2], [0, 3 / 9, 4 / 9, 2 / 9]),  # in the order of the input
        (0.75, [0.25, 0.5, 0.25], [1 / 3, 2 / 3, 0]),  # a sum of exactly p is enough
        (0.9, [0.1, 0.2, 0.3, 0.4], [0, 2 / 9, 3 / 9, 4 / 9]),  # also if rounding makes the sum slightly smaller
        (0.6, [0.2] * 5, [1 / 3, 1 / 3, 1 / 3, 0, 0]),  # the first of equals
        (1e-9, [0.3, 0.5, 0.2], [0, 1, 0]),
        (0, [0.3, 0.5, 0.2], [0, 1, 0]),
        (1, [0.5, 0.5 - 1e-9, 1e-9], [0.5, 0.5 - 1e-9, 1e-9]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_keeps_the_token_that_crosses(p, given_p, expected, dtype):
    np.testing.assert_allclose(compute_probabilities(np.log(given_p).astype(dtype), top_p=p), expected, atol=1e-7)


def test_top_p_of_one_keeps_all_of_many(rng):
    x = rng.standard_normal((3, 1009)) * 10  # the running sum rounds to 1 long before the end
    np.testing.assert_array_equal(keep_top_p(x, 1.0), x)


@given(logits, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_with_probability_p(x, p):
    full = softmax(x)
    kept = np.isfinite(keep_top_p(x, p))
    assert full[kept].sum() >= p - 2e-6
    assert full[kept].sum() - full[kept].min() < p
    assert kept.all() or full[kept].min() >= full[~kept].max()


def test_top_p_treats_each_row_independently(rng):
    x = rng.standard_normal((7, 11)) * 3
    np.testing.assert_array_equal(keep_top_p(x, 0.6), np.stack([keep_top_p(row, 0.6) for row in x]))


def test_top_p_applies_to_the_result_of_temperature_and_top_k():
    x = np.log([0.4, 0.3, 0.2, 0.1])
    # of 0.4 and 0.3 alone the first is 4/7 > 0.5; of all four it would be 0.4 < 0.5
    np.testing.assert_array_equal(compute_probabilities(x, top_k=2, top_p=0.5), [1, 0, 0, 0])
    assert np.count_nonzero(compute_probabilities(x, top_p=0.5)) == 2
    assert np.count_nonzero(compute_probabilities(x, temperature=0.2, top_p=0.5)) == 1


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, "0.9", True, [0.9]])
def test_an_invalid_top_p_is_refused(p):
    with pytest.raises(ValueError, match="top_p must be a probability, from 0 to 1"):
        compute_probabilities(np.zeros(5), top_p=p)


# ----------------------------------------------------------------------------------------------------------------- draw


def test_indices_are_drawn_with_their_probabilities():
    p = compute_probabilities(np.log([0.05, 0.5, 0.15, 0.3]), top_p=0.94)
    rng = np.random.default_rng(0)
    n = 20_000
    counts = np.bincount([draw(p, rng) for _ in range(n)], minlength=4)
    expected = np.array([0, 0.5, 0.15, 0.3]) / 0.95
    deviations = np.sqrt(n * expected * (1 - expected))
    assert counts[0] == 0
    assert (np.abs(counts - n * expected)[1:] < 4 * deviations[1:]).all()


class Fixed:
    """A generator that always draws the same number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


@pytest.mark.parametrize("scale", [1.0, 0.7, 1 / 3, 1e-300, 0.1 + 0.2])
def test_extreme_random_numbers_draw_no_index_of_probability_zero(scale):
    p = np.array([0.0, 0.25, 0.0, 0.75, 0.0]) * scale
    assert draw(p, Fixed(0.0)) == 1
    assert draw(p, Fixed(1 - 2**-53)) == 3


def test_logits_of_minus_infinity_are_never_drawn(rng):
    x = np.array([-np.inf, 0.0, -np.inf, 1.0])
    assert {draw(compute_probabilities(x, 50.0), rng) for _ in range(100)} == {1, 3}
    for options in ({"top_k": 3}, {"top_p": 0.99999}):
        np.testing.assert_array_equal(compute_probabilities(x, **options)[[0, 2]], 0)


def test_float32_logits_are_sampled_in_float64(rng):
    x = rng.standard_normal(11).astype(np.float32)
    p = compute_probabilities(x, 0.9, top_k=7, top_p=0.8)
    assert p.dtype == np.float64
    np.testing.assert_array_equal(p, compute_probabilities(x.astype(np.float64), 0.9, top_k=7, top_p=0.8))


@pytest.mark.parametrize("name", ["ex0", "ex1"])
def test_probabilities_equal_a_recorded_table_of_gpt2(name):
    recorded = json.loads(read_packed(f"gpt2-124m-outputs/{name}.json"))
    p = compute_probabilities(np.array(recorded["logits"]), temperature=0.8, top_k=5)
    assert np.count_nonzero(p) == 5
    for row in recorded["probabilities"]:
        assert p[row["tokenId"]] == pytest.approx(row["probability"], abs=1e-12)


# ---------------------------------------------------------------------------------------------------- log-probabilities


def test_log_probabilities_are_float64_and_allow_impossible_tokens():
    log = compute_log_probabilities(np.array([[0.0, -np.inf, 0.0]], np.float32))
    assert log.dtype == np.float64
    np.testing.assert_allclose(log, [[-math.log(2), -np.inf, -math.log(2)]], rtol=1e-15)


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3, [math.nan] * 3], ids=str)
def test_logits_from_which_no_token_can_be_chosen_are_refused(row):
    with pytest.raises(ValueError, match="logits are nan or infinite, so no token can be chosen"):
        compute_log_probabilities(np.array([[0.0, 1.0, 2.0], row]))
