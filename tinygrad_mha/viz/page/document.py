"""The walkthrough page: one attention layer from X to Y, in a run on an input of the user's.

`measure` computes what the page shows, `equations` writes how. The page itself (page.html, page.css, page.js) computes
only colours and positions. It is one file that loads nothing, and its content security policy makes the browser enforce
that.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import modes
from tinygrad_mha.arguments import check_choice
from tinygrad_mha.files import replacing
from tinygrad_mha.nn import GPT, Module
from tinygrad_mha.nn.contract import find_options
from tinygrad_mha.viz.page.equations import Json
from tinygrad_mha.viz.page.measure import MOST_PARAMETER_ROWS, collect, name_tokens, prepare_attention, prepare_layer

__all__ = ["LANGUAGES", "Walkthrough", "walkthrough"]

LANGUAGES = ("en", "zh")

MAX_CHARACTERS = 2_000_000
GOOD_CHARACTERS = 1_000_000  # a longer page is cropped
# How a page is cropped: how many rows and columns of a parameter, and how many columns of other matrices, it shows.
CROPS = ((MOST_PARAMETER_ROWS, None), (128, None), (64, None), (32, None), (32, 128), (16, 64), (16, 32), (16, 16))


class Walkthrough:
    """A page that shows one attention layer step by step, made by `walkthrough`. Notebooks display it.

    Attributes:
        html: the page.
        summary: how many tokens and heads it shows.
    """

    def __init__(self, page: str, summary: str) -> None:
        self.html = page
        self.summary = summary

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page and return the path. If writing fails, no file is left behind."""
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8", newline="\n")
        return Path(path)

    def _repr_html_(self) -> str:
        # In a frame of its own: its styles and ids cannot conflict with those of the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="attention walkthrough" '
            f'style="width:100%;height:860px;border:0;resize:vertical"></iframe>'
        )

    def __repr__(self) -> str:
        return f'Walkthrough of {self.summary}: .save("page.html") writes it'


def walkthrough(
    mha: Module,
    x: Any,
    tokens: Sequence[str] | None = None,
    causal: bool = True,
    grad: Any = None,
    lang: str = "en",
    path: str | os.PathLike[str] | None = None,
    layer: int | None = None,
) -> Walkthrough:
    """Make a page that shows multi-head attention step by step, with the matrices of one run.

    For each step it shows the equation with shapes, values and gradients; for each row, which rows it depends on and
    which depend on it; and what decoding with a key-value cache computes, reads and saves. The equations are those of
    the recorded run. The layer runs as a copy in eval mode; the original is not changed.

    Args:
        mha: the attention, or a GPT of which one layer is shown. Another module is accepted if its forward shows the
            steps q, k, v, weights and heads to `edit` (docs/your_own_attention.md), or if it has a method `per_head` as
            `MultiHeadAttention` has, which names its matrices X, Q_1, K_1, V_1, ..., H_1, Concat, Y.
        x: its input, (T, d_model) or (1, T, d_model); for a GPT the token ids, integers (T,) or (1, T).
        tokens: names of the T rows; by default the ids, or 1, 2, ...
        causal: whether a token attends only to itself and to earlier tokens.
        grad: the gradient of a loss with respect to Y, (T, d_out). By default the loss of a GPT is that of predicting
            each next token, and the loss of an attention is half the sum of the squares of Y.
        lang: the language in which the page opens, "en" or "zh".
        path: where to write the page; by default it is not written.
        layer: which layer of a GPT, 0 by default.

    Raises:
        ValueError: shapes that do not fit, more than 64 tokens, a page of more than 2 MB, or a `forward` that does not
            compute what `per_head` computes.
        TypeError: neither an attention nor a GPT, or tokens that are not strings.

    Example:
        >>> mha = tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        >>> walkthrough(mha, np.eye(4, 5), tokens=["the", "cat", "sat", "down"])
        Walkthrough of 4 tokens and 2 heads: .save("page.html") writes it
    """
    check_choice(lang, LANGUAGES, "lang")
    # The page shows infinity and nan as such, so there is nothing to warn of.
    with modes.enable_grad(), np.errstate(all="ignore"):
        if isinstance(mha, GPT):
            subject = prepare_layer(mha, x, 0 if layer is None else layer, grad)
        elif not (isinstance(mha, Module) and (hasattr(mha, "per_head") or "edit" in find_options(type(mha).forward))):
            expected = "a MultiHeadAttention or a GPT, or a module with a method per_head or a forward that takes edit"
            raise TypeError(f"expected {expected}; got {type(mha).__name__}")
        elif layer is not None:
            raise ValueError(f"layer={layer} selects a layer of a GPT, but this is one attention by itself")
        else:
            subject = prepare_attention(mha, x, grad)
        data = collect(subject, name_tokens(tokens, subject), causal)
    n, heads = len(data["tokens"]), len(data["walks"])
    page = Walkthrough(fit_page(data, lang), f"{n} token{'s' * (n > 1)} and {heads} head{'s' * (heads > 1)}")
    if path is not None:
        page.save(path)
    return page


# --------------------------------------------------------------------------------------------------------------------
# The page


def fit_page(data: Json, lang: str) -> str:
    """The page with all numbers if it is not too long, otherwise with as many as fit; it says what it leaves out."""
    for exact, crop in [(True, CROPS[0]), *((False, crop) for crop in CROPS)]:
        page = write_page(data, lang, exact, *crop)
        if len(page) <= GOOD_CHARACTERS:
            return page
    if len(page) <= MAX_CHARACTERS:
        return page
    size = f"{len(data['tokens'])} tokens and {len(data['walks'])} heads"
    raise ValueError(
        f"the page of {size} would have {len(page) / 1e6:.1f} MB even with {CROPS[-1][1]} columns of each matrix, more "
        f"than {MAX_CHARACTERS / 1e6:.0f} MB: choose a shorter part of the sequence"
    )


def write_page(data: Json, lang: str, exact: bool, parameter_limit: int, limit: int | None) -> str:
    """Fill in the template. What the user gave is in the JSON only, in which no character has a meaning in HTML."""
    matrices = {
        name: pack_matrix(name, matrix, exact, parameter_limit if matrix["kind"] == "parameter" else limit)
        for name, matrix in data["matrices"].items()
    }
    content = data | {"lang": lang, "matrices": matrices, "reach": pack_reach(data["reach"], matrices)}
    style, script, words = (read_page_file(name) for name in ("page.css", "page.js", "words.json"))
    parts = {
        "STYLE_HASH": hash_source(style),
        "SCRIPT_HASH": hash_source(script),
        "STYLE": style,
        "SCRIPT": script,
        "WORDS": write_json(json.loads(words)),
        "DATA": write_json(content),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], read_page_file("page.html"))


def read_page_file(name: str) -> str:
    return resources.files("tinygrad_mha.viz").joinpath("page", name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """The hash by which a content security policy names a script or style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write_json(content: Any) -> str:
    """ASCII that cannot end a script element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pack_matrix(name: str, matrix: Json, exact: bool, limit: int | None) -> Json:
    """A matrix as the page reads it, cropped to `limit` rows and columns on axes that do not belong to tokens."""
    values, gradient = np.atleast_2d(matrix["values"]), matrix["gradient"]
    rows, columns = (
        n if is_tokens else min(n, limit or n) for n, is_tokens in zip(values.shape, matrix["tokens"], strict=True)
    )
    return {
        "kind": matrix["kind"],
        "shape": values.shape,
        "rows": rows,
        "columns": columns,
        "tokens": matrix["tokens"],
        "cached": re.fullmatch(r"[KV]_\d+", name) is not None,
        "values": pack_numbers(values[:rows, :columns], exact),
        "gradient": None if gradient is None else pack_numbers(np.atleast_2d(gradient)[:rows, :columns], exact),
    }


def pack_numbers(array: np.ndarray, exact: bool) -> Json:
    """{"f4" or "f8": little-endian floats in base64}: shorter than decimals, exact, and able to hold infinity."""
    finite = array[np.isfinite(array)]
    small = array.dtype == np.float32 or not (exact or np.abs(finite).max(initial=0.0) > np.finfo(np.float32).max)
    kind = "f4" if small else "f8"
    return {kind: base64.b64encode(array.astype("<" + kind).tobytes()).decode()}


def pack_reach(reach: dict[str, dict[str, np.ndarray]], matrices: Json) -> Json:
    """{"pairs": {made: {from: index}}, "patterns": [bits in base64, row by row]}; most patterns occur many times."""
    patterns: dict[str, int] = {}
    pairs: dict[str, dict[str, int]] = {}
    for made, sources in reach.items():
        pairs[made] = {}
        for source, rows in sources.items():
            bits = base64.b64encode(np.packbits(rows[:, : matrices[source]["rows"]]).tobytes()).decode()
            pairs[made][source] = patterns.setdefault(bits, len(patterns))
    return {"pairs": pairs, "patterns": list(patterns)}
