"""What a computation with a cache costs and saves, counted on recorded runs.

A row belongs to one token in one layer, all heads together. A row that a step computes is kept in the cache, and reused
by later steps, or discarded at the end of the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinygrad_mha import engine
from tinygrad_mha.decoding import count_multiply_adds
from tinygrad_mha.tensors import Tensor

__all__ = ["Ledger", "LedgerStep", "count_work"]

ROWS = ["Q", "K", "V", "scores"]


class LedgerStep(NamedTuple):
    """One step, or a sum of steps, with a cache and without it.

    Both count "Q computed", "Q reused", "Q discarded", the same for "K", "V" and "scores", "multiply-adds" (of all
    matrix products, see `decoding.count_multiply_adds`), "bytes" (of the rows computed) and "bytes kept" (those of them
    that stay in the cache).
    """

    cached: Counter[str]
    uncached: Counter[str]


@dataclass(repr=False)
class Ledger:
    """The steps of a run. `print` it for a table; in its lines, reused and discarded are sums of Q, K, V and scores."""

    steps: list[LedgerStep] = field(default_factory=list)

    @property
    def total(self) -> LedgerStep:
        """The sum of all steps."""
        return LedgerStep(*(sum((step[i] for step in self.steps), Counter()) for i in (0, 1)))

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        steps = [step._asdict() for step in (*self.steps, self.total)]
        return {"steps": steps[:-1], "total": steps[-1]}

    def __repr__(self) -> str:
        return str(self)  # what the prompt of Python shows

    def __str__(self) -> str:
        table = [["step", "cache", *ROWS, "reused", "discarded", "multiply-adds", "bytes", "bytes kept"]]
        for i, step in enumerate([*self.steps, self.total]):
            for cache, counts in zip(("with", "without"), step, strict=True):
                numbers = [counts[f"{row} computed"] for row in ROWS]
                numbers += [sum(counts[f"{row} {fate}"] for row in ROWS) for fate in ("reused", "discarded")]
                numbers += [counts[name] for name in table[0][-3:]]
                title = "total" if i == len(self.steps) else str(i)
                table.append([title, cache, *(f"{number:,}" for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in table]
        if self.steps and not any(self.total.uncached[f"{row} computed"] for row in ROWS):
            lines.append("no scores are shown by edit, so rows of Q, K, V and scores are not counted")
        return "\n".join(lines)


def count_work(y: Tensor, attentions: list[dict[str, Tensor]], kept: int) -> Counter[str]:
    """Count one recorded step.

    Args:
        y: its result.
        attentions: of each layer the input x, the output y and the steps that it showed. Without scores or weights, its
            rows are not counted.
        kept: the number of tokens that the step added to the cache.
    """
    counts = Counter({"multiply-adds": count_multiply_adds(y)})
    for steps in attentions:
        scores = steps.get("scores", steps.get("weights"))
        if scores is None:
            continue
        node = steps["x"].node
        inputs = engine.toposort([steps["y"]], newer_than=-1 if node is None else node.stamp, everything=True)
        reused = {tensor.name: tensor.shape[-2] for tensor in inputs if tensor.node is None and tensor.ndim > 1}
        n_q, n_k = scores.shape[-2:]
        for row in ROWS:
            old = reused.get(f"cached {row}", 0)
            new = n_q if row in ("Q", "scores") else n_k - old
            stays = kept if row in ("K", "V") else 0
            counts += {f"{row} computed": new, f"{row} reused": old, f"{row} discarded": new - stays}
            if row.lower() in steps:
                size = steps[row.lower()].numpy().nbytes // steps[row.lower()].shape[-2]  # of one row
                counts += {"bytes": size * new, "bytes kept": size * stays}
    return counts
