"""tg.graph: the picture of a computation, and tg.graph_diff: two of them with their differences.

From tensors to a file there are five steps, each a file of its own: `trace` reads the run, `draft` decides what gets a
box (with `places`, the modules), `compose` what is written in it (with `naming`, `formula`), `dot` writes the picture
as text (with `heat`), and `render` lets Graphviz draw it. This file is the door.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from tinygrad_mha.engine import Node, toposort
from tinygrad_mha.files.safetensors import replacing
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.diagram import graphviz_engines as render
from tinygrad_mha.viz.diagram.contents import compose
from tinygrad_mha.viz.diagram.diff import compared
from tinygrad_mha.viz.diagram.dot import fit, to_dot
from tinygrad_mha.viz.diagram.fold import MOST_IN_A_FORMULA, Draft, Options
from tinygrad_mha.viz.diagram.labels import titles_of
from tinygrad_mha.viz.diagram.modules import Pattern, identity
from tinygrad_mha.viz.diagram.picture import Picture
from tinygrad_mha.viz.diagram.record import SHAPE_ONLY, trace, trace_backward

TEXT_FORMATS = ("dot", "gv")


class GraphTooLargeError(ValueError):
    """More boxes than anybody could look at; the message says which `depth` would do."""


class Graph:
    """A picture of a run, taken when it was asked for: what happens to the tensors later does not change it.

    Attributes:
        dot: the picture in DOT, the language of Graphviz; the same for the same run, in every process.
        picture: boxes, arrows and frames as plain data.

    A notebook shows it by itself. Without any Graphviz it shows the DOT text and what to install.
    """

    def __init__(self, picture: Picture, direction: str = "TB", engine: str = "auto", title: str = "graph") -> None:
        self.picture = picture
        self.direction = direction
        self.engine = engine
        self.title = fit(title)
        self.dot = to_dot(picture, direction)

    def svg(self) -> str:
        """The picture as SVG: a file of its own, or a part of a page.

        Raises:
            NoEngineError: no Graphviz was found; it says what to install.
        """
        return self._svg

    @cached_property
    def _svg(self) -> str:
        return render.standalone(self._rendered("svg").decode(), self.title)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file, in the format that its name ends in: svg, png, pdf, html, dot or gv.

        Raises:
            ValueError: another ending.
            NoEngineError: no Graphviz was found, and the format is not dot. Nothing is written.
        """
        path = Path(path)
        format = path.suffix.lower().removeprefix(".")
        if format in TEXT_FORMATS:
            content = self.dot.encode()
        elif format == "html":
            content = render.page(self.svg(), self.title).encode()
        elif format == "svg":
            content = self.svg().encode()
        elif format in render.FORMATS:
            content = self._rendered(format)
        else:
            known = ", ".join(f".{name}" for name in (*render.FORMATS, "html", *TEXT_FORMATS))
            raise ValueError(f"a graph is saved as {known}, got {str(path)!r}")
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    def _rendered(self, format: str) -> bytes:
        return render.render(self.dot, format, (node.id for node in self.picture.nodes), self.engine)

    def __repr__(self) -> str:
        boxes, arrows = len(self.picture.nodes), len(self.picture.edges)
        size = f"{boxes} box{'es' * (boxes != 1)}, {arrows} arrow{'s' * (arrows != 1)}"
        return f'<{self.title}: {size}; .save("graph.svg"), .svg() or .dot>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        try:
            svg = self.svg()
        except render.NoEngineError as error:
            text = f"{error}\n\n{self.dot}"
            return {"text/plain": text, "text/html": f'<pre style="max-height:30em;overflow:auto">{escape(text)}</pre>'}
        # HTML comes first: as an image alone the SVG would lose the texts under the pointer.
        return {"text/html": render.in_notebook(svg), "image/svg+xml": svg, "text/plain": repr(self)}


def graph(
    y: Any,
    depth: int | None = None,
    collapse: Pattern | Sequence[Pattern] | None = None,
    expand: Pattern | Sequence[Pattern] | None = None,
    fold: bool = True,
    ops: str = "folded",
    values: bool | str = "auto",
    grads: bool | str = "auto",
    backward: bool = False,
    direction: str = "TB",
    names: Mapping[Any, Any] | None = None,
    max_nodes: int | None = 1500,
    engine: str = "auto",
) -> Graph:
    """The picture of how `y` was made: one box for each tensor, with its name, shape, formula, values and gradient.

    Modules are frames around their tensors, and blocks that are equal are drawn once, with xN. To draw a computation in
    which nothing needs a gradient, run it inside of `with tg.record():`.

    Args:
        y: a tensor, or a list, tuple or dict of them (keys are names).
        depth: how many levels of modules are open; those below are one box each, with class, shape and parameter count.
        collapse: modules to close, whatever the depth: a path ("h.0.attn"), a pattern ("h.*.mlp"), a class name, a
            predicate of the path, or a list of these.
        expand: modules to open, whatever the depth and however often they repeat; also names of fused primitives
            ("attention"), which are then drawn as what they are composed of.
        fold: write chains of shape-only and unary operations into the formula of their user, and repeat blocks as xN;
            False gives each operation its box.
        ops: "folded", or "separate" for the plain autograd graph with an oval for each operation.
        values, grads: True, False, or "auto": show the numbers of small tensors in small pictures.
        backward: draw the computation of the gradients beside the forward; `y` is one tensor. Unless `y` has a gradient
            already, it must be a scalar.
        direction: "TB" from top to bottom, or "LR" from left to right.
        names: {name: tensor} for tensors without a name; `locals()` will do.
        max_nodes: with more boxes than this, raise; None for no limit.
        engine: "dot", "pygraphviz", or "auto" for the first that works.

    Raises:
        GraphTooLargeError: more than `max_nodes` boxes; it says which depth would fit.
        ValueError, TypeError: an option out of range; a pattern that means nothing in this run; no tensor.

    Example:
        >>> x = Tensor([[1.0, 2.0]], name="x")
        >>> W = Tensor([[3.0], [4.0]], requires_grad=True, name="W")
        >>> graph((x @ W).named("y"))
        <graph of y: 3 boxes, 2 arrows; .save("graph.svg"), .svg() or .dot>
    """
    check_options(depth, ops, values, grads, direction, max_nodes, engine)
    roots, keys = tensors_in(y)
    refuse_early(roots, depth, fold and ops == "folded", collapse, max_nodes)
    options = Options(
        depth=depth,
        collapse=patterns(collapse, "collapse"),
        expand=patterns(expand, "expand"),
        fold=fold,
        separate=ops == "separate",
        values=None if values == "auto" else bool(values),
        grads=None if grads == "auto" else bool(grads),
        names={**keys, **(names or {})},
    )
    if backward:
        if len(roots) != 1:
            raise ValueError(f"backward=True draws one output, got {len(roots)}")
        run = trace_backward(roots[0])
    else:
        run = trace(roots, lambda op: op in options.expand)
    draft = Draft(list(run.values()), [run[id(root)] for root in roots], options)
    check_patterns(draft, options)
    check_size(draft, max_nodes)
    titles = titles_of(draft)
    named = [titles[run[id(root)]] for root in roots]
    return Graph(
        compose(draft, titles), direction, engine, f"graph of {', '.join(named[:3])}{', …' if len(named) > 3 else ''}"
    )


def graph_diff(a: Any, b: Any, **options: Any) -> Graph:
    """Two graphs side by side, with what only one of them has in colour, dashed or thick, and marked - or +.

    Boxes correspond when they have the same title in the same module; arrows, when they connect such boxes.

    Args:
        a, b: graphs, or what `graph` takes, with the `options` of `graph`.

    Example:
        >>> x = Tensor([1.0], requires_grad=True, name="x")
        >>> graph_diff((x * x).named("y"), (x * x + x).named("y")).picture.caption
        ['only on the left: 0 boxes, 1 arrow · only on the right: 1 box, 3 arrows']
    """
    left, right = (g if isinstance(g, Graph) else graph(g, **options) for g in (a, b))
    picture = compared(left.picture, right.picture)
    return Graph(picture, left.direction, left.engine, f"{left.title} against {right.title}")


# --------------------------------------------------------------------------------------------------------------------
# What was asked for


def check_options(depth: Any, ops: Any, values: Any, grads: Any, direction: Any, max_nodes: Any, engine: Any) -> None:
    choices: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("ops", ops, ("folded", "separate")),
        ("values", values, (True, False, "auto")),
        ("grads", grads, (True, False, "auto")),
        ("direction", direction, ("TB", "LR")),
        ("engine", engine, ("auto", *render.ENGINES)),
    ]
    for name, given, allowed in choices:
        if given not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}")
    for name, given, least in (("depth", depth, 0), ("max_nodes", max_nodes, 1)):
        if given is not None and (not isinstance(given, int) or given < least):
            raise ValueError(f"{name} must be None or a whole number of at least {least}, got {given!r}")


def tensors_in(y: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors of a nest of lists, tuples and dicts, each once, and the names that keys give to those without."""
    found: dict[int, Tensor] = {}
    keys: dict[str, Tensor] = {}
    stack: list[tuple[Any, Any]] = [(None, y)]
    while stack:
        key, item = stack.pop()
        if isinstance(item, Tensor):
            found[id(item)] = item
            if isinstance(key, str) and not item.name:
                keys[key] = item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.items())))
        elif isinstance(item, (list, tuple)):
            stack.extend((None, inner) for inner in reversed(item))
        else:
            raise TypeError(f"graph draws a Tensor, or a list, tuple or dict of them; got {type(item).__name__}")
    if not found:
        raise ValueError("graph was given no tensor")
    return list(found.values()), keys


def patterns(given: Any, name: str) -> tuple[Pattern, ...]:
    if given is None:
        return ()
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for pattern in several:
        if not isinstance(pattern, str) and not callable(pattern):
            raise TypeError(f"{name} takes paths, patterns, class names and predicates, got {pattern!r}")
    return tuple(several)


def check_patterns(draft: Draft, options: Options) -> None:
    """A pattern that means no module of this run is a slip of the pen."""
    for pattern in (*options.collapse, *options.expand):
        if isinstance(pattern, str) and not any(place.matches([pattern]) for place in draft.every_place):
            known = ", ".join(dict.fromkeys(place.path or place.kind for place in draft.every_place[1:])) or "none"
            fused = ", ".join(sorted({v.op.name for v in draft.values if v.op and v.op.composition})) or "none"
            raise ValueError(f"{pattern!r} means nothing in this run. Modules: {known}. Fused primitives: {fused}")


def check_size(draft: Draft, max_nodes: int | None) -> None:
    if max_nodes is None or len(draft.boxes) <= max_nodes:
        return
    raise too_large(f"{len(draft.boxes):,}", max_nodes, draft.fitting_depth(max_nodes))


def refuse_early(roots: list[Tensor], depth: int | None, folds: bool, collapse: Any, max_nodes: int | None) -> None:
    """Refuse what is much too large from the counts of operations in each module, before anything is built of them.

    A box holds a few operations at most, and those of one module are not repetitions of each other.
    """
    if max_nodes is None or collapse is not None:
        return
    nodes = [tensor.node for tensor in toposort(roots, everything=True) if tensor.node is not None]
    if len(nodes) <= max_nodes:
        return
    sizes = Counter(scope_key(node.scope) for node in nodes if node.op.name not in SHAPE_ONLY)
    shown = [n for scope, n in sizes.items() if depth is None or len(scope) <= depth]
    least = max(shown, default=0) // (MOST_IN_A_FORMULA if folds else 1)
    if least <= max_nodes:
        return
    raise too_large(f"more than {least:,}", max_nodes, depth_that_fits(nodes, max_nodes))


def depth_that_fits(nodes: list[Node], max_nodes: int) -> int | None:
    """The largest depth at which there are no more boxes than that, even if no formula could be folded."""
    for depth in range(max(len(node.scope) for node in nodes) - 1, -1, -1):
        shown = [node for node in nodes if len(node.scope) <= depth]
        leaves = {id(x) for node in shown for x in node.inputs if isinstance(x, Tensor) and x.node is None}
        closed = {scope_key(node.scope[: depth + 1]) for node in nodes if len(node.scope) > depth}
        if len(shown) + len(leaves) + len(closed) <= max_nodes:
            return depth
    return None


def scope_key(scope: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(identity, scope))


def too_large(boxes: str, max_nodes: int, fitting: int | None) -> GraphTooLargeError:
    advice = f"depth={fitting} would fit"
    if fitting is None:
        advice = "no module is there that could be closed: draw an earlier tensor, or put the parts into modules"
    return GraphTooLargeError(
        f"{boxes} boxes, max_nodes={max_nodes}: {advice}; max_nodes=None draws all of them, which may take long"
    )
