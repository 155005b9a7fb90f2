"""The long run of everything that looks for faults, and its report: python benchmarks/reliability.py [--only NAME].

Each part is a script of its own that writes counts as JSON. They are kept in reliability.json, so that parts can run
on different days, and written into docs/reliability.md.
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
PAGE, KEPT = ROOT / "docs/reliability.md", ROOT / "reliability.json"

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


# Each part: the command, to which --json FILE is added, and the rows that its counts make.
PARTS: dict[str, tuple[list[str], Callable[[Counts], list[str]]]] = {
    "programs": (["tests/differential.py", "--programs", "10000"], describe_programs),
    "mutants": (["benchmarks/mutants.py", "--count", "200"], describe_mutants),
    "load": (["benchmarks/load.py"], describe_load),
}


def run(command: list[str]) -> Counts:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counts.json")
        subprocess.run([sys.executable, *command, "--json", str(file)], cwd=ROOT, env=environment, check=False)
        return json.loads(file.read_text())


def write_page(kept: dict[str, Counts]) -> None:
    rows = [
        f"| {name} | {kept[name]['date']} | {line} |"
        for name, (_, describe) in PARTS.items()
        if name in kept
        for line in describe(kept[name]["counts"])
    ]
    replace_table("long run", "\n".join(["| part | date | result |", "|---|---|---|", *rows, ""]))


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
    kept: dict[str, Counts] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in args.only:
        command, _ = PARTS[name]
        kept[name] = {"date": datetime.date.today().isoformat(), "counts": run(command)}
        KEPT.write_text(json.dumps(kept, indent=2) + "\n")
    write_page(kept)


if __name__ == "__main__":
    main()
