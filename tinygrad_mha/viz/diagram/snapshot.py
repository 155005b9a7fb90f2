"""`tg.graph` draws a computation; `tg.graph_diff` draws two and marks what differs.

The steps from tensors to a file, each in a module of its own:

- `record` reads the run,
- `frames`, `roles` and `modules` say what each value is and where it belongs,
- `repetitions` and `fold` decide what gets a box,
- `labels` and `formulas` write the titles and the formulas,
- `contents` makes the picture as plain data,
- `heat` and `dot` write it as text,
- `graphviz_engines` lets Graphviz draw it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tinygrad_mha.arguments import check_choice, check_count
from tinygrad_mha.engine import toposort
from tinygrad_mha.files import replacing
from tinygrad_mha.tables import make_pre
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.diagram import graphviz_engines as engines
from tinygrad_mha.viz.diagram.closing import close_frames, list_states
from tinygrad_mha.viz.diagram.contents import compose_picture
from tinygrad_mha.viz.diagram.diff import compare_pictures
from tinygrad_mha.viz.diagram.dot import fit, to_dot
from tinygrad_mha.viz.diagram.fold import MOST_IN_A_FORMULA, Layout, Options, make_layout
from tinygrad_mha.viz.diagram.frames import Frame, Pattern, entry_key, matches
from tinygrad_mha.viz.diagram.labels import choose_titles
from tinygrad_mha.viz.diagram.mermaid import to_mermaid
from tinygrad_mha.viz.diagram.modules import Modules, arrange_modules
from tinygrad_mha.viz.diagram.picture import Picture
from tinygrad_mha.viz.diagram.record import RESHAPING, Run, record_backward, record_forward
from tinygrad_mha.viz.diagram.repetitions import frame_chains

__all__ = ["Graph", "GraphTooLargeError", "graph", "graph_diff"]

TEXT_FORMATS = ("dot", "gv")
READABLE = 40  # boxes: about one screen
MOST_OPENED = 200  # boxes of a page with all modules open


class GraphTooLargeError(ValueError):
    """The picture has more than `max_nodes` boxes. The message says which `depth` fits."""


class Graph:
    """A picture of a run. It is a snapshot: it holds no tensor, and later changes of tensors do not change it.

    A notebook displays it. Without Graphviz the notebook shows the DOT text and what to install.

    Attributes:
        dot: the picture in DOT, the language of Graphviz; the same for the same run, in every process.
        picture: boxes, arrows and frames as plain data.
    """

    def __init__(
        self,
        picture: Picture,
        direction: str = "TB",
        engine: str = "auto",
        title: str = "graph",
        opened: Picture | None = None,
    ) -> None:
        self.picture = picture
        self._opened = opened or picture  # with all modules open, for pages
        self.direction = direction
        self.engine = engine
        self.title = fit(title)
        self.dot = to_dot(picture, direction)

    def svg(self) -> str:
        """The picture as SVG, which can be saved as a file or be part of a page.

        Raises:
            NoEngineError: no Graphviz was found; the message says what to install.
        """
        return self._svg

    @cached_property
    def _svg(self) -> str:
        return engines.make_standalone(self._rendered("svg").decode(), self.title)

    @property
    def mermaid(self) -> str:
        """The picture as a flowchart of Mermaid, which code hosts and notebooks draw: titles, shapes and formulas."""
        return to_mermaid(self.picture, self.direction)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file and return its path. The suffix is svg, png, pdf, html, dot or gv.

        An HTML page opens and closes modules, zooms, and finds names; it is one file and needs no network. A PNG has at
        most 8000 pixels a side; a larger picture is made smaller, with a warning.

        Raises:
            ValueError: another suffix.
            NoEngineError: no Graphviz was found, and the format is not dot. Nothing is written.
        """
        path = Path(path)
        format = path.suffix.lower().removeprefix(".")
        if format in TEXT_FORMATS:
            content = self.dot.encode()
        elif format == "html":
            content = self._make_page().encode()
        elif format == "svg":
            content = self.svg().encode()
        elif format in engines.FORMATS:
            content = self._rendered(format)
        else:
            known = ", ".join(f".{name}" for name in (*engines.FORMATS, "html", *TEXT_FORMATS))
            raise ValueError(f"a graph is saved as {known}, got {str(path)!r}")
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    def _rendered(self, format: str) -> bytes:
        return engines.render(self.dot, format, (node.id for node in self.picture.nodes), self.engine)

    def _make_page(self) -> str:
        """An HTML page that opens and closes modules."""
        svgs = {}
        for state, closed in list_states(self._opened, READABLE).items():
            drawn = Graph(close_frames(self._opened, closed), self.direction, self.engine, self.title)
            svgs[state] = drawn.svg()
        parents = {cluster.id: cluster.parent for cluster in self._opened.clusters}
        names = [[node.title, node.id, node.cluster] for node in self._opened.nodes if node.title != "+"]
        return engines.make_page(svgs, parents, names, self.title)

    def __repr__(self) -> str:
        boxes, arrows = len(self.picture.nodes), len(self.picture.edges)
        size = f"{boxes} box{'es' * (boxes != 1)}, {arrows} arrow{'s' * (arrows != 1)}"
        return f'<{self.title}: {size}; .save("graph.svg"), .svg() or .dot>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        try:
            svg = self.svg()
        except engines.NoEngineError as error:
            text = f"{error}\n\n{self.dot}"
            return {"text/plain": text, "text/html": make_pre(text, "30em")}
        # Not as an SVG too: that is displayed as an image, which has no tooltips, and the notebook would store both.
        return {"text/html": engines.make_cell(svg), "text/plain": repr(self)}


def graph(
    y: Any,
    depth: int | str | None = "auto",
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
    """Draw how `y` was computed: one box for each tensor, with its name, shape, formula, values and gradient.

    Modules are frames around their tensors. Equal blocks are drawn once, with ×N. To draw a computation that needs no
    gradient, run it inside of `with tg.record():`.

    A leaf that a module of the run owns is a parameter, one that was handed to a module is an input. Without a module,
    a leaf that requires grad is a parameter if an operation takes it as its weight (w of `x @ w`, the table of an
    embedding) or combines it with another value element by element (`h * scale`), and an input if it is the data of a
    product (x of `x @ w`) or an operand on its own (`exp(x)`, `x * x`). A leaf that does not require grad is an input.
    Attention weights are the softmax of a module with `is_attention`, or of the primitive `attention`.

    Args:
        y: a tensor, or a list, tuple or dict of them (keys are names).
        depth: how many levels of modules are open; those below are one box each, with class, shape, parameter count,
            range and gradient. None opens all. "auto" opens as many as make about 40 boxes; in larger pictures two
            equal heads, and the repeated steps of a chain outside of modules, are drawn once too.
        collapse: modules to close at any depth: a path ("h.0.attn"), a pattern ("h.*.mlp"), a class name, a predicate
            of the path, or a list of these.
        expand: modules to open at any depth, also if they repeat; also names of fused primitives ("attention"), which
            are then drawn as the operations that they are composed of (not with `backward=True`).
        fold: write chains of reshaping and element-wise operations into the formula of their user, and draw equal
            blocks once; False gives each operation a box.
        ops: "folded", or "separate" for the plain autograd graph with an oval for each operation, which implies
            `fold=False`.
        values, grads: "auto" shows small tensors in small pictures, with numbers up to 5 x 5; True shows tables in all
            pictures, with numbers up to 16 columns and 32 rows, and colours beyond; False shows none. Colours stop at
            1024 elements. Scalars are numbers in all pictures.
        backward: draw the computation of the gradients beside the forward pass; `y` is one tensor, a scalar unless it
            has a gradient already.
        direction: "TB" from top to bottom, or "LR" from left to right.
        names: {name: tensor}, names that take precedence over the tensors' own; `locals()` is accepted.
        max_nodes: the largest number of boxes; None for no limit.
        engine: "dot", "pygraphviz", or "auto" for the first that works.

    Returns:
        A `Graph`, with `.svg()`, `.save(path)` and `.dot`.

    Raises:
        GraphTooLargeError: more than `max_nodes` boxes; the message says which depth fits.
        ValueError, TypeError: an invalid option; a pattern that matches nothing in this run; no tensor.

    Example:
        >>> x = Tensor([[1.0, 2.0]], name="x")
        >>> W = Tensor([[3.0], [4.0]], requires_grad=True, name="W")
        >>> graph((x @ W).named("y"))
        <graph of y: 3 boxes, 2 arrows; .save("graph.svg"), .svg() or .dot>
    """
    check_options(depth, ops, values, grads, direction, max_nodes, engine)
    roots, keys = find_tensors(y)
    options = Options(
        depth=None if isinstance(depth, str) else depth,
        collapse=as_patterns(collapse, "collapse"),
        expand=as_patterns(expand, "expand"),
        fold=fold and ops == "folded",
        separate=ops == "separate",
        values=None if values == "auto" else bool(values),
        grads=None if grads == "auto" else bool(grads),
    )
    is_automatic = depth == "auto" and options.fold
    if not is_automatic:
        refuse_early(roots, options, max_nodes)
    if backward and len(roots) != 1:
        raise ValueError(f"backward=True draws one output, got {len(roots)}")
    run = record_backward(roots[0]) if backward else record_forward(roots, lambda op: op.name in options.expand)
    rename(run, {**keys, **(names or {})})
    modules = arrange_modules(run)
    check_patterns(run, modules, options)
    layout = make_layout(run, modules, options)
    readable = READABLE * (1 + run.has_backward)
    if is_automatic and len(layout.boxes) > readable:
        layout = make_readable(run, replace(options, compact=True), readable)
    n = len(layout.boxes)
    if max_nodes is not None and n > max_nodes:
        raise too_large(f"{n:,}", max_nodes, find_fitting_depth(run, options, max_nodes))
    titles = choose_titles(layout)
    outputs = [titles[root] for root in run.roots]
    title = f"graph of {', '.join(outputs[:3])}{', …' if len(outputs) > 3 else ''}"
    picture = compose_picture(layout, titles)
    return Graph(picture, direction, engine, title, compose_opened(run, layout, picture))


def graph_diff(a: Any, b: Any, **options: Any) -> Graph:
    """Draw two graphs side by side. What only one of them has is coloured, dashed or thick, and marked − or +.

    Boxes correspond if they have the same title in the same module, arrows if they connect such boxes.

    Args:
        a, b: graphs, or tensors as `graph` accepts them, which are drawn with `options`.
        options: keyword arguments of `graph`.

    Returns:
        A `Graph`. Its caption counts the differences.

    Example:
        >>> x = Tensor([1.0], requires_grad=True, name="x")
        >>> graph_diff((x * x).named("y"), (x * x + x).named("y")).picture.caption
        ['only on the left: 0 boxes, 1 arrow · only on the right: 1 box, 3 arrows']
    """
    options = {"depth": None, **options}  # the same depth on both sides
    left, right = (g if isinstance(g, Graph) else graph(g, **options) for g in (a, b))
    picture = compare_pictures(left.picture, right.picture)
    return Graph(picture, left.direction, left.engine, f"{left.title} against {right.title}")


# --------------------------------------------------------------------------------------------------------------------
# Arguments


def check_options(depth: Any, ops: Any, values: Any, grads: Any, direction: Any, max_nodes: Any, engine: Any) -> None:
    """Raise ValueError for an option out of range."""
    check_choice(ops, ("folded", "separate"), "ops")
    check_choice(direction, ("TB", "LR"), "direction")
    check_choice(engine, ("auto", *engines.ENGINES), "engine")
    for name, given in (("values", values), ("grads", grads)):
        if given not in (True, False, "auto"):
            raise ValueError(f"{name} must be True, False or 'auto', got {given!r}")
    if isinstance(depth, str) and depth != "auto":
        raise ValueError(f"depth must be an integer, None or 'auto', got {depth!r}")
    for name, given, least in (("depth", depth, 0), ("max_nodes", max_nodes, 1)):
        if given is not None and given != "auto":
            check_count(given, name, least)


def find_tensors(y: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors of nested lists, tuples and dicts, each once, and those that have no name by their dict keys."""
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
        raise ValueError("graph needs at least one Tensor, got none")
    return list(found.values()), keys


def as_patterns(given: Any, name: str) -> tuple[Pattern, ...]:
    if given is None:
        return ()
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for pattern in several:
        if not isinstance(pattern, str) and not callable(pattern):
            raise TypeError(f"{name} takes paths, patterns, class names and predicates, got {pattern!r}")
    return tuple(several)


def rename(run: Run, names: Mapping[Any, Any]) -> None:
    """Apply `names`, name to tensor, which may be `locals()`. They take precedence over the tensors' own."""
    if names and not any(isinstance(x, Tensor) for x in names.values()):
        raise TypeError("names must be {name: tensor}; got no tensor among its values")
    # Names that begin with an underscore come first, so that others replace them: a notebook has _3 for each result.
    ordered = sorted((name for name in names if isinstance(name, str) and name), key=lambda name: name[0] != "_")
    given = {id(names[name]): name for name in ordered}
    for value in run.values:
        name = given.get(id(value.tensor), value.name)
        value.name = name if name and name.strip() else None


def check_patterns(run: Run, modules: Modules, options: Options) -> None:
    """Raise if a pattern matches no module: probably a typo."""
    frames = modules.inside(modules.root)[1:]
    closed = {v.op.name for v in run.values if v.op and v.op.composition}
    for pattern in options.expand:
        if run.has_backward and pattern in closed:
            raise ValueError(
                f"expand={pattern!r} opens a fused primitive, which backward=True cannot do: "
                f"make the module with fused=False, or draw the forward pass only"
            )
    for pattern in (*options.collapse, *options.expand):
        if isinstance(pattern, str) and not any(matches(frame, [pattern]) for frame in frames):
            known = ", ".join(dict.fromkeys(frame.path or frame.class_name for frame in frames)) or "none"
            fused = ", ".join(sorted(closed)) or "none"
            raise ValueError(f"{pattern!r} matches nothing in this run. Modules: {known}. Fused primitives: {fused}")


def refuse_early(roots: list[Tensor], options: Options, max_nodes: int | None) -> None:
    """Raise if the picture is far too large, from the number of operations in each module, before the run is read.

    A box holds at most a few operations, and the operations of one module are not repetitions of each other.
    """
    nodes = [tensor.node for tensor in toposort(roots, everything=True) if tensor.node is not None]
    if max_nodes is None or options.collapse or len(nodes) <= max_nodes:
        return
    sizes = Counter(tuple(map(entry_key, node.scope)) for node in nodes if node.op.kind not in RESHAPING)
    shown = [n for scope, n in sizes.items() if options.depth is None or len(scope) <= options.depth]
    least = max(shown, default=0) // (MOST_IN_A_FORMULA if options.fold else 1)
    if least > max_nodes:
        fitting = find_fitting_depth(record_forward(roots), options, max_nodes) if any(sizes) else None
        raise too_large(f"more than {least:,}", max_nodes, fitting)


def make_readable(run: Run, options: Options, most: int) -> Layout:
    """The deepest layout of at most `most` boxes; if there is none, that of the fewest boxes."""
    frame_chains(run)
    modules = arrange_modules(run)
    best = None
    for depth in (None, *range(count_levels(modules) - 1, -1, -1)):
        layout = make_layout(run, modules, replace(options, depth=depth))
        if len(layout.boxes) <= most:
            return layout
        if best is None or len(layout.boxes) < len(best.boxes):
            best = layout
    assert best is not None
    return best


def compose_opened(run: Run, layout: Layout, picture: Picture) -> Picture:
    """The picture with all modules open; the same picture if that would be large, or all are open already."""
    if not any(isinstance(box, Frame) for box in layout.boxes):
        return picture
    options = replace(layout.options, depth=None, collapse=())
    opened = make_layout(run, arrange_modules(run), options)
    return compose_picture(opened, choose_titles(opened)) if len(opened.boxes) <= MOST_OPENED else picture


def count_levels(modules: Modules) -> int:
    """How deeply frames are nested."""
    return max(len(frame.enclosing) - 1 for frame in modules.members)


def find_fitting_depth(run: Run, options: Options, max_nodes: int) -> int | None:
    """The largest depth at which there are no more than `max_nodes` boxes."""
    modules = arrange_modules(run)
    for depth in range(count_levels(modules) - 1, -1, -1):
        if len(make_layout(run, modules, replace(options, depth=depth)).boxes) <= max_nodes:
            return depth
    return None


def too_large(boxes: str, max_nodes: int, fitting: int | None) -> GraphTooLargeError:
    advice = f"depth={fitting} fits"
    if fitting is None:
        advice = "no module can be closed: draw an earlier tensor, or put the parts into modules"
    return GraphTooLargeError(
        f"{boxes} boxes, max_nodes={max_nodes}: {advice}; max_nodes=None draws all of them, which may take long"
    )
