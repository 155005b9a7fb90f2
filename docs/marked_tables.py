"""Tables that scripts write into pages, between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from pathlib import Path


def read_marked(page: Path, name: str) -> str:
    """The text between the marks."""
    return split_page(page, name)[1]


def write_marked(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks."""
    before, _, after = split_page(page, name)
    page.write_text(before + text + after, encoding="utf-8")


def split_page(page: Path, name: str) -> tuple[str, str, str]:
    """The page before the text between the marks, that text, and the page after it. The outer parts hold the marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    text, after = rest.split(end)
    return before + begin, text, end + after
