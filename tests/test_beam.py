"""Beam search equals exhaustive search if it is wide enough, and greedy decoding if the beam is 1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tinygrad_mha.decoding import beam_search

V, END = 3, 2


def language(rng, order=2):
    """Log-probabilities that depend on the last `order` tokens, so that a wrong prefix or row is noticed."""
    tables = rng.dirichlet(np.ones(V) * 0.7, size=(V,) * order)

    def step(prefixes, parents):
        padded = np.pad(prefixes, [(0, 0), (order, 0)])
        return np.log(tables[tuple(padded[:, -order + i] for i in range(order))])

    return step


def all_sequences(step, start, steps, power):
    """Every sequence of up to `steps` tokens, with its log-probability and score."""
    for n in range(1, steps + 1):
        for tokens in itertools.product(range(V), repeat=n):
            if END in tokens[:-1] or (tokens[-1] != END and n < steps):
                continue
            prefix, total = [start], 0.0
            for token in tokens:
                total += step(np.array([prefix]), None)[0][token]
                prefix.append(token)
            yield tokens, total, total / ((5 + n) / 6) ** power


@pytest.mark.parametrize("power", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_the_number_of_sequences_is_exhaustive_search(seed, power):
    step = language(np.random.default_rng(seed))
    wanted = {tokens: numbers for tokens, *numbers in all_sequences(step, 0, 5, power)}
    found = beam_search(step, [0], END, beam=V**5, max_new_tokens=5, length_penalty=power)
    assert len(found.hypotheses) == len(wanted)
    for hypothesis in found.hypotheses:
        expected = wanted[tuple(hypothesis.tokens.tolist())]
        assert [hypothesis.log_probability, hypothesis.score] == pytest.approx(expected, abs=1e-12)
    scores = [hypothesis.score for hypothesis in found.hypotheses]
    assert scores == sorted(scores, reverse=True)


def test_of_equal_scores_the_shorter_sequence_is_best_then_the_lower_ids():
    tables = {2: [0.25, 0.25, 0.25, 0.25], 3: [0.25, 0.5, 0.125, 0.125]}  # 3 is the end

    def step(prefixes, parents):
        return np.log([tables.get(int(row[-1]), [0.5, 0.25, 0.125, 0.125]) for row in prefixes])

    found = beam_search(step, [0], 3, beam=4**3, max_new_tokens=3)
    order = [(-h.score, len(h.tokens), h.tokens.tolist()) for h in found.hypotheses]
    assert order == sorted(order)
    assert len({-score for score, *_ in order}) < len(order)


@pytest.mark.parametrize("power", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_a_function_may_decide_where_a_sequence_ends(seed, power):
    """Here it ends at two equal tokens in a row."""

    def ends(tokens):
        return len(tokens) > 1 and tokens[-1] == tokens[-2]

    step = language(np.random.default_rng(seed))
    scores = {}
    for n in range(1, 6):
        for tokens in itertools.product(range(V), repeat=n):
            if any(ends(tokens[:k]) for k in range(n)) or not (ends(tokens) or n == 5):
                continue
            read = [0, *tokens]
            total = sum(step(np.array([read[: k + 1]]), None)[0][token] for k, token in enumerate(tokens))
            scores[tokens] = total / ((5 + n) / 6) ** power
    found = beam_search(step, [0], ends, beam=V**5, max_new_tokens=5, length_penalty=power)
    assert len(found.hypotheses) == len(scores)
    assert tuple(found.best.tokens.tolist()) == max(scores, key=scores.get)
    for hypothesis in found.hypotheses:
        assert hypothesis.score == pytest.approx(scores[tuple(hypothesis.tokens.tolist())], abs=1e-12)
        assert hypothesis.log_probability == pytest.approx(hypothesis.log_probabilities.sum(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy_decoding(seed):
    step = language(np.random.default_rng(seed))
    prefix = [1]
    while len(prefix) < 8 and (len(prefix) == 1 or prefix[-1] != END):
        prefix.append(int(step(np.array([prefix]), None)[0].argmax()))
    assert beam_search(step, [1], END, beam=1, max_new_tokens=7).best.tokens.tolist() == prefix[1:]


def test_two_beams_find_a_sequence_that_greedy_decoding_misses():
    table = np.log([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]])  # greedy: 0, 0, 0; better: 1, end

    def step(prefixes, parents):
        return table[prefixes[:, -1]]

    greedy, wide = (beam_search(step, [0], END, beam=n, max_new_tokens=3).best for n in (1, 2))
    assert greedy.tokens.tolist() == [0, 0, 0]
    assert wide.tokens.tolist() == [1, END]
    assert wide.log_probability == pytest.approx(np.log(0.32))
    assert wide.log_probability > greedy.log_probability


def test_a_length_penalty_lets_longer_sequences_win():
    # end at once: 0.3; or 0.7 * 0.7 * 0.7 * 0.7 = 0.24 in four tokens
    def step(prefixes, parents):
        return np.log(np.tile([0.7, 1e-9, 0.3], (len(prefixes), 1)))

    short = beam_search(step, [0], END, beam=2, max_new_tokens=4)
    long = beam_search(step, [0], END, beam=2, max_new_tokens=4, length_penalty=1.0)
    assert short.best.tokens.tolist() == [END]
    assert long.best.tokens.tolist() == [0, 0, 0, 0]
    assert long.best.score == pytest.approx(4 * np.log(0.7) / 1.5)


def test_parents_are_the_rows_that_the_prefixes_extend(rng):
    probabilities = language(rng)
    calls = []

    def step(prefixes, parents):
        if calls:
            np.testing.assert_array_equal(calls[-1][parents], prefixes[:, :-1])
        calls.append(prefixes)
        return probabilities(prefixes, parents)

    beam_search(step, [0], None, beam=4, max_new_tokens=6)
    assert [len(prefixes) for prefixes in calls] == [1, 3, 4, 4, 4, 4]


def test_a_sequence_that_has_ended_takes_the_place_of_a_prefix():
    calls = []

    def step(prefixes, parents):
        calls.append(len(prefixes))
        return np.log(np.tile([0.5, 0.2, 0.3], (len(prefixes), 1)))

    found = beam_search(step, [0], END, beam=2, max_new_tokens=4)
    assert calls == [1, 1, 1, 1]
    assert [h.tokens.tolist() for h in found.hypotheses] == [[END], [0, 0, 0, 0]]


def test_without_an_end_token_every_hypothesis_has_the_full_length(rng):
    found = beam_search(language(rng), [0, 1], None, beam=3, max_new_tokens=4)
    assert [len(hypothesis.tokens) for hypothesis in found.hypotheses] == [4, 4, 4]


def test_impossible_tokens_are_never_chosen():
    def step(prefixes, parents):
        return np.tile([-np.inf, -np.inf, 0.0], (len(prefixes), 1))

    found = beam_search(step, [0], END, beam=3, max_new_tokens=4)
    assert [hypothesis.tokens.tolist() for hypothesis in found.hypotheses] == [[END]]


@pytest.mark.parametrize("shape", [(V,), (2, V), (1, 1, V), (0, V)])
def test_a_step_that_returns_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"must return log-probabilities \(n, V\) for the n = 1 prefixes, got shape"):
        beam_search(lambda prefixes, parents: np.zeros(shape), [0], END, beam=2, max_new_tokens=3)


@pytest.mark.parametrize("seed", range(3))
def test_the_tree_holds_every_hypothesis_with_its_probability(seed):
    found = beam_search(language(np.random.default_rng(seed)), [0], END, beam=3, max_new_tokens=5)
    for hypothesis in found.hypotheses:
        tokens, i = [], hypothesis.node
        assert found.nodes[i].status == "ended"
        assert found.nodes[i].log_probability == hypothesis.log_probability
        while i >= 0:
            tokens.append(found.nodes[i].token)
            i = found.nodes[i].parent
        assert tokens[::-1] == hypothesis.tokens.tolist()
    going_on = {node.parent for node in found.nodes} - {-1}
    assert going_on == {i for i, node in enumerate(found.nodes) if node.status == "kept"}


def test_the_tree_is_drawn_with_one_line_for_each_node_and_one_winner():
    table = np.log([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]])
    found = beam_search(lambda prefixes, parents: table[prefixes[:, -1]], [0], END, beam=2, max_new_tokens=2)
    assert found.tree("ab.".__getitem__).splitlines() == [
        "├ a 0.5",
        "│ ├ a 0.25 ■",
        "│ └ b 0.2 ×",
        "└ b 0.4",
        "  ├ . 0.32 ■ *",
        "  └ a 0.04 ×",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam": 0}, "beam must be an integer of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"length_penalty": -1.0}, "at least 0"),
        ({"start": []}, "at least one id"),
        ({"start": [0.5]}, "at least one id"),
        ({"step": lambda prefixes, parents: np.zeros(3)}, r"shape \(3,\)"),
        ({"step": lambda prefixes, parents: np.full((1, 3), np.nan)}, "nan"),
        ({"step": lambda prefixes, parents: np.full((1, 3), -np.inf)}, "at least one possible token"),
    ],
)
def test_invalid_arguments_are_named(change, message, rng):
    arguments = {"step": language(rng), "start": [0], "end": END, "beam": 2, "max_new_tokens": 3} | change
    with pytest.raises(ValueError, match=message):
        beam_search(**arguments)
