"""Puts examples/ into the wheel, where `tinygrad-mha examples` finds them, and makes the README fit a package index.
All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies the examples beside the built package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_tree("examples", f"{self.build_lib}/tinygrad_mha/examples")


def describe():
    """The README as a package index can show it: without pictures and links to files, installed from the index."""
    text = Path("README.md").read_text(encoding="utf-8").replace('".[render', '"tinygrad_mha[render')
    text = re.sub(r"^!?\[[^]]*\]\((?!https:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithExamples},
    long_description=describe(),
    long_description_content_type="text/markdown",
)
