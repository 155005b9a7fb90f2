"""The walkthrough pages: one attention layer from X to Y, or a whole GPT, in a run on an input of the user's.

`measure` and `story` compute what a page shows, `equations` writes how. The page of a GPT has one page of an attention
for each layer, its rooms. The page itself (page.html, page.css, page.js) computes only colours and positions. It is one
file that loads nothing, and its content security policy makes the browser enforce that.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_mha import modes
from tinygrad_mha.arguments import as_ids, check_choice
from tinygrad_mha.data import name_token
from tinygrad_mha.files import replacing
from tinygrad_mha.nn import GPT, Module
from tinygrad_mha.nn.contract import find_options
from tinygrad_mha.viz.page.equations import Json
from tinygrad_mha.viz.page.measure import MOST_PARAMETER_ROWS, collect, name_tokens, prepare_attention, prepare_layer
from tinygrad_mha.viz.page.story import collect_model, encode_text

__all__ = ["LANGUAGES", "Walkthrough", "walkthrough"]

LANGUAGES = ("en", "zh")

Crops = tuple[tuple[int, int | None], ...]

MAX_CHARACTERS = 2_000_000
GOOD_CHARACTERS = 1_000_000  # a longer page is cropped
MAX_MODEL, GOOD_MODEL = 8_000_000, 1_490_000  # the same of the page of a GPT
ROOM_COLUMNS = 64  # of a matrix in a room
# How a page is cropped: how many rows and columns of a parameter, and how many columns of other matrices, it shows.
WHOLE = (MOST_PARAMETER_ROWS, None)
CROPS: Crops = (WHOLE, (128, None), (64, None), (32, None), (32, 128), (16, 64), (16, 32), (16, 16))
# The page of a GPT shows less of parameters and of feed-forward networks; the page of one layer, layer=0, shows more.
MODEL_CROPS: Crops = ((32, None), (16, None), (16, 128), (16, 64), (16, 32), (16, 16), (8, 8))


class Walkthrough:
    """A page that shows one attention layer or a GPT step by step, made by `walkthrough`. Notebooks display it.

    Attributes:
        html: the page.
        summary: how many tokens, layers and heads it shows.
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
    tokenizer: Any = None,
) -> Walkthrough:
    """Make a page that shows multi-head attention or a whole GPT step by step, with the matrices of one run.

    For each step it shows the equation with shapes, values and gradients; for each row, which rows it depends on and
    which depend on it; and what decoding with a key-value cache computes, reads and saves. The equations are those of
    the recorded run. The layer runs as a copy in eval mode; the original is not changed.

    The page of a GPT leads from the text to the next token: embedding, residual stream, all layers and heads, what each
    layer would predict (logit lens), logits and sampling, and decoding with the cache. Each attention opens as a page.

    Args:
        mha: the attention, or a GPT. Another module is accepted if its forward shows the
            steps q, k, v, weights and heads to `edit` (docs/your_own_attention.md), or if it has a method `per_head` as
            `MultiHeadAttention` has, which names its matrices X, Q_1, K_1, V_1, ..., H_1, Concat, Y.
        x: its input, (T, d_model) or (1, T, d_model); for a GPT a text, or token ids, integers (T,) or (1, T).
        tokens: names of the T rows; by default the pieces of text of the ids, the ids, or 1, 2, ...
        causal: whether a token attends only to itself and to earlier tokens.
        grad: the gradient of a loss with respect to Y, (T, d_out). By default the loss of a GPT is that of predicting
            each next token, and the loss of an attention is half the sum of the squares of Y.
        lang: the language in which the page opens, "en" or "zh".
        path: where to write the page; by default it is not written.
        layer: show the attention of this layer of a GPT only.
        tokenizer: of a GPT: encodes a text, and names the ids by `decode([id])`.

    Raises:
        ValueError: shapes that do not fit, more than 64 tokens, a page of more than 2 MB (of a GPT 8 MB), more layers
            and heads than can be looked at, or a `forward` that does not compute what `per_head` computes.
        TypeError: neither an attention nor a GPT, a text without a tokenizer, or tokens that are not strings.

    Example:
        >>> mha = tg.nn.MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        >>> walkthrough(mha, np.eye(4, 5), tokens=["the", "cat", "sat", "down"])
        Walkthrough of 4 tokens and 2 heads: .save("page.html") writes it
    """
    check_choice(lang, LANGUAGES, "lang")
    # The page shows infinity and nan as such, so there is nothing to warn of.
    with modes.enable_grad(), np.errstate(all="ignore"):
        if isinstance(mha, GPT):
            ids = encode_text(x, tokenizer)
            if layer is None:
                return finish(make_model_page(mha, ids, tokens, causal, grad, lang, tokenizer), path)
            if tokens is None and tokenizer is not None:
                tokens = [name_token(tokenizer, i) for i in as_ids(ids, "ids").ravel().tolist()]
            subject = prepare_layer(mha, ids, layer, grad)
        elif not (isinstance(mha, Module) and (hasattr(mha, "per_head") or "edit" in find_options(type(mha).forward))):
            expected = "a MultiHeadAttention or a GPT, or a module with a method per_head or a forward that takes edit"
            inside = mha.named_modules() if isinstance(mha, Module) else []
            found = [path for path, part in inside if hasattr(part, "per_head")]
            advice = f". Of this model, choose one attention: {', '.join(found[:3])}" if found else ""
            raise TypeError(f"expected {expected}; got {type(mha).__name__}{advice}")
        elif layer is not None or tokenizer is not None:
            option = "tokenizer" if layer is None else f"layer={layer}"
            raise ValueError(f"{option} is for a GPT, but this is one attention by itself")
        else:
            subject = prepare_attention(mha, x, grad)
        data = collect(subject, name_tokens(tokens, subject), causal)
    n, heads = len(data["tokens"]), len(data["walks"])
    summary = f"{count(n, 'token')} and {count(heads, 'head')}"
    page = fit_page(lambda *crop: write_page(data, lang, *crop), summary, GOOD_CHARACTERS, MAX_CHARACTERS)
    return finish(Walkthrough(page, summary), path)


def finish(page: Walkthrough, path: str | os.PathLike[str] | None) -> Walkthrough:
    if path is not None:
        page.save(path)
    return page


def count(n: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{n} {noun}{'s' * (n > 1)}"


def make_model_page(
    model: GPT, ids: Any, tokens: Sequence[str] | None, causal: bool, grad: Any, lang: str, tokenizer: Any
) -> Walkthrough:
    """The page of a whole GPT."""
    if not causal:
        raise ValueError("a GPT is causal by itself: causal=False cannot be shown")
    if grad is not None:
        raise ValueError("grad is the gradient of one attention: choose it with layer=0")
    data = collect_model(model, ids, tokens, tokenizer)
    n, layers, heads = len(data["tokens"]), len(data["rooms"]), len(data["rooms"][0]["walks"])
    summary = f"{count(n, 'token')}, {count(layers, 'layer')} and {count(heads, 'head')}"
    page = fit_page(lambda *crop: write_model_page(data, lang, *crop), summary, GOOD_MODEL, MAX_MODEL, MODEL_CROPS)
    return Walkthrough(page, summary)


def fit_page(write: Callable[..., str], summary: str, good: int, most: int, crops: Crops = CROPS) -> str:
    """The page with all numbers if it is not too long, otherwise with as many as fit; it says what it leaves out."""
    for exact, crop in [(True, crops[0]), *((False, crop) for crop in crops)]:
        page = write(exact, *crop)
        if len(page) <= good:
            return page
    if len(page) <= most:
        return page
    raise ValueError(
        f"the page of {summary} would have {len(page) / 1e6:.1f} MB even with {crops[-1][1]} columns of each matrix, "
        f"more than {most / 1e6:.0f} MB: choose a shorter part of the sequence"
    )


def write_page(data: Json, lang: str, exact: bool, parameter_limit: int, limit: int | None) -> str:
    """The page of one attention."""
    return fill_page(
        "page.html", read_parts("page") | {"DATA": write_attention(data, lang, exact, parameter_limit, limit)}
    )


def write_attention(data: Json, lang: str, exact: bool, parameter_limit: int, limit: int | None) -> str:
    """The data of a page of one attention. What the user gave is here only, and no character has a meaning in HTML."""
    matrices = {
        name: pack_matrix(name, matrix, exact, parameter_limit if matrix["kind"] == "parameter" else limit)
        for name, matrix in data["matrices"].items()
    }
    return write_json(data | {"lang": lang, "matrices": matrices, "reach": pack_reach(data["reach"], matrices)})


def write_model_page(data: Json, lang: str, exact: bool, parameter_limit: int, limit: int | None) -> str:
    """The page of a GPT: its own data, the data of each room, and the page of a room without data.

    What a room has is not written twice: {"room": layer, "name": name} stands for it.
    """
    matrices: Json = {}
    for name, matrix in data["matrices"].items():
        whole = matrix | {"kind": "", "tokens": (True, False)}
        matrices[name] = pack_matrix(name, whole, exact, parameter_limit if name.endswith("inner") else limit)
    for layer in range(len(data["rooms"])):
        matrices[f"h.{layer}.attention"] = {"room": layer, "name": "Y"}
        if data["facts"]["norm_first"]:
            matrices[f"h.{layer}.norm_1"] = {"room": layer, "name": "X"}
    content = {name: value for name, value in data.items() if name != "rooms"} | {"lang": lang, "matrices": matrices}
    room_limit = min(limit or ROOM_COLUMNS, ROOM_COLUMNS)
    texts = [write_attention(room, lang, exact, parameter_limit, room_limit) for room in data["rooms"]]
    rooms = "".join(f'<script type="application/json" id="room-{i}">{text}</script>' for i, text in enumerate(texts))
    room_parts = read_parts("page")
    template = write_json(fill_page("page.html", room_parts | {"DATA": "{{DATA}}"}))
    more = {"ROOMS": rooms, "TEMPLATE": template, "DATA": write_json(content)}
    return fill_page("model.html", read_parts("model") | more, [room_parts])


def read_parts(name: str) -> dict[str, str]:
    """Style, script and words of a page, and the hashes by which its content security policy allows them."""
    style, script = (read_page_file(f"common.{kind}") + read_page_file(f"{name}.{kind}") for kind in ("css", "js"))
    words = json.loads(read_page_file("words.json"))
    if name == "model":
        more = json.loads(read_page_file("model_words.json"))
        words = {lang: words[lang] | more[lang] for lang in LANGUAGES}
    hashes = {"STYLE_HASH": hash_source(style), "SCRIPT_HASH": hash_source(script)}
    return hashes | {"STYLE": style, "SCRIPT": script, "WORDS": write_json(words)}


def fill_page(name: str, parts: dict[str, str], inner: Sequence[dict[str, str]] = (), connect: str = "") -> str:
    """A page from its file and the common head.

    Args:
        parts: what stands in the file for {{NAME}}, among it the parts that `read_parts` gives.
        inner: the parts of pages that are shown inside of it, whose styles and scripts it allows too.
        connect: what it may load, for its content security policy; by default nothing.
    """
    allowed = {f"{kind}_HASHES": " ".join(p[f"{kind}_HASH"] for p in (parts, *inner)) for kind in ("STYLE", "SCRIPT")}
    every = parts | allowed | {"CONNECT": connect and f"connect-src {connect}; "}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: every[found[1]], read_page_file("head.html") + read_page_file(name))


def read_page_file(name: str) -> str:
    return resources.files("tinygrad_mha.viz").joinpath("page", name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """The hash by which a content security policy names a script or style, in its quotes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
