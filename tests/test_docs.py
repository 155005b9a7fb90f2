"""The code in README, docs and docstrings runs, pages agree with the code, and imports go in one direction."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import importlib.metadata
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest

import tinygrad_mha as tg
from tinygrad_mha.cli import main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinygrad_mha"
sys.path.append(str(ROOT / "docs"))
autodiff_rules, run_pages = (importlib.import_module(name) for name in ("autodiff_rules", "run_pages"))
PAGES = run_pages.PAGES
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "tinygrad_mha."))


LINK = re.compile(r"\]\(([^()\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def name_page(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_code_block_runs_and_prints_what_the_page_shows(page, own_primitives, tmp_path, monkeypatch):
    """A text block behind a code block is its output, or the beginning of it if it ends with a line `...`; a comment
    behind `print(...)` begins with what that prints. `python docs/run_pages.py PAGE` writes the outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "translation")
    lines = page.read_text(encoding="utf-8").split("\n")

    def print_and_compare(*values, **options):
        print(*values, **options)
        line = lines[sys._getframe(1).f_lineno - 1]
        if match := re.match(r"print\(.*\)  +# (.*)", line):
            assert match[1].startswith(" ".join(map(str, values)))

    for block, output in run_pages.run_blocks(page, {"print": print_and_compare}):
        if block["shown"] is not None:
            printed, shown = hide_rounding(output), hide_rounding(block["shown"])
            if shown.endswith("\n...\n"):
                shown = shown.removesuffix("...\n")
                printed = printed[: len(shown)]
            assert printed == shown, f"run: python docs/run_pages.py {name_page(page)}"


def hide_rounding(text):
    """Differences by rounding, and errors of finite differences, depend on the machine."""
    text = re.sub(r"\d\.\de-(09|1\d)|0\.0e\+00", "0.0e-16", text)
    return re.sub(r"(\d\.\d{8})\d+", r"\1", text)


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    for target in (match[1] or match[2] for match in LINK.finditer(text)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in list_anchors(file), f"{page.name} links to {target}"


def list_anchors(page):
    """The anchors of the headings of a page, as code hosts and the site make them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]


def test_the_description_for_a_package_index_has_no_link_into_the_repository():
    description = importlib.metadata.metadata("tinygrad_mha").get_payload()
    assert "# tinygrad_mha" in description
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https:")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_a_page_mentions_public_names_that_exist(page):
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    for code in re.findall(r"`([^`\n]+)`", text):
        for path in re.findall(r"\btg((?:\.[A-Za-z_]\w*)+)", code):
            value = tg
            for name in path[1:].split("."):
                assert hasattr(value, name), f"{page.name} mentions tg{path}"
                value = getattr(value, name)


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1].split("theme:")[0])
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    made = {
        "index.md",
        "zh/index.md",
        "contributing.md",
        "changelog.md",
        *(name for name in navigation if name.startswith("reference/")),
    }
    assert sorted(navigation) == sorted(pages | made)


def test_the_site_shows_docstrings_and_links_as_they_are():
    pytest.importorskip("mkdocs")
    hooks = importlib.import_module("site_hooks")
    assert hooks.escape_text("x**2 of `a[0]`\n>>> x[0]\n1") == "x\\*\\*2 of `a[0]`\n>>> x[0]\n1"
    assert hooks.move_links("[a](docs/a.md) [e](examples/e.py) [h](README.md)", "zh/index.md") == (
        "[a](../a.md) [e](../examples/e.py) [h](../index.md)"
    )
    assert (
        hooks.join_chinese_lines("注意\n力\n```python\n# 力\n字 = 1\n```\n") == "注意力\n```python\n# 力\n字 = 1\n```\n"
    )


def test_every_picture_of_the_gallery_is_drawn_by_the_code_of_a_page_and_shown():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    code = "".join(block["code"] for text in texts for block in run_pages.BLOCK.finditer(text))
    for picture in (ROOT / "docs" / "gallery").iterdir():
        assert f'"{picture.name}"' in code, f"no page draws {picture.name}"
        assert any(f"gallery/{picture.name})" in text for text in texts), f"no page shows {picture.name}"
    for picture in (ROOT / "docs" / "images").iterdir():
        assert any(f"images/{picture.name})" in text for text in texts), f"no page shows {picture.name}"


COMMANDS = [match for page in PAGES for match in run_pages.COMMAND.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("match", COMMANDS, ids=lambda match: match["command"])
def test_a_page_shows_what_a_command_prints(match):
    assert run_pages.run_command(match) == match["shown"]


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_the_options_of_every_command_exist(page, monkeypatch):
    def parse_only(*args, parse=argparse.ArgumentParser.parse_known_args):
        found, unknown = parse(*args)
        found.run = lambda _: 0
        return found, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    for block in re.findall(r"(?ms)^```sh\n(.*?)^```", page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if "tinygrad-mha" in words and "..." not in words:
                assert main(words[words.index("tinygrad-mha") + 1 :]) == 0, line


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_is_true(name, own_primitives):
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, extraglobs={"tg": tg, "np": __import__("numpy")}, optionflags=flags).failed == 0


def test_the_page_on_autodiff_lists_the_rules_of_the_registry():
    assert autodiff_rules.read_table() == autodiff_rules.make_table(), "run: python docs/autodiff_rules.py"


def test_the_page_on_other_libraries_lists_the_names_that_errors_know(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    names = importlib.import_module("name_tables")
    assert names.read_tables() == names.make_tables(), "run: python docs/name_tables.py"


def list_files_of_the_design():
    """The files that docs/design.md lists, in its order."""
    table = (ROOT / "docs" / "design.md").read_text().split("| file |")[1].split("\n\n")[0]
    return re.findall(r"`([\w/]+\.py)`", table)


def test_the_page_on_the_design_lists_every_file_once():
    files = sorted(f.relative_to(PACKAGE).as_posix() for f in PACKAGE.rglob("*.py") if not f.name.startswith("__"))
    assert sorted(list_files_of_the_design()) == files, "docs/design.md lists the files and what each decides"


def test_each_file_imports_only_files_before_it_in_the_design():
    files = list_files_of_the_design()
    for i, file in enumerate(files):
        for node in ast.parse((PACKAGE / file).read_text()).body:  # imports for types only are in an `if`
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinygrad_mha"):
                path = node.module.split(".")[1:]
                for imported_path in [path, *([*path, alias.name] for alias in node.names)]:
                    name = "/".join(imported_path) + ".py"
                    assert name not in files[i:], f"{file} imports {name}, which is after it in docs/design.md"


# A part of the package imports only parts before it in this list.
PARTS = [
    "arguments",
    "torch_names",
    "notation",
    "tables",
    "primitives",
    "kernels",
    "ops",
    "numpy_protocol",
    "modes",
    "engine",
    "tensors",
]
PARTS += [
    "transforms",
    "files",
    "data",
    "decoding",
    "nn",
    "optim",
    "viz",
    "training",
    "check",
    "demo",
    "laboratory",
    "programs",
    "cli",
]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_run_in_one_direction(file):
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for statement in ast.walk(node) if inside else [node]:
            names = imported(statement)
            assert not (inside and names), f"{file.name} imports {names} inside a function"
            if part in ("__init__", "__main__"):
                continue
            for name in names - {part}:
                assert name in PARTS, f"{name} is not in PARTS"
                assert PARTS.index(name) < PARTS.index(part), f"{part} imports {name}, which is after it"


def imported(node):
    """The parts of this package that a statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tinygrad_mha":
        parts = node.module.split(".")[1:]
        return {parts[0]} if parts else {alias.name for alias in node.names}
    if isinstance(node, ast.Import):
        return {a.name.split(".")[1] for a in node.names if a.name.startswith("tinygrad_mha.")}
    return set()
