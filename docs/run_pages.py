"""Run the code of the pages, and write down what it prints and draws.

    python docs/run_pages.py [PAGE ...]         # default: README.md, README.zh.md and every page of docs

A text block behind a code block becomes its output; one that ends with a line `...` shows the beginning and stays as it
is. What follows the command of a console block becomes what that prints. The pictures in docs/gallery that a page shows
are replaced by those that its code has saved.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", DOCS.parent / "README.zh.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n?```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)

COMMAND = re.compile(
    r"^```console\n\$ (?P<command>(?:tinygrad-mha|python) [^\n|]+?)(?: \| head -(?P<head>\d+))?\n(?P<shown>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


def run_blocks(page: Path, names: dict[str, object]) -> Iterator[tuple[re.Match[str], str]]:
    """Run the Python blocks of a page with common names in the current folder: each block, and what it prints."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        lines = text[: block.start("code")].count("\n")
        code = compile("\n" * lines + block["code"], str(page), "exec")  # the right line in a traceback
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, names)
        yield block, output.getvalue()


def run_command(match: re.Match[str]) -> str:
    """What the command of a console block prints in the root of the repository, or its first lines."""
    program, *arguments = shlex.split(match["command"])
    start = ["-m", "tinygrad_mha"] if program == "tinygrad-mha" else []
    done = subprocess.run([sys.executable, *start, *arguments], cwd=DOCS.parent, capture_output=True, encoding="utf-8")
    lines = done.stdout.splitlines(keepends=True)
    return "".join(lines[: int(match["head"]) if match["head"] else None]) or done.stderr


def refresh(page: Path) -> None:
    """Run a page in an empty folder, and write its outputs and pictures."""
    text = page.read_text(encoding="utf-8")
    parts, end = [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block, output in run_blocks(page, {}):
            if block["shown"] is not None and not block["shown"].endswith("...\n"):
                parts += [text[end : block.start("shown")], output]
                end = block.end("shown")
        for name in set(re.findall(r"\]\((?:\.\./|docs/)?gallery/([^)]*)\)", text)):
            if Path(name).exists():  # else another page draws it
                shutil.copyfile(name, DOCS / "gallery" / name)
    text = "".join([*parts, text[end:]])
    for match in reversed(list(COMMAND.finditer(text))):
        text = text[: match.start("shown")] + run_command(match) + text[match.end("shown") :]
    page.write_text(text, encoding="utf-8")


def main(*names: str) -> None:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same plot is the same file
    matplotlib.rcParams["svg.hashsalt"] = "docs"
    sys.path.append(str(DOCS.parent / "examples" / "translation"))
    for page in [Path(name).resolve() for name in names] or PAGES:
        refresh(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
