"""Beam search: the most probable continuation that a limited number of guesses can find.

Greedy decoding takes the best next token and never looks back. A beam keeps the best few beginnings instead; what
looked second best may turn out first. With a beam of one it is greedy decoding, and with a beam as wide as there are
sequences it is exhaustive search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

Step = Callable[[np.ndarray, np.ndarray], Any]

KEPT, ENDED, DROPPED = "kept", "ended", "dropped"


class Node(NamedTuple):
    """A token that was considered, and the node it would follow (-1: the beginning)."""

    token: int
    log_probability: float  # of everything from the beginning to here
    parent: int
    fate: str  # "kept" (went on), "ended" (with the end token, or at the last step) or "dropped" (others were better)


class Hypothesis(NamedTuple):
    """A whole continuation."""

    tokens: np.ndarray  # (n,), the end token last where it was reached
    log_probability: float
    score: float  # the log-probability, divided by the length penalty
    node: int  # its last node


class Beams(NamedTuple):
    """What a search found, the best hypothesis first, and every node that it considered."""

    hypotheses: list[Hypothesis]
    nodes: list[Node]

    @property
    def best(self) -> Hypothesis:
        return self.hypotheses[0]

    def tree(self, name: Callable[[int], str] = str) -> str:
        """The beams as text: one line for each token, with the probability of all up to it.

        ■ marks an end and * the winner; × marks what was dropped because others were better.
        """
        children: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(i)
        marks = {KEPT: "", ENDED: " ■", DROPPED: " ×"}
        lines = []
        stack = [(i, "") for i in reversed(children.get(-1, []))]
        while stack:
            i, indent = stack.pop()
            node = self.nodes[i]
            last = i == children[node.parent][-1]
            winner = " *" if i == self.best.node else ""
            probability = np.exp(node.log_probability)
            lines.append(
                f"{indent}{'└' if last else '├'} {name(node.token)} {probability:.2g}{marks[node.fate]}{winner}"
            )
            stack += [(child, indent + ("  " if last else "│ ")) for child in reversed(children.get(i, []))]
        return "\n".join(lines)


def beam_search(
    step: Step,
    start: Iterable[int],
    end: int | None,
    beam: int,
    max_new_tokens: int,
    length_penalty: float = 0.0,
) -> Beams:
    """Search for the continuation of `start` with the highest score.

    At every step each of the live beginnings is tried with every token, and the best of all these take the places that
    are left: `beam`, less one for each hypothesis that has ended.

    Args:
        step: `step(prefixes, parents)` gives log-probabilities (n, V) of what follows each of `prefixes` (n, t), ids
            with `start` in front. Row i grew out of row `parents[i]` of the call before (all 0 in the first): with
            these a cache is rearranged.
        start: the ids to continue, at least one.
        end: the token that ends a sequence; None if there is none.
        beam: how many beginnings are kept.
        max_new_tokens: where a sequence ends that has not met `end`.
        length_penalty: a in score = log-probability / ((5 + n) / 6)^a, with n tokens after `start`, the end token among
            them (arXiv:1609.08144, equation 14). Every token lowers the log-probability, so 0 prefers short sequences;
            with 0.6 to 1 longer ones can win. It ranks what has ended: living beams have equal lengths.

    Raises:
        ValueError: a beam or number of tokens below 1, a negative penalty, no start, a step of the wrong shape or with
            nan, or one that leaves no token possible.

    Example:
        >>> table = np.log([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]])
        >>> found = beam_search(lambda prefixes, parents: table[prefixes[:, -1]], [0], end=2, beam=2, max_new_tokens=3)
        >>> found.best.tokens
        array([1, 2])
    """
    prefix = np.array(list(start))
    if beam < 1 or max_new_tokens < 1 or not length_penalty >= 0:
        raise ValueError(
            f"expected beam and max_new_tokens of 1 or more and a length_penalty of 0 or more, got {beam}, "
            f"{max_new_tokens} and {length_penalty}"
        )
    if prefix.ndim != 1 or prefix.size == 0 or prefix.dtype.kind not in "iu":
        raise ValueError(f"start must be a row of at least one id, got {prefix!r}")
    prefixes, sums, at = prefix[None], np.zeros(1), [-1]
    parents = np.zeros(1, np.int64)
    nodes: list[Node] = []
    ended: list[Hypothesis] = []
    for n in range(1, max_new_tokens + 1):
        totals = sums[:, None] + checked(step(prefixes, parents), len(prefixes))
        places = beam - len(ended)
        chosen = best(totals.ravel(), places)
        rows, tokens = np.divmod(chosen, totals.shape[1])
        last = n == max_new_tokens
        number = considered(nodes, totals, at, set(chosen.tolist()), beam, end, last)
        grown = np.concatenate([prefixes[rows], tokens[:, None]], axis=1)
        over = np.full(len(chosen), last) if end is None else (tokens == end) | last
        for i in np.flatnonzero(over):
            total = float(totals.flat[chosen[i]])
            tail = grown[i, len(prefix) :]
            ended.append(Hypothesis(tail, total, total / penalty(n, length_penalty), number[int(chosen[i])]))
        alive = ~over
        if not alive.any():
            break
        prefixes, parents, sums = grown[alive], rows[alive], totals.ravel()[chosen[alive]]
        at = [number[int(flat)] for flat in chosen[alive]]
    return Beams(sorted(ended, key=lambda hypothesis: -hypothesis.score), nodes)


def penalty(n: int, power: float) -> float:
    """What the log-probability of `n` tokens is divided by."""
    return ((5 + n) / 6) ** power


def best(totals: np.ndarray, n: int) -> np.ndarray:
    """The indices of the `n` largest numbers (never of -inf), the largest first, and at a tie the first."""
    order = np.argsort(-totals, kind="stable")[:n]
    return order[totals[order] > -np.inf]


def considered(
    nodes: list[Node], totals: np.ndarray, at: list[int], chosen: set[int], beam: int, end: int | None, last: bool
) -> dict[int, int]:
    """Enter what was looked at into the tree: of each beginning its best few, and all that were chosen.

    Returns the node of each choice, a place in `totals` row by row.
    """
    number = {}
    for row, line in enumerate(totals):
        for token in best(line, beam).tolist():
            flat = row * totals.shape[1] + token
            fate = DROPPED if flat not in chosen else ENDED if last or token == end else KEPT
            number[flat] = len(nodes)
            nodes.append(Node(token, float(line[token]), at[row], fate))
    return number


def checked(log_probabilities: Any, n: int) -> np.ndarray:
    array = np.asarray(log_probabilities, dtype=np.float64)
    if array.ndim != 2 or len(array) != n:
        raise ValueError(f"step must return log-probabilities (n, V) for the n = {n} prefixes, got shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError("step returned nan instead of log-probabilities")
    if not (array > -np.inf).any():
        raise ValueError("step left no token possible: every log-probability is -inf")
    return array
