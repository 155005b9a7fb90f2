"""Run the notebooks of this folder from top to bottom, and keep what their cells print and draw.

pip install "tinygrad_mha[test]"
python notebooks/execute.py [NOTEBOOK ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

HERE = Path(__file__).parent


def execute(path: Path) -> nbformat.NotebookNode:
    """A notebook with new outputs. Its cells run in an empty folder; an exception in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", record_timing=False)
        client.execute(cwd=folder)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


def main(*names: str) -> None:
    for path in [Path(name) for name in names] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.stat().st_size:9,} bytes  {path.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
