"""The walkthrough page: one attention layer from X to Y, on a run of your own.

What it shows has been computed (see `observed`); the page itself (folder `page`) works out nothing but colours and
places. It is one file that asks for nothing else, and its own content security policy has the browser enforce that.
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
from tinygrad_mha.nn import GPT, MultiHeadAttention
from tinygrad_mha.viz.page.measure import MOST_PARAMETER_ROWS, Head, Json, collected, layer_of, subject_of, token_names

LANGUAGES = ("en", "zh")

MOST_BYTES = 2_000_000
GOOD_BYTES = 1_000_000  # what a page is cut down to, if it can
# Where all numbers are too many: at most how many rows and columns of parameters, and columns of all else, are shown.
CROPS = ((MOST_PARAMETER_ROWS, None), (128, None), (64, None), (32, None), (32, 128), (16, 64), (16, 32), (16, 16))


class Walkthrough:
    """A page that leads through one attention layer, as `walkthrough` makes it. A notebook shows it.

    Attributes:
        html: the whole page, a text.
    """

    def __init__(self, page: str, summary: str) -> None:
        self.html = page
        self.summary = summary

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, whole or not at all; it opens by double click. Returns the path."""
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8", newline="\n")
        return Path(path)

    def _repr_html_(self) -> str:
        # A frame of its own: neither styles nor names can meet those of the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="attention walkthrough" '
            f'style="width:100%;height:860px;border:0;resize:vertical"></iframe>'
        )

    def __repr__(self) -> str:
        return f'Walkthrough of {self.summary}: .save("page.html") writes it'


def walkthrough(
    mha: MultiHeadAttention | GPT,
    x: Any,
    tokens: Sequence[str] | None = None,
    causal: bool = True,
    grad: Any = None,
    lang: str = "en",
    path: str | os.PathLike[str] | None = None,
    layer: int | None = None,
) -> Walkthrough:
    """A page that leads through multi-head attention matrix by matrix, with the numbers of this layer and this input.

    It shows every product with shapes, values and gradients, which rows each row came from and which it reaches, and
    what a key-value cache computes, reads and saves. Nothing of yours is changed: what runs is a copy, without dropout.

    Args:
        mha: the attention, or a GPT of which one layer is shown.
        x: its input, (T, d_model) or (1, T, d_model); for a GPT the token ids, integers (T,) or (1, T).
        tokens: what to call the T rows; 1, 2, ... or the ids unless given.
        causal: whether a token may attend to itself and those before it only.
        grad: the gradient of a loss with respect to Y, (T, d_out). Unless given, the loss is that of the GPT
            predicting each next token, and for an attention by itself half the sum of the squares of Y.
        lang: "en" or "zh", the language in which the page opens.
        path: where to write the page, if anywhere.
        layer: which layer of a GPT, 0 unless given.

    Raises:
        ValueError: shapes that do not fit, more than 64 tokens, or a page of more than 2 MB.
        TypeError: neither an attention nor a GPT, or tokens that are no strings.

    Example:
        >>> mha = MultiHeadAttention(5, n_head=2, d_k=7, d_v=11, rng=0)
        >>> walkthrough(mha, np.eye(4, 5), tokens=["the", "cat", "sat", "down"])
        Walkthrough of 4 tokens and 2 heads: .save("page.html") writes it
    """
    check_choice(lang, LANGUAGES, "lang")
    # What is infinite or no number is shown as such, so nobody needs to be warned of it.
    with modes.enable_grad(), np.errstate(all="ignore"):
        if isinstance(mha, GPT):
            subject = layer_of(mha, x, 0 if layer is None else layer, grad)
        elif not isinstance(mha, MultiHeadAttention):
            raise TypeError(f"expected a MultiHeadAttention or a GPT, got {type(mha).__name__}")
        elif layer is not None:
            raise ValueError(f"layer={layer} chooses a layer of a GPT, and this is one attention by itself")
        else:
            subject = subject_of(mha, x, grad)
        subject = subject._replace(facts={**subject.facts, "causal": causal, "lang": lang})
        names = token_names(tokens, subject)
        data = collected(subject, names)
    n, heads = len(names), subject.attention.n_head
    page = Walkthrough(fitted_page(data), f"{n} token{'s' * (n > 1)} and {heads} head{'s' * (heads > 1)}")
    if path is not None:
        page.save(path)
    return page


# --------------------------------------------------------------------------------------------------------------------
# The steps: what each one makes of what, forward and backward
#
# Equations are written as on paper, with a blank around every sign. The page puts a matrix where it finds the name of
# one: "∂Q_1" is the gradient of the loss by Q_1, "K_1ᵀ" the transposed K_1; all else stands as it is.


def walk_through_head(head: Head, values: dict[str, Any], facts: Json) -> list[Json]:
    """The steps from X to Y through one head: {"kind", "out", "forward": equations, "backward": equations}."""
    q, k, v, scores, weights, mixed = head.q, head.k, head.v, head.scores, head.weights, head.mixed
    root = f"/ √{facts['d_k']}"
    columns = f"[:,{(head.number - 1) * facts['d_v']}:{head.number * facts['d_v']}]"
    rotate, back = ("rotate ( {} )", "rotate⁻¹ ( {} )") if facts["position"] == "rotary" else ("{}", "{}")

    def product(
        out: str, x: str, weight: str, bias: str, rotate: str = "{}", back: str = "{}"
    ) -> tuple[str, list[str]]:
        """out = x @ weight + bias, and the gradients of the two parameters."""
        has_bias = bias in values
        forward = rotate.format(f"{x} @ {weight} + {bias}" if has_bias else f"{x} @ {weight}")
        came = back.format(f"∂{out}")
        backward = [f"∂{weight} = {x}ᵀ @ {came}"] + [f"∂{bias} = Σᵢ {came}"] * has_bias
        return f"{out} = {forward}", backward

    q_made, q_parameters = product(q, "X", head.wq, head.bq, rotate, back)
    k_made, k_parameters = product(k, "X", head.wk, head.bk, rotate, back)
    v_made, v_parameters = product(v, "X", head.wv, head.bv)
    y_made, y_parameters = product("Y", "Concat", "W_O", "b_O")
    to_k = " + ".join(f"∂scores_{i}ᵀ @ Q_{i} {root}" for i in head.sharing)
    to_v = " + ".join(f"S_{i}ᵀ @ ∂H_{i}" for i in head.sharing)
    to_x = f"{back.format('∂' + q)} @ {head.wq}ᵀ + {back.format('∂' + k)} @ {head.wk}ᵀ + ∂{v} @ {head.wv}ᵀ"
    to_x += " + …" if facts["n_head"] > 1 else ""

    shift = f" + {head.alibi}" if head.alibi in values else ""
    mask = "mask ( {} )" if head.masked in values and len(values["X"]) > 1 and facts["causal"] else "{}"
    seen = head.masked if head.masked in values else scores  # what the softmax is taken of
    to_seen = f"∂{seen} = {weights} ∘ ( ∂{weights} − Σⱼ({weights}∘∂{weights}) )"

    steps = [("X", "X", ["X"], [f"∂X = {to_x}"])]
    steps += [("Q", q, [q_made], [f"∂{q} = ∂{scores} @ {k} {root}", *q_parameters])]
    steps += [("K", k, [k_made], [f"∂{k} = {to_k}", *k_parameters])]
    steps += [("V", v, [v_made], [f"∂{v} = {to_v}", *v_parameters])]
    scored = f"{scores} = {q} @ {k}ᵀ {root}"
    if seen == scores:
        steps += [("scores", scores, [scored], [to_seen])]
    else:
        steps += [("scores", scores, [scored], [f"∂{scores} = {mask.format('∂' + seen)}"])]
        kind = "masked" if not shift else "shifted" if mask == "{}" else "shifted and masked"
        steps += [(kind, seen, [f"{seen} = {mask.format(scores + shift)}"], [to_seen])]
    steps += [("S", weights, [f"{weights} = softmax ( {seen} )"], [f"∂{weights} = ∂{mixed} @ {v}ᵀ"])]
    steps += [("H", mixed, [f"{mixed} = {weights} @ {v}"], [f"∂{mixed} = ∂Concat {columns}"])]
    heads = " | ".join(f"H_{i + 1}" for i in range(facts["n_head"]))
    steps += [("Concat", "Concat", [f"Concat = {heads}"], ["∂Concat = ∂Y @ W_Oᵀ"])]
    steps += [("Y", "Y", [y_made], ["∂Y", *y_parameters])]
    return [{"kind": k, "out": o, "forward": f, "backward": b} for k, o, f, b in steps]


# --------------------------------------------------------------------------------------------------------------------
# The page


def fitted_page(data: Json) -> str:
    """The page with all numbers, or where that is too much with those that fit; it says what it leaves out."""
    for exact, crop in [(True, CROPS[0]), *((False, crop) for crop in CROPS)]:
        page = written_page(data, exact, *crop)
        if len(page) <= GOOD_BYTES:
            return page
    if len(page) <= MOST_BYTES:
        return page
    size = f"{len(data['tokens'])} tokens and {data['facts']['n_head']} heads"
    raise ValueError(
        f"the page of {size} would have {len(page) / 1e6:.1f} MB even with {CROPS[-1][1]} columns of each matrix, and "
        f"{MOST_BYTES / 1e6:.0f} MB is the most: choose a shorter part of the sequence"
    )


def written_page(data: Json, exact: bool, of_parameters: int, columns: int | None) -> str:
    """The template, filled in. Only the JSON has anything of the user's in it, and no character that HTML knows."""
    matrices = {}
    for name, array in data["values"].items():
        grad = data["gradients"].get(name)
        is_parameter = KINDS.get(name.partition("_")[0]) == "parameter"
        matrices[name] = matrix(name, array, grad, exact, of_parameters if is_parameter else columns)
    shown = {key: data[key] for key in ("tokens", "facts", "decode")} | {
        "walks": [walk_through_head(head, data["values"], data["facts"]) for head in data["heads"]],
        "matrices": matrices,
        "reach": packed_reach(data["reach"], matrices),
    }
    style, script, words = (page_file(name) for name in ("page.css", "page.js", "words.json"))
    parts = {
        "STYLE_HASH": sha256(style),
        "SCRIPT_HASH": sha256(script),
        "STYLE": style,
        "SCRIPT": script,
        "WORDS": as_json(json.loads(words)),
        "DATA": as_json(shown),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page_file("page.html"))


def page_file(name: str) -> str:
    return resources.files("tinygrad_mha.viz").joinpath("page", name).read_text(encoding="utf-8")


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(content: Any) -> str:
    """ASCII, and nothing in it that could end a script element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def matrix(name: str, array: np.ndarray, grad: np.ndarray | None, exact: bool, limit: int | None) -> Json:
    """What the page knows of one matrix: its kind, its whole shape, and the rows and columns that it holds."""
    kind = KINDS.get(name.partition("_")[0], "")
    of_tokens = [kind != "parameter", name.startswith(SQUARE)]  # whether its rows, and its columns, are tokens
    array = np.atleast_2d(array)
    rows, columns = (n if tokens else min(n, limit or n) for n, tokens in zip(array.shape, of_tokens, strict=True))
    part = slice(rows), slice(columns)
    return {
        "kind": kind,
        "shape": array.shape,
        "rows": rows,
        "columns": columns,
        "tokens": of_tokens,
        "cached": name.startswith(("K_", "V_")),
        "values": packed(array[part], exact),
        "gradient": None if grad is None else packed(np.atleast_2d(grad)[part], exact),
    }


KINDS = {
    "X": "input",
    "W": "parameter",
    "b": "parameter",
    "S": "attention",
    "Y": "output",
    "alibi": "constant",
    "relative": "constant",
}
SQUARE = ("scores_", "masked_", "S_", "alibi_", "relative_")


def packed(array: np.ndarray, exact: bool) -> Json:
    """Numbers in base64: shorter than decimals, exact, and with infinity. {"f4" or "f8": little-endian floats}."""
    finite = array[np.isfinite(array)]
    small = array.dtype == np.float32 or not (exact or np.abs(finite).max(initial=0.0) > np.finfo(np.float32).max)
    kind = "f4" if small else "f8"
    return {kind: base64.b64encode(array.astype("<" + kind).tobytes()).decode()}


def packed_reach(reach: dict[str, dict[str, np.ndarray]], matrices: Json) -> Json:
    """{"pairs": {made: {from: index}}, "patterns": [bits in base64, row by row]}; most patterns occur many times."""
    patterns: dict[str, int] = {}
    pairs: dict[str, dict[str, int]] = {}
    for made, sources in reach.items():
        pairs[made] = {}
        for source, rows in sources.items():
            bits = base64.b64encode(np.packbits(rows[:, : matrices[source]["rows"]]).tobytes()).decode()
            pairs[made][source] = patterns.setdefault(bits, len(patterns))
    return {"pairs": pairs, "patterns": list(patterns)}
