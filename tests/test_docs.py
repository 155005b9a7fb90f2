"""The code in README, docs and docstrings runs, pages agree with the code, and imports go in one direction."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import tinygrad_mha as tg
from tinygrad_mha.cli import main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinygrad_mha"
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "tinygrad_mha."))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_runs(page, own_primitives, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "translation")
    names: dict[str, object] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        line = page.read_text()[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(page), "exec")  # the right line in a traceback
        exec(code, names)


COMMAND = r"(?sm)^```console\n\$ tinygrad-mha ([^\n|]+?)(?: \| head -(\d+))?\n(.*?)^```"
COMMANDS = [match.groups() for page in PAGES for match in re.finditer(COMMAND, page.read_text())]


@pytest.mark.parametrize(("command", "head", "output"), COMMANDS)
def test_a_page_shows_what_a_command_prints(command, head, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command))
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert "".join(lines[: int(head) if head else None]) == output


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_is_true(name, own_primitives):
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, extraglobs={"tg": tg, "np": __import__("numpy")}, optionflags=flags).failed == 0


def test_the_page_on_autodiff_lists_the_rules_of_the_registry(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    rules = importlib.import_module("autodiff_rules")
    assert rules.read_table() == rules.make_table(), "run: python docs/autodiff_rules.py"


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
PARTS = ["arguments", "notation", "primitives", "kernels", "ops", "numpy_protocol", "modes", "engine", "tensors"]
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
