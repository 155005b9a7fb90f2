"""Write two tables into coming_from.md: NumPy functions that accept a Tensor, and what errors say of PyTorch names.

python docs/name_tables.py
"""

from __future__ import annotations

from pathlib import Path

from marked_tables import read_marked, write_marked

from tinygrad_mha import numpy_protocol, torch_names

PAGE = Path(__file__).parent / "coming_from.md"


def make_tables() -> str:
    """Both tables as Markdown."""
    groups = {
        "with a derivative": [f for f in numpy_protocol.UFUNCS | numpy_protocol.FUNCTIONS if not is_plain(f)],
        "plain values, without a derivative": [
            *numpy_protocol.COMPARISONS,
            *filter(is_plain, numpy_protocol.FUNCTIONS),
        ],
    }
    lines = ["| result | NumPy functions |", "|---|---|"]
    lines += [f"| {result} | {', '.join(sorted(map(name_function, group)))} |" for result, group in groups.items()]
    lines += ["", "| name in PyTorch | here |", "|---|---|"]
    tables = {"x.": torch_names.METHODS, "torch.": torch_names.TOP_LEVEL, "torch.nn.": torch_names.MODULES}
    tables["module."] = torch_names.MODULE_METHODS
    tables["torch., F."] = {k: v for k, v in torch_names.OPERATIONS.items() if k not in torch_names.TOP_LEVEL}
    tables[""] = {f"{name}=": hint for name, hint in torch_names.KEYWORDS.items()}
    for prefix, hints in tables.items():
        *others, last = prefix.split(", ")
        for name, hint in sorted(hints.items()):
            names = ", ".join(f"`{start}{name}`" for start in [*others, last])
            lines.append(f"| {names} | {hint} |")
    return "\n".join(lines) + "\n"


def is_plain(function: object) -> bool:
    """Whether the result of a supported function is no Tensor."""
    return function in numpy_protocol.PLAIN


def name_function(function: object) -> str:
    return f"`{'np.linalg.norm' if function.__name__ == 'norm' else f'np.{function.__name__}'}`"


def read_tables() -> str:
    """The tables that the page shows."""
    return read_marked(PAGE, "names")


if __name__ == "__main__":
    write_marked(PAGE, "names", make_tables())
