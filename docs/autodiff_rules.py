"""Write the table of derivative rules into autodiff.md, from the registry of primitives.

python docs/autodiff_rules.py
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from marked_tables import read_marked, write_marked

import tinygrad_mha as tg

PAGE = Path(__file__).parent / "autodiff.md"


def make_table() -> str:
    """A Markdown table: each primitive of the package, with its rule for each array argument as in the source."""
    rows = ["| primitive | kind | gradient of each argument |", "|---|---|---|"]
    for name, op in sorted(tg.ops.REGISTRY.items()):
        if op.forward.__module__.startswith("tinygrad_mha."):
            rows.append(f"| `{name}({', '.join(op.arguments)})` | {op.kind} | {describe_rules(op)} |")
    return "\n".join(rows).replace("||", "\\|\\|") + "\n"


def describe_rules(op: tg.ops.Primitive) -> str:
    functions, calls = parse_module(op.forward.__module__)
    if op.joint_rule is not None:
        return f"one rule for all, `{op.joint_rule.__name__}`" + describe_composition(op)
    if op.each_rule is not None:
        return f"one rule for each, `{op.each_rule.__name__}`" + describe_composition(op)
    rules = []
    for argument, node in zip(op.arguments, calls[op.name], strict=True):
        if isinstance(node, ast.Constant):
            rules.append(f"{argument}: none")
        elif isinstance(node, ast.Lambda):
            rules.append(f"{argument}: `{ast.unparse(node.body)}`")
        else:
            last = functions[node.id].body[-1]
            single = len(functions[node.id].body) == 1 and isinstance(last, ast.Return)
            rules.append(f"{argument}: `{ast.unparse(last.value if single else node)}`")
    return "<br>".join(rules) + describe_composition(op)


def describe_composition(op: tg.ops.Primitive) -> str:
    return f"; composition `{op.composition.__name__}`" if op.composition else ""


def parse_module(name: str) -> tuple[dict[str, ast.FunctionDef], dict[str, list[ast.expr]]]:
    """The functions of a module, and the arguments of each call `primitive.vjps(...)`, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = {
        node.func.value.id: node.args
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "vjps"
        and isinstance(node.func.value, ast.Name)
    }
    return functions, calls


def read_table() -> str:
    """The table that the page holds now."""
    return read_marked(PAGE, "rules")


if __name__ == "__main__":
    write_marked(PAGE, "rules", make_table())
