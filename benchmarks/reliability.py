"""The long run of everything that looks for faults, and its report: python benchmarks/reliability.py [--only NAME].

Each part is a script of its own that writes counts as JSON. They become rows of the table in docs/reliability.md; the
rows of parts that do not run stay.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reliability.md"

Counts = dict[str, Any]


def describe_programs(counts: Counts) -> list[str]:
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in counts["programs"].items())
    total = sum(counts["programs"].values())
    return [f"{total:,} random programs ({kinds}): {len(counts['disagreements'])} disagreements with torch"]


def describe_mutants(counts: Counts) -> list[str]:
    left, same = len(counts["survivors"]), len(counts["equivalent"])
    noticed = counts["mutants"] - left - same
    return [
        f"{counts['mutants']} faults put in: {noticed} noticed by a test, {same} without effect, {left} not noticed"
    ]


def describe_load(counts: Counts) -> list[str]:
    lines = []
    for entry in counts.values():
        figures = [f"{key}: {value}" for key, value in entry.items() if key not in ("what", "seconds")]
        lines.append(f"{entry['what'].splitlines()[0]} {', '.join(figures)}")
    return lines


def describe_readers(counts: Counts) -> list[str]:
    total = sum(reader["files"] for reader in counts.values())
    accepted = sum(reader.get("accepted", 0) for reader in counts.values())
    kinds = ", ".join(f"{name} {reader['files']:,}" for name, reader in counts.items())
    return [
        f"{total:,} damaged files ({kinds}): {total - accepted:,} refused in one clear error, with nothing written and "
        f"nothing executed, {accepted:,} still valid"
    ]


def describe_accuracy(counts: Counts) -> list[str]:
    figures = []
    for kind in ("float32", "float64"):
        worst = max(counts["rows"], key=lambda row: row[kind])
        figures.append(f"{worst[kind]:.1f} in {kind} ({worst['function']}, {worst['input']})")
    return [f"{len(counts['rows'])} rows of the table below: largest errors {' and '.join(figures)}"]


# Each part: the command, to which --json FILE is added, and the rows that its counts make.
PARTS: dict[str, tuple[list[str], Callable[[Counts], list[str]]]] = {
    "programs": (["tests/differential.py", "--programs", "10000"], describe_programs),
    "mutants": (["benchmarks/mutants.py", "--count", "200"], describe_mutants),
    "load": (["benchmarks/load.py"], describe_load),
    "readers": (["tests/test_hostile_readers.py", "--files", "20000"], describe_readers),
    "sudden death": (["benchmarks/sudden_death.py"], describe_load),
    "accuracy": (["benchmarks/accuracy.py", "--write"], describe_accuracy),
}


def run(command: list[str]) -> Counts:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counts.json")
        subprocess.run([sys.executable, *command, "--json", str(file)], cwd=ROOT, env=environment, check=False)
        return json.loads(file.read_text())


def write_page(part: str, lines: list[str]) -> None:
    """Replace the rows of one part in the table; those of the others stay."""
    rows = read_rows() | {part: [f"| {part} | {datetime.date.today().isoformat()} | {line} |" for line in lines]}
    table = ["| part | date | result |", "|---|---|---|", *(row for name in PARTS for row in rows.get(name, [])), ""]
    replace_table("long run", "\n".join(table))


def read_rows() -> dict[str, list[str]]:
    """The rows of each part in the table."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- long run: begin -->")
    rows: dict[str, list[str]] = {}
    for line in rest.partition("<!-- long run: end -->")[0].splitlines()[3:]:
        rows.setdefault(line.split("|")[1].strip(), []).append(line)
    return rows


def replace_table(name: str, table: str) -> None:
    """Write a table between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of the page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.escape(begin) + ".*" + re.escape(end)
    PAGE.write_text(re.sub(pattern, lambda _: begin + table + end, text, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    for name in args.only:
        command, describe = PARTS[name]
        write_page(name, describe(run(command)))


if __name__ == "__main__":
    main()
