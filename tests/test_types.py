"""Type checkers understand typical user code, and report its mistakes. Public names are documented and found by Tab."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import tinygrad_mha as tg

HERE = Path(__file__).parent
USER_CODE, MISTAKES = HERE / "typing_user_code.py", HERE / "typing_mistakes.py"
CHECKERS = {"mypy": ["--strict", "--no-error-summary"], "pyright": ["--pythonpath", sys.executable]}


def check_types(checker, file, tmp_path):
    """The exit code of a type checker, and the numbers of the lines that it reports."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f'{checker} is not installed: pip install "tinygrad_mha[dev]"')
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "MYPY_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", checker, *CHECKERS[checker], str(file)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=environment)
    found = re.findall(rf"{file.name}:(\d+)(?::\d+)?(?: -|:) error: (.*)", run.stdout)
    return run.returncode, {int(line): message for line, message in found}, run.stdout + run.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_typical_user_code_has_the_types_that_it_states(checker, tmp_path):
    code, found, output = check_types(checker, USER_CODE, tmp_path)
    assert (code, found) == (0, {}), output


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_mistake_in_user_code_is_reported_on_its_line(checker, tmp_path):
    _, found, output = check_types(checker, MISTAKES, tmp_path)
    expected = [i for i, line in enumerate(MISTAKES.read_text().splitlines(), 1) if line.endswith("# mistake")]
    assert sorted(found) == expected, output


def test_the_user_code_runs(own_primitives):
    runpy.run_path(str(USER_CODE), run_name="__main__")


# --------------------------------------------------------------------------------------------------------------------
# Names

PUBLIC_MODULES = [tg, tg.ops, tg.nn, tg.optim, tg.data, tg.training, tg.check, tg.viz]
MODULES = sorted(m.name for m in pkgutil.walk_packages(tg.__path__, "tinygrad_mha.") if not m.name.endswith("__main__"))
PACKAGES = ["tinygrad_mha", *(m.name for m in pkgutil.walk_packages(tg.__path__, "tinygrad_mha.") if m.ispkg)]


def public_callables():
    """Every public function, class and primitive, and the public methods of the classes."""
    for module in PUBLIC_MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value):
                continue
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for method, member in vars(value).items():
                    if not method.startswith("_") and (callable(member) or isinstance(member, (property, classmethod))):
                        yield f"{module.__name__}.{name}.{method}", inspect.unwrap(getattr(value, method))


@pytest.mark.parametrize(("name", "value"), [*public_callables()], ids=lambda x: x if isinstance(x, str) else "")
def test_every_public_name_has_a_docstring(name, value):
    assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_its_public_names(name):
    module = importlib.import_module(name)
    own = [x for x in vars(module).values() if inspect.isroutine(x) or inspect.isclass(x)]
    assert hasattr(module, "__all__") or not any(x.__module__ == name for x in own)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public)


@pytest.mark.parametrize(
    "package", ["tinygrad_mha", *(m for m in MODULES if hasattr(importlib.import_module(m), "__path__"))]
)
def test_no_module_has_the_name_of_a_callable_that_its_package_exports(package):
    module = importlib.import_module(package)
    exported = {name for name in getattr(module, "__all__", []) if callable(getattr(module, name))}
    if module is tg:
        exported |= {name.lower() for name in exported}
    assert not exported & {m.name for m in pkgutil.iter_modules(module.__path__)}


@pytest.mark.parametrize("name", ["", ".check", ".decoding", ".nn", ".ops", ".training", ".viz"])
def test_completion_offers_the_public_names_of_a_package(name):
    package = importlib.import_module(f"tinygrad_mha{name}")
    assert dir(package) == sorted(package.__all__)
