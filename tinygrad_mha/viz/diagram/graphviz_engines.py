"""DOT to SVG, PNG and PDF, by the first Graphviz that works.

There are two engines: the program `dot` on PATH, and the Python package pygraphviz, which contains Graphviz.
Both run in a process of their own, so an engine that crashes or hangs does no harm. The SVG of an engine is validated
before the engine is used: every box must be in it, with its text. If an engine fails, the next one is used, with a
warning; if none is left, one error says what was tried and what helps.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import graphviz  # type: ignore[import-untyped]

from tinygrad_mha.viz import fonts

__all__ = ["ENGINES", "FORMATS", "EngineFailedError", "NoEngineError", "render"]
__all__ += ["make_cell", "make_page", "make_standalone"]

FORMATS = ("svg", "png", "pdf")
PNG_DPI = 144
MOST_PIXELS = 8000  # of the width and of the height of a PNG
PROBE_SECONDS = 5.0
LAYOUT_SECONDS = 120.0

Command = Callable[[Path, dict[str, Path]], list[str]]  # of the DOT file and {format: output file}


class NoEngineError(graphviz.ExecutableNotFound):
    """No working Graphviz was found. `graph.dot` and `graph.save("x.dot")` need none."""

    def __init__(self, wanted: str, tried: Iterable[str]) -> None:
        RuntimeError.__init__(
            self,
            f"cannot make {wanted}: no working Graphviz was found (" + "; ".join(tried) + "). Any one of these helps:\n"
            '  pip install "tinygrad_mha[render]"   contains Graphviz, as the package pygraphviz\n'
            "  your system's package manager: apt, dnf, brew, conda, winget or choco install graphviz\n"
            '  graph.save("x.dot") or graph.dot     needs no Graphviz; any DOT viewer shows it',
        )


class EngineFailedError(Exception):
    """The reason why one engine cannot be used."""


class DrawingError(ValueError):
    """Graphviz works, but refuses this picture."""


def render(dot: str, format: str, nodes: Iterable[str], engine: str = "auto") -> bytes:
    """Draw `dot` as svg, png or pdf. `nodes` are the ids of the boxes that must be in the result.

    Raises:
        NoEngineError: no engine works, or the one named by `engine` does not.
    """
    absent, broken = [], []
    for name, find in ENGINES.items():
        if engine not in ("auto", name):
            continue
        try:
            command = find()
            if command is None:
                absent.append(f"{name} is not installed")
                continue
            image = run_engine(command, dot, format, set(nodes))
        except EngineFailedError as error:
            if "syntax error" in str(error) or "DotError: Invalid Input" in str(error):  # of dot; of pygraphviz
                raise DrawingError(f"Graphviz refuses this picture, {name} says: {error}") from error
            broken.append(f"{name} is not usable: {error}")
            continue
        if broken:
            warnings.warn(f"{'; '.join(broken)}. {name} is used instead", RuntimeWarning, stacklevel=3)
        if format != "svg" and fonts.has_chinese(dot) and fonts.lacks_chinese():
            fonts.warn_of_boxes(stacklevel=3)
        return image
    raise NoEngineError(format.upper(), broken + absent)


def run_engine(command: Command, dot: str, format: str, nodes: set[str]) -> bytes:
    """Let an engine draw into files, and validate its SVG. Not through a pipe, which outlives a killed process."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "graph.dot")
        source.write_text(dot, encoding="utf-8")
        outputs = {name: Path(folder, f"graph.{name}") for name in dict.fromkeys(("svg", format))}
        try:
            messages = call(command(source, outputs), LAYOUT_SECONDS, fonts.make_fontconfig(Path(folder)))
            problem = next((line for line in messages.splitlines() if line.startswith("Error:")), None)
            problem = problem or find_lost_box(outputs["svg"].read_text(encoding="utf-8"), nodes)
            if problem:
                raise EngineFailedError(problem)
            if format == "png":
                warn_of_scale(outputs["svg"].read_text(encoding="utf-8"))
            return outputs[format].read_bytes()
        except (OSError, UnicodeError, ElementTree.ParseError) as error:
            raise EngineFailedError(f"no usable output ({error})") from error


def warn_of_scale(svg: str) -> None:
    """Warn if a picture was too large for MOST_PIXELS, and is smaller than it should be."""
    found = re.search(r'<g id="graph0"[^>]* transform="scale\(([\d.]+)', svg)
    scale = float(found[1]) if found else PNG_DPI / 72
    if scale < 0.99 * PNG_DPI / 72:
        warnings.warn(
            f"the PNG was limited to {MOST_PIXELS} pixels a side, {scale * 72 / PNG_DPI:.0%} of its full size: "
            f"save it as SVG, or draw less of it with depth= or collapse=",
            stacklevel=4,
        )


def call(command: list[str], seconds: float, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output on both channels. Raise if it fails or takes longer than `seconds`."""
    with tempfile.TemporaryFile() as channel:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=channel,
                stderr=channel,
                timeout=seconds,
                env=environment,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"did not answer within {seconds:g} seconds") from None
        except OSError as error:
            raise EngineFailedError(f"does not start ({error})") from error
        channel.seek(0)
        messages = channel.read().decode("utf-8", "replace")
    if code:
        raise EngineFailedError(f"ended with status {code}: {messages.strip()[-300:] or 'no message'}")
    return messages


def find_lost_box(svg: str, nodes: set[str]) -> str | None:
    """What is wrong with an SVG: a missing box, or one whose label was lost, which leaves its id as its text."""
    found = set()
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") != "node":
            continue
        id = group.findtext(f"{SVG}title") or ""
        found.add(id)
        if [text.text for text in group.iter(f"{SVG}text")] == [id]:
            return f"the label of box {id} was lost"
    lost = sorted(nodes - found)
    return f"box {lost[0]} and {len(lost) - 1} more are not in the picture" if lost else None


SVG = "{http://www.w3.org/2000/svg}"


# --------------------------------------------------------------------------------------------------------------------
# The engines


def find_dot() -> Command | None:
    """The command for the program `dot` on PATH; None without it."""
    path = shutil.which("dot")
    if path is None:
        return None
    problem = probe(path, os.stat(path).st_mtime_ns)
    if problem:
        raise EngineFailedError(f"{path} {problem}")

    def command(source: Path, outputs: dict[str, Path]) -> list[str]:
        drawn = [argument for format, file in outputs.items() for argument in (f"-T{format}", "-o", str(file))]
        return [path, *dpi(outputs), *drawn, str(source)]

    return command


@functools.lru_cache
def probe(path: str, changed: int) -> str | None:
    """Why the program at `path` is not a working `dot`, or None. Cached for each state of the file."""
    try:
        return None if "graphviz" in call([path, "-V"], PROBE_SECONDS).lower() else "is not Graphviz"
    except EngineFailedError as error:
        return str(error)


def find_pygraphviz() -> Command | None:
    """The command for the package pygraphviz, in a Python process of its own; None without it."""
    try:
        spec = importlib.util.find_spec("pygraphviz")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return None
    where = str(Path(spec.origin).parents[0 if spec.submodule_search_locations is None else 1])

    def command(source: Path, outputs: dict[str, Path]) -> list[str]:
        drawn = [argument for format, file in outputs.items() for argument in (format, str(file))]
        return [sys.executable, "-c", WITH_PYGRAPHVIZ, where, " ".join(dpi(outputs)), str(source), *drawn]

    return command


WITH_PYGRAPHVIZ = """
import sys
where, options, source, *drawn = sys.argv[1:]
sys.path.insert(0, where)
import pygraphviz
graph = pygraphviz.AGraph(string=open(source, encoding="utf-8").read())
for format, file in zip(drawn[::2], drawn[1::2]):
    graph.draw(file, format=format, prog="dot", args=options)
"""

ENGINES: dict[str, Callable[[], Command | None]] = {"dot": find_dot, "pygraphviz": find_pygraphviz}


def dpi(outputs: dict[str, Path]) -> list[str]:
    inches = MOST_PIXELS / PNG_DPI
    return [f"-Gdpi={PNG_DPI}", f"-Gsize={inches:g},{inches:g}"] if "png" in outputs else []


# --------------------------------------------------------------------------------------------------------------------
# SVG for files, pages and notebooks

FONTS = "Arial, Helvetica, 'Liberation Sans', sans-serif"


def make_standalone(svg: str, title: str) -> str:
    """The SVG of an engine as a complete file, without references to the network.

    Ids get a prefix that is made from the content, so that several pictures can be part of one page. Engines write
    tooltips as links; they become titles, which more viewers show.
    """
    prefix = f"g{sha256(svg.encode()).hexdigest()[:8]}_"
    svg = raise_frame_titles(svg[svg.index("<svg") :])
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<a [^>]*?xlink:title="([^"]*)"[^>]*>', r"<g><title>\1</title>", svg).replace("</a>", "</g>")
    svg = svg.replace('font-family="Arial"', f'font-family="{FONTS}"')
    svg = re.sub(
        r"(<g id=\"graph0\"[^>]*>\s*<title>).*?(</title>)", lambda m: m[1] + escape(title) + m[2], svg, count=1
    )
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + prefix_ids(svg, prefix)


def raise_frame_titles(svg: str) -> str:
    """Move the titles of frames above the arrows, with a rim that keeps them legible where an arrow crosses them."""
    start = svg.find('<g id="clust1"')
    end = svg.find("<!--", start)  # the first box
    if start < 0 or end < 0:
        return svg
    title = re.compile(r"<text\b.*?</text>\n", re.DOTALL)
    titles = "".join(title.findall(svg, start, end))
    look = "paint-order:stroke;stroke:#f6f8fa;stroke-width:3px;pointer-events:none"
    above, _, below = svg.rpartition("</g>\n</svg>")
    rest = above[:start] + title.sub("", above[start:end]) + above[end:]
    return f'{rest}<g style="{look}">\n{titles}</g>\n</g>\n</svg>{below}'


def prefix_ids(svg: str, prefix: str) -> str:
    """Put a prefix before all ids and before references to them, which are whole attributes: text stays as it is."""
    svg = re.sub(r'(<[^>]*?\s)id="', rf'\1id="{prefix}', svg)
    return re.sub(r'(<[^<>]*?\s(?:(?:xlink:)?href="|[\w-]+="url\()#)', rf"\1{prefix}", svg)


def fit_width(svg: str) -> str:
    """A standalone SVG as part of a page: in its natural size, or as wide as the page if that is narrower."""
    svg = svg[svg.index("<svg") :]
    width = re.search(r'<svg[^>]*? width="([\d.]+)pt"', svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    natural = f"width:{float(width[1]) * 4 / 3:.0f}px;" if width else ""
    return svg.replace("<svg ", f'<svg style="{natural}max-width:100%;height:auto;background:white" ', 1)


next_display = itertools.count(1).__next__


def make_cell(svg: str) -> str:
    """A standalone SVG for a notebook cell: it scrolls, and its ids differ each time it is shown."""
    return f'<div style="overflow:auto;max-height:85vh">{prefix_ids(fit_width(svg), f"n{next_display()}_")}</div>'


def make_page(svgs: Mapping[str, str], parents: Mapping[str, str | None], names: Any, title: str) -> str:
    """An HTML page that loads nothing from the network: it opens and closes modules, zooms, pans and finds names.

    Args:
        svgs: the picture in each of its states, see `closing.list_states`.
        parents: each frame and the frame around it.
        names: [name, id of its box, id of the frame that it is in] of all boxes.
    """
    packed = {state: b64encode(zlib.compress(fit_width(svg).encode(), 9)).decode() for state, svg in svgs.items()}
    data = json.dumps({"states": packed, "parents": parents, "names": names}).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # The start is part of the page, so that it is seen without scripts too.
    parts = {"TITLE": escape(title), "START": fit_width(svgs[""]), "DATA": data}
    return re.sub(r"\{\{(TITLE|START|DATA)\}\}", lambda found: parts[found[1]], template)
