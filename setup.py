"""Puts examples/ into the wheel, where `tinygrad-mha examples` finds them. All else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies the examples beside the built package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_tree("examples", f"{self.build_lib}/tinygrad_mha/examples")


setup(cmdclass={"build_py": BuildWithExamples})
