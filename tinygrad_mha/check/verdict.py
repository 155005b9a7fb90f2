"""The verdict of a check: what was claimed and found, as text, as data and as a table in a notebook."""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from shutil import get_terminal_size
from typing import Any, Literal

import numpy as np

from tinygrad_mha.files.python_files import TimeLimitError, catching_exit, limiting
from tinygrad_mha.tables import make_pre, make_table

__all__ = ["PACKAGE", "CheckError", "Finding", "Status", "StoppedError", "Verdict"]
__all__ += ["confining", "get_width", "name_subject", "wrap_lines"]

Status = Literal["passed", "failed", "does not apply"]

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # whose files are not code of a person
WIDTH = 100  # the most columns of the text
COLOURS = {"failed": "color:#fff;background:#b3261e;font-weight:bold", "passed": "color:#1a7f37"}  # in HTML


@dataclass(frozen=True)
class Finding:
    """What a check found about one claim.

    Attributes:
        name: the short name of the claim, such as "causality" or "scale".
        status: "passed", "failed" or "does not apply".
        message: what was observed, or why the claim does not apply.
        cause: of a failed one, the fault in words; "" if none is known.
        example: of a failed one, the smallest input that shows it: a name and an array or number for each part.
        details: figures for programs.
    """

    name: str
    status: Status
    message: str = ""
    cause: str = ""
    example: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(repr=False)
class Verdict:
    """All findings about one subject: `print` it for a table, `.to_dict()` gives data.

    Attributes:
        subject: the name of what was checked.
        findings: one for each claim.
        problem: why the subject could not be run, or "".
        caveat: what a verdict without a failure does not show, or "".

    `bool(verdict)` is `verdict.ok`.

    Example:
        >>> print(Verdict("mine", [Finding("scale", "failed", "scores are 2.6 times too large", "no 1/sqrt(d_k)")]))
        mine: FAILED (scale)
          FAILED  scale  scores are 2.6 times too large
                         cause: no 1/sqrt(d_k)
    """

    subject: str
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""
    caveat: str = ""

    def __bool__(self) -> bool:
        return self.ok  # so that `assert check.attention(f)` means what it says

    @property
    def failed(self) -> list[Finding]:
        """The findings that failed."""
        return [finding for finding in self.findings if finding.status == "failed"]

    @property
    def ok(self) -> bool:
        """Whether the subject could be run and no claim failed."""
        return not self.problem and not self.failed

    @property
    def status(self) -> str:
        """`passed`, `failed` or `could not be run`."""
        return "could not be run" if self.problem else "failed" if self.failed else "passed"

    @property
    def summary(self) -> str:
        """The status, of a verdict with a caveat `passed what applies; ...`."""
        return f"passed what applies; {self.caveat}" if self.caveat and self.ok else self.status

    @property
    def exit_code(self) -> int:
        """Of a command that prints this verdict: 0 passed, 1 failed, 2 could not be run."""
        return {"passed": 0, "failed": 1, "could not be run": 2}[self.status]

    def raise_if_failed(self) -> None:
        """Raise `CheckError` unless the verdict is ok.

        Example:
            >>> Verdict("mine", [Finding("scale", "passed")]).raise_if_failed()
        """
        if not self.ok:
            raise CheckError(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON: arrays are lists; nan and infinities are strings."""
        findings = [as_plain_data(vars(finding)) for finding in self.findings]
        facts = {"subject": self.subject, "status": self.status, "ok": self.ok, "problem": self.problem}
        facts["caveat"] = self.caveat
        return facts | {"findings": findings}

    def __repr__(self) -> str:
        return str(self)  # what the prompt of Python shows

    def __str__(self) -> str:
        width = get_width()
        names = ", ".join(dict.fromkeys(finding.name for finding in self.failed))
        lines = textwrap.wrap(f"{self.subject}: {self.summary}", width, subsequent_indent="  ")
        if self.problem:
            lines += textwrap.wrap(self.problem, width, initial_indent="  ", subsequent_indent="  ")
        elif names:
            lines = textwrap.wrap(f"{self.subject}: FAILED ({names})", width, subsequent_indent="  ")
        groups: dict[Any, list[Finding]] = {}  # what was said of several claims alike stands on one line
        for finding in sorted(self.findings, key=lambda finding: finding.status != "failed"):
            groups.setdefault((finding.status, finding.message, finding.cause), []).append(finding)
        first = max((len(self._status_word(finding)) for finding in self.findings), default=0)
        second = max((len(finding.name) for finding in self.findings), default=0)
        indent = " " * (first + second + 6)
        for finding, *others in groups.values():
            start = f"  {self._status_word(finding):{first}}  {finding.name:{second}}  "
            also = f" (also {', '.join(other.name for other in others)})" if others else ""
            parts = [finding.message + also, f"cause: {finding.cause}" if finding.cause else ""]
            text = [line for part in parts for line in textwrap.wrap(part, width - len(indent))]
            text += [format_value(name, value, width - len(indent)) for name, value in finding.example.items()]
            lines.append(start + textwrap.indent("\n".join(text), indent).lstrip())
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        rows = []
        for finding in sorted(self.findings, key=lambda finding: finding.status != "failed"):
            text = html.escape(finding.message)
            if finding.cause:
                text += f"<br><b>cause: {html.escape(finding.cause)}</b>"
            if finding.example:
                parts = "\n".join(format_value(name, value, WIDTH) for name, value in finding.example.items())
                text += make_pre(parts)
            status = html.escape(self._status_word(finding))
            if finding.status in COLOURS:
                status = f'<span style="{COLOURS[finding.status]};padding:1px 5px;white-space:nowrap">{status}</span>'
            rows.append((status, html.escape(finding.name), text))
        title = f"{self.subject}: {self.summary}" + (f". {self.problem}" if self.problem else "")
        return make_table(title, rows)

    @staticmethod
    def _status_word(finding: Finding) -> str:
        return "FAILED" if finding.status == "failed" else finding.status


class CheckError(AssertionError):
    """Raised by `Verdict.raise_if_failed`; `.verdict` has the details."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class StoppedError(RuntimeError):
    """A person's code that calls sys.exit() or does not return in time, so that nothing was computed."""


@contextlib.contextmanager
def confining() -> Iterator[None]:
    """While a call of a person's code runs, its sys.exit() or endless loop raises `StoppedError`."""
    try:
        with limiting(), catching_exit():
            yield
    except SystemExit as error:
        raise StoppedError(f"it calls sys.exit({'' if error.code is None else error.code})") from error
    except TimeLimitError as error:
        raise StoppedError(str(error)) from error


def get_width() -> int:
    """The columns of the terminal, 50 to 100; 100 if the output is no terminal."""
    return max(WIDTH // 2, min(WIDTH, get_terminal_size((WIDTH, 0)).columns))


def wrap_lines(text: str, indent: str) -> str:
    """The text with lines that fit the terminal; `indent` stands before what continues a line. Nothing is cut."""
    lines = (textwrap.wrap(line, get_width(), subsequent_indent=indent) for line in text.splitlines())
    return "\n".join(itertools.chain.from_iterable(lines))


def name_subject(f: Any) -> str:
    """The name of a function, of a primitive, or of the class of a module."""
    f = getattr(f, "__wrapped__", f)
    return str(getattr(f, "__name__", None) or getattr(f, "name", None) or type(f).__name__)


def format_value(name: str, value: Any, width: int) -> str:
    """`name = value`; the rows of an array stand under each other."""
    if isinstance(value, np.ndarray):
        value = np.array2string(value, width - len(name) - 3, precision=4, suppress_small=True, separator=", ")
    first, *rest = str(value).splitlines() or [""]
    return "\n".join([f"{name} = {first}", *(" " * (len(name) + 3) + line for line in rest)])


def as_plain_data(value: Any) -> Any:
    """`value` with arrays as lists, NumPy numbers as Python's, and nan and infinities as strings."""
    if isinstance(value, (np.ndarray, np.generic)):
        return as_plain_data(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): as_plain_data(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain_data(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
