"""The report of a gradient check, as text and as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from tinygrad_mha.check.verdict import as_plain_data, wrap_lines
from tinygrad_mha.tables import make_table

__all__ = ["Difference", "Entry", "GradcheckError", "GradcheckReport"]


@dataclass
class Difference:
    """An analytic and a numeric derivative with respect to the element `index` of the tensor `name`.

    Attributes:
        absolute: |analytic - numeric|; infinite if one of them is nan.
        relative: `absolute` divided by the larger of the two sizes; 0 if both derivatives are 0.
    """

    name: str
    index: tuple[int, ...]
    analytic: float
    numeric: float
    absolute: float = field(init=False)
    relative: float = field(init=False)

    def __post_init__(self) -> None:
        size = max(abs(self.analytic), abs(self.numeric))
        self.absolute = abs(self.analytic - self.numeric)
        self.relative = self.absolute / size if size else 0.0
        if not math.isfinite(self.absolute):
            self.absolute = self.relative = math.inf

    def __str__(self) -> str:
        element = f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name
        return (
            f"{element}: analytic {self.analytic:.10g}, numeric {self.numeric:.10g}, "
            f"off by {self.absolute:.2g} absolute, {self.relative:.2g} relative"
        )


@dataclass
class Entry:
    """The result for one input or parameter.

    Attributes:
        name: the name of the input or parameter.
        shape: its shape.
        order: 1 for the first derivative, 2 for the second.
        status: `ok`; `wrong`; `vacuous` (the output is built on it, but the gradient is zero everywhere, so the check
            proves nothing); `cut` (the output depends on it, but the graph does not reach it); `ignored` (the function
            does not use it); `zero` (as declared with `zero=`, or a second derivative that is zero); `empty` (it has no
            element, or no finite one, so that nothing was compared).
        checked: the number of elements compared.
        worst: the element with the largest difference.
        kinks: the elements without a derivative.
        sweep: (step, absolute error) for a range of steps at the worst element of a wrong gradient.
        note: an explanation, or "".
    """

    name: str
    shape: tuple[int, ...]
    order: int
    status: str = "ok"
    checked: int = 0
    worst: Difference | None = None
    kinks: list[Difference] = field(default_factory=list)
    sweep: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""


@dataclass(repr=False)
class GradcheckReport:
    """The result of `gradcheck`: `print` it for a table, `.to_dict()` gives data.

    Attributes:
        function: the name of the function or module.
        entries: one entry per input and parameter, and per order.
        problem: why nothing could be checked, or "".

    `bool(report)` is `report.ok`.
    """

    function: str
    entries: list[Entry] = field(default_factory=list)
    problem: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether there was no problem, and every entry is ok, ignored, empty or zero as declared."""
        return not self.problem and all(e.status in ("ok", "ignored", "zero", "empty") for e in self.entries)

    @property
    def worst(self) -> Difference | None:
        """The element with the largest relative error, among the wrong ones if there are any."""
        wrong = [e.worst for e in self.entries if e.worst and e.status == "wrong"]
        candidates = wrong or [e.worst for e in self.entries if e.worst]
        return max(candidates, key=lambda d: d.relative, default=None)

    @property
    def verdict(self) -> str:
        """`ok`; `FAILED`, if a gradient is wrong; else `proves nothing, because ...`."""
        if self.ok:
            return "ok"
        if any(e.status in ("wrong", "cut") for e in self.entries):
            return "FAILED"
        vacuous = ", ".join(e.name for e in self.entries if e.status == "vacuous")
        return f"proves nothing, because {self.problem or f'the gradient of {vacuous} is zero everywhere'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        facts = {"ok": self.ok, "verdict": self.verdict, "worst": self.worst and asdict(self.worst)}
        return {str(name): as_plain_data(value) for name, value in (asdict(self) | facts).items()}

    def __repr__(self) -> str:
        return str(self)  # what the prompt of Python shows

    def __str__(self) -> str:
        lines = [f"gradcheck of {self.function}: {self.verdict}"]
        width = max((len(e.name) for e in self.entries), default=0)
        for e in self.entries:
            worst = f"largest error {e.worst.absolute:.1e} ({e.worst.relative:.1e} relative)" if e.worst else ""
            order = f"{('first', 'second')[e.order - 1]:8}" if self.entries[-1].order == 2 else ""
            line = f"  {e.name:{width}}  {e.shape!s:12} {order}{e.status:8} {e.checked:4} checked  {worst}"
            lines.append(line.rstrip())
            if e.status == "wrong" and e.worst:
                lines.append(f"    {e.worst}")
            lines += [f"    {note}" for note in e.note.splitlines()]
            lines += [f"    step {h:7.0e}  error {error:.1e}" for h, error in e.sweep]
        return wrap_lines("\n".join(lines), " " * 6)

    def _repr_html_(self) -> str:
        rows = []
        for e in self.entries:
            error = f"{e.worst.relative:.1e}" if e.worst else ""
            details = "\n".join([*([str(e.worst)] if e.status == "wrong" else []), *e.note.splitlines()])
            order = ("first", "second")[e.order - 1]
            rows.append([escape(e.name), str(e.shape), order, e.status, str(e.checked), error, escape(details)])
        header = ["", "shape", "order", "", "checked", "largest relative error", ""]
        return make_table(f"gradcheck of {self.function}: {self.verdict}", rows, header)


class GradcheckError(AssertionError):
    """Raised by `gradcheck` when a gradient is wrong or nothing could be checked; `.report` has the details."""

    def __init__(self, report: GradcheckReport) -> None:
        super().__init__(str(report))
        self.report = report
