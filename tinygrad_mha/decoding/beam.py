"""Beam search: look for the most probable continuation, keeping only a limited number of prefixes at each step.

Greedy decoding takes the most probable next token at every step and never revises it. Beam search keeps the best few
prefixes, because the second best prefix may have the best continuation. Their number is the beam width, `beam`. A width
of 1 is greedy decoding; a width as large as the number of sequences is exhaustive search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.arguments import check_count, check_number

__all__ = ["BeamSearchResult", "Hypothesis", "SearchNode", "beam_search"]

StepFunction = Callable[[np.ndarray, np.ndarray], Any]
End = int | Callable[[np.ndarray], bool] | None

KEPT, ENDED, DROPPED = "kept", "ended", "dropped"


class SearchNode(NamedTuple):
    """A token that was considered as the continuation of another node (-1: of the start)."""

    token: int
    log_probability: float  # of all tokens from the start to this one
    parent: int
    status: str  # "kept" (continued), "ended" (the sequence ended here) or "dropped" (not among the best)


class Hypothesis(NamedTuple):
    """A complete continuation."""

    tokens: np.ndarray  # (n,), including the token that ended it
    log_probabilities: np.ndarray  # (n,), of each token given those before it
    log_probability: float  # the total
    score: float  # the total, divided by the length penalty
    node: int  # index of its last node


class BeamSearchResult(NamedTuple):
    """The result of a search: all hypotheses, best first, and every node that was considered."""

    hypotheses: list[Hypothesis]
    nodes: list[SearchNode]

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
            mark = marks[node.status] + (" *" if i == self.best.node else "")
            probability = np.exp(node.log_probability)
            lines.append(f"{indent}{'└' if last else '├'} {name(node.token)} {probability:.2g}{mark}")
            stack += [(child, indent + ("  " if last else "│ ")) for child in reversed(children.get(i, []))]
        return "\n".join(lines)


def beam_search(
    step: StepFunction, start: Iterable[int], end: End, beam: int, max_new_tokens: int, length_penalty: float = 0.0
) -> BeamSearchResult:
    """Search for the continuation of `start` with the highest score.

    score = total log-probability / ((5 + n) / 6) ** length_penalty (arXiv:1609.08144, equation 14) with n new tokens,
    the one that ended the sequence included. Each token lowers the log-probability, so a penalty of 0 prefers short
    sequences; with 0.6 to 1 longer ones can win. The penalty matters for complete sequences only: the prefixes of one
    step have the same length.

    At every step each prefix is extended by every token. The most probable extensions are kept: `beam` minus the number
    of sequences that have ended. At a tie, the extension of the better ranked prefix is kept, then the lower token id.
    If complete sequences have the same score, the shorter one is better, then the one with the lower ids.

    Args:
        step: `step(prefixes, parents)` returns log-probabilities (n, V) of the next token of each of `prefixes`
            (n, t), which include `start`. Row i extends row `parents[i]` of the previous call (0 in the first call), so
            that a cache can be rearranged.
        start: the ids to continue, at least one.
        end: the token that ends a sequence, or a function that takes the new tokens (n,) of a sequence and returns
            whether it ends with the last of them; None if there is none.
        beam: the beam width: the largest number of prefixes kept, and of sequences found.
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
    check_number(length_penalty, "length_penalty")
    if prefix.ndim != 1 or prefix.size == 0 or prefix.dtype.kind not in "iu":
        raise ValueError(f"start must be a row of at least one id, got {prefix!r}")
    is_end = end if callable(end) else lambda tokens: tokens[-1] == end
    prefixes, logs = prefix[None], np.zeros((1, 0))  # ids (n, t), and the log-probabilities of their new tokens
    row_nodes = [-1]  # the last node of each prefix
    parents = np.zeros(1, np.int64)
    nodes: list[SearchNode] = []
    ended: list[Hypothesis] = []
    for n in range(1, max_new_tokens + 1):
        table = check_step(step(prefixes, parents), len(prefixes))  # log-probabilities of the next token, (n, V)
        totals = logs.sum(axis=1, keepdims=True) + table
        chosen = find_best(totals.ravel(), beam - len(ended))  # flat indices: row * V + token
        parents, tokens = np.divmod(chosen, totals.shape[1])
        prefixes = np.concatenate([prefixes[parents], tokens[:, None]], axis=1)
        logs = np.concatenate([logs[parents], table.ravel()[chosen, None]], axis=1)
        done = np.array([n == max_new_tokens or bool(is_end(row[len(prefix) :])) for row in prefixes])
        statuses = dict(zip(chosen.tolist(), np.where(done, ENDED, KEPT).tolist(), strict=True))
        index = add_nodes(nodes, totals, row_nodes, statuses, beam)
        for i in np.flatnonzero(done):
            node = index[int(chosen[i])]
            total = nodes[node].log_probability
            score = total / ((5 + n) / 6) ** length_penalty
            ended.append(Hypothesis(prefixes[i, len(prefix) :], logs[i], total, score, node))
        if done.all():
            break
        row_nodes = [index[int(flat)] for flat in chosen[~done]]
        prefixes, logs, parents = prefixes[~done], logs[~done], parents[~done]
    ended.sort(key=lambda found: (-found.score, len(found.tokens), found.tokens.tolist()))
    return BeamSearchResult(ended, nodes)


def find_best(totals: np.ndarray, n: int) -> np.ndarray:
    """The indices of the `n` largest numbers, the largest first, without those of -inf. Ties: lowest index first."""
    candidates = np.arange(len(totals))
    if n < len(totals):  # sort only what is not smaller than the n-th largest number
        candidates = candidates[totals >= np.partition(totals, -n)[-n]]
    best = candidates[np.argsort(-totals[candidates], kind="stable")][:n]
    return best[totals[best] > -np.inf]


def add_nodes(
    nodes: list[SearchNode], totals: np.ndarray, row_nodes: list[int], statuses: dict[int, str], beam: int
) -> dict[int, int]:
    """Append the `beam` best extensions of every prefix to `nodes`; return {flat index into `totals`: node index}.

    `statuses` gives the status of the chosen extensions, by flat index; all others were dropped. The `beam` best
    extensions of each prefix include every chosen one.
    """
    index = {}
    for row, line in enumerate(totals):
        for token in find_best(line, beam).tolist():
            flat = row * totals.shape[1] + token
            index[flat] = len(nodes)
            nodes.append(SearchNode(token, float(line[token]), row_nodes[row], statuses.get(flat, DROPPED)))
    return index


def check_step(log_probabilities: Any, n: int) -> np.ndarray:
    """Return what a step returned as an array (n, V), or raise ValueError."""
    array = np.asarray(log_probabilities, dtype=np.float64)
    if array.ndim != 2 or len(array) != n:
        raise ValueError(f"step must return log-probabilities (n, V) for the n = {n} prefixes, got shape {array.shape}")
    if np.isnan(array).any():
        row = int(np.argwhere(np.isnan(array))[0, 0])
        raise ValueError(f"step returned nan for prefix {row}, expected log-probabilities (-inf: impossible)")
    if not (array > -np.inf).any():
        raise ValueError("step returned only -inf, expected at least one possible token for at least one prefix")
    return array
