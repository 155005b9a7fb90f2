"""Beam search: looks for the most probable continuation while following a limited number of beginnings.

Greedy decoding takes the most probable next token at every step and never revises it. A beam search keeps the best few
beginnings, because the second best beginning may have the best continuation. A beam of 1 is greedy decoding; a beam as
wide as the number of sequences is exhaustive search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.arguments import check_count, is_number

__all__ = ["Beams", "Hypothesis", "Node", "beam_search", "check_length_penalty"]

Step = Callable[[np.ndarray, np.ndarray], Any]
End = int | Callable[[np.ndarray], bool] | None

KEPT, ENDED, DROPPED = "kept", "ended", "dropped"


class Node(NamedTuple):
    """A token that was considered as the continuation of another node (-1: of the start)."""

    token: int
    log_probability: float  # of all tokens from the start to this one
    parent: int
    fate: str  # "kept" (continued), "ended" (the sequence ended here) or "dropped" (not among the best)


class Hypothesis(NamedTuple):
    """A complete continuation."""

    tokens: np.ndarray  # (n,), including the token that ended it
    log_probabilities: np.ndarray  # (n,), of each token given those before it
    log_probability: float  # the total
    score: float  # the total, divided by the length penalty
    node: int  # index of its last node


class Beams(NamedTuple):
    """The result of a search: all hypotheses, best first, and every node that was considered."""

    hypotheses: list[Hypothesis]
    nodes: list[Node]

    @property
    def best(self) -> Hypothesis:
        """The hypothesis with the highest score."""
        return self.hypotheses[0]

    def tree(self, name: Callable[[int], str] = str) -> str:
        """The search as text: one line per node, with the probability of all tokens up to it.

        ■ marks an end, * the best hypothesis, × a node that was dropped because others were better.
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
            mark = marks[node.fate] + (" *" if i == self.best.node else "")
            probability = np.exp(node.log_probability)
            lines.append(f"{indent}{'└' if last else '├'} {name(node.token)} {probability:.2g}{mark}")
            stack += [(child, indent + ("  " if last else "│ ")) for child in reversed(children.get(i, []))]
        return "\n".join(lines)


def beam_search(
    step: Step, start: Iterable[int], end: End, beam: int, max_new_tokens: int, length_penalty: float = 0.0
) -> Beams:
    """Search for the continuation of `start` with the highest score.

    score = total log-probability / ((5 + n) / 6) ** length_penalty (arXiv:1609.08144, equation 14) with n new tokens,
    the one that ended the sequence included. Each token lowers the log-probability, so a penalty of 0 prefers short
    sequences; with 0.6 to 1 longer ones can win. The penalty ranks complete sequences only: beginnings of one step
    have the same length.

    At every step each beginning is extended by every token, and the most probable of these continue: as many as `beam`
    minus the number of sequences that have ended. Ties keep the better ranked beginning, then the lower token id. Of
    complete sequences with the same score the shorter is better, then the one with lower ids.

    Args:
        step: `step(prefixes, parents)` returns log-probabilities (n, V) of the next token of each of `prefixes`
            (n, t), which include `start`. Row i extends row `parents[i]` of the previous call (0 in the first call), so
            that a cache can be rearranged.
        start: the ids to continue, at least one.
        end: the token that ends a sequence, or a function that takes the new tokens (n,) of a sequence and returns
            whether it ends with the last of them; None if there is none.
        beam: the number of sequences that are followed.
        max_new_tokens: the number of tokens after which a sequence ends in any case.
        length_penalty: 0 or more, see above.

    Raises:
        ValueError: an argument out of its range, or a `step` that returns a wrong shape, nan, or no possible token.

    Example:
        >>> table = np.log([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]])
        >>> found = beam_search(lambda prefixes, parents: table[prefixes[:, -1]], [0], end=2, beam=2, max_new_tokens=3)
        >>> found.best.tokens
        array([1, 2])
    """
    prefix = np.array(list(start))
    beam, max_new_tokens = check_count(beam, "beam"), check_count(max_new_tokens, "max_new_tokens")
    check_length_penalty(length_penalty)
    if prefix.ndim != 1 or prefix.size == 0 or prefix.dtype.kind not in "iu":
        raise ValueError(f"start must be a row of at least one id, got {prefix!r}")
    ends = end if callable(end) else lambda tokens: tokens[-1] == end
    prefixes, logs = prefix[None], np.zeros((1, 0))  # the ids of each beginning, and the log-probabilities of new ones
    row_nodes = [-1]  # the last node of each beginning
    parents = np.zeros(1, np.int64)
    nodes: list[Node] = []
    ended: list[Hypothesis] = []
    for n in range(1, max_new_tokens + 1):
        table = check_step(step(prefixes, parents), len(prefixes))
        totals = logs.sum(axis=1, keepdims=True) + table
        chosen = find_best(totals.ravel(), beam - len(ended))
        parents, tokens = np.divmod(chosen, totals.shape[1])
        prefixes = np.concatenate([prefixes[parents], tokens[:, None]], axis=1)
        logs = np.concatenate([logs[parents], table.ravel()[chosen, None]], axis=1)
        done = np.array([n == max_new_tokens or bool(ends(row[len(prefix) :])) for row in prefixes])
        fates = {int(flat): ENDED if ended_here else KEPT for flat, ended_here in zip(chosen, done, strict=True)}
        index = add_nodes(nodes, totals, row_nodes, fates, beam)
        for i in np.flatnonzero(done):
            node = index[int(chosen[i])]
            total = nodes[node].log_probability
            score = total / ((5 + n) / 6) ** length_penalty
            ended.append(Hypothesis(prefixes[i, len(prefix) :], logs[i], total, score, node))
        if done.all():
            break
        row_nodes = [index[int(flat)] for flat in chosen[~done]]
        prefixes, logs, parents = prefixes[~done], logs[~done], parents[~done]
    return Beams(sorted(ended, key=lambda found: (-found.score, len(found.tokens), found.tokens.tolist())), nodes)


def check_length_penalty(value: Any) -> None:
    """Raise ValueError unless `value` is a number of at least 0."""
    if not is_number(value) or not value >= 0:
        raise ValueError(f"length_penalty must be a number of at least 0, got {value!r}")


def find_best(totals: np.ndarray, n: int) -> np.ndarray:
    """The indices of the `n` largest numbers, the largest first, without those of -inf. Ties: lowest index first."""
    candidates = np.arange(len(totals))
    if n < len(totals):  # sort only what is not smaller than the n-th largest number
        candidates = candidates[totals >= np.partition(totals, -n)[-n]]
    best = candidates[np.argsort(-totals[candidates], kind="stable")][:n]
    return best[totals[best] > -np.inf]


def add_nodes(
    nodes: list[Node], totals: np.ndarray, row_nodes: list[int], fates: dict[int, str], beam: int
) -> dict[int, int]:
    """Append the `beam` best continuations of every beginning to `nodes`, which include all those in `fates`.

    `fates` maps flat indices into `totals` to what became of these continuations; the result maps them to their nodes.
    """
    index = {}
    for row, line in enumerate(totals):
        for token in find_best(line, beam).tolist():
            flat = row * totals.shape[1] + token
            index[flat] = len(nodes)
            nodes.append(Node(token, float(line[token]), row_nodes[row], fates.get(flat, DROPPED)))
    return index


def check_step(log_probabilities: Any, n: int) -> np.ndarray:
    """Return what a step returned as an array (n, V), or raise ValueError."""
    array = np.asarray(log_probabilities, dtype=np.float64)
    if array.ndim != 2 or len(array) != n:
        raise ValueError(f"step must return log-probabilities (n, V) for the n = {n} prefixes, got shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError("step returned nan, expected log-probabilities")
    if not (array > -np.inf).any():
        raise ValueError("step returned only -inf: no token is possible")
    return array
