"""The errors of functions at extreme inputs, against mpmath in 60 digits: a table for docs/reliability.md.

python benchmarks/accuracy.py             prints the table for the kernels in use
python benchmarks/accuracy.py --write     writes it into docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np
from reliability import replace_table

from tinygrad_mha import kernels, ops

mpmath.mp.dps = 60
Row = list[Any]  # numbers of mpmath


def softmax(x: Row) -> Row:
    e = [mpmath.exp(v) for v in x]
    return [v / mpmath.fsum(e) for v in e]


def log_softmax(x: Row) -> Row:
    return [mpmath.log(p) for p in softmax(x)]


def layer_norm(x: Row) -> Row:
    mean = mpmath.fsum(x) / len(x)
    variance = mpmath.fsum([(v - mean) ** 2 for v in x]) / len(x)
    return [(v - mean) / mpmath.sqrt(variance + mpmath.mpf(1e-5)) for v in x]


def norm(x: Row) -> Row:
    return [mpmath.sqrt(mpmath.fsum([v**2 for v in x]))]


def elementwise(f: Callable[[Any], Any]) -> Callable[[Row], Row]:
    return lambda x: [f(v) for v in x]


def make_inputs() -> dict[str, np.ndarray]:
    """Rows of numbers by name, all of which float32 holds."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(64)
    return {
        "normal": normal,
        "x 30": 30 * normal,
        "+ 1000": normal + 1000,
        "x 1e30": 1e30 * normal,
        "x 1e-30": 1e-30 * normal,
    }


# What is computed, the same in mpmath, and the inputs at which it is.
CASES: list[tuple[str, Callable[[Any], Any], Callable[[Row], Row], tuple[str, ...]]] = [
    ("softmax", ops.softmax, softmax, ("normal", "x 30", "+ 1000", "x 1e30")),
    ("log_softmax", ops.log_softmax, log_softmax, ("normal", "x 30", "+ 1000")),
    (
        "cross_entropy",
        lambda x: ops.cross_entropy(x[None], np.array([5])),
        lambda x: [-log_softmax(x)[5]],
        ("normal", "x 30", "+ 1000"),
    ),
    ("layer_norm", ops.layer_norm, layer_norm, ("normal", "x 30", "+ 1000", "x 1e30")),
    ("norm", ops.norm, norm, ("normal", "x 1e30", "x 1e-30")),
    ("erf", ops.erf, elementwise(mpmath.erf), ("normal", "x 30", "x 1e-30")),
    ("gelu", ops.gelu, elementwise(lambda v: v * mpmath.ncdf(v)), ("normal", "x 30", "x 1e-30")),
    (
        "pow, exponent 1.7",
        lambda x: ops.pow(np.abs(x), 1.7),
        elementwise(lambda v: mpmath.power(abs(v), mpmath.mpf(1.7))),
        ("normal", "x 30", "+ 1000"),
    ),
]


def measure(ours: Any, exact: Row, dtype: type, scale: Any) -> float:
    """The largest error in units in the last place: of each result, or of `scale` where that is larger."""
    eps, tiny = mpmath.mpf(float(np.finfo(dtype).eps)), mpmath.mpf(float(np.finfo(dtype).tiny))
    results = np.ravel(np.asarray(ours)).tolist()
    return float(max(abs(a - e) / (eps * max(abs(e), s, tiny)) for a, e, s in zip(results, exact, scale, strict=True)))


class Errors(NamedTuple):
    """The largest errors of one function at one input."""

    function: str
    input: str
    float32: float
    float64: float


def make_rows() -> Iterator[Errors]:
    inputs = make_inputs()
    for name, ours, theirs, names in CASES:
        for key in names:
            errors = []
            for dtype in (np.float32, np.float64):
                x = inputs[key].astype(dtype)
                row = [mpmath.mpf(v) for v in x.tolist()]
                exact = theirs(row)
                beside_1 = name in ("log_softmax", "cross_entropy", "layer_norm")
                size = [abs(v) for v in row] if name == "gelu" else [mpmath.mpf(int(beside_1))]
                errors.append(measure(ours(x), exact, dtype, size * (len(exact) // len(size))))
            yield Errors(name, key, *errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    parser.add_argument("--json", type=Path, help="also write the errors to this file")
    args = parser.parse_args()
    rows = list(make_rows())
    lines = [f"| `{row.function}` | {row.input} | {row.float32:.1f} | {row.float64:.1f} |" for row in rows]
    table = "\n".join(["| function | input | float32 | float64 |", "|---|---|---|---|", *lines, ""])
    if args.write:
        replace_table("accuracy", table)
    if args.json:
        args.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=2) + "\n")
    print(f"{kernels.active} kernels\n{table}", end="")


if __name__ == "__main__":
    main()
