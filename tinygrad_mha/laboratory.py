"""`tinygrad-mha lab`: the walkthrough page with settings to change, computed by this package and served to one browser.

`Settings` says what was changed, `Experiment` computes it, `write_python` writes it as lines of Python, and `LabServer`
serves it at an address of this machine that contains a secret token.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import check_choice, check_count, check_integer, is_number
from tinygrad_mha.check import dependencies
from tinygrad_mha.data import Tokenizer, name_token
from tinygrad_mha.demo import embed_words
from tinygrad_mha.nn import GPT, LayerNorm, Module, MultiHeadAttention, RMSNorm
from tinygrad_mha.nn.positions import SCHEMES
from tinygrad_mha.tensors import Tensor
from tinygrad_mha.viz.page.document import (
    LANGUAGES,
    fill_page,
    read_page_file,
    read_parts,
    walkthrough,
    write_json,
)
from tinygrad_mha.viz.page.model_run import run_model

__all__ = ["Experiment", "LabServer", "Settings", "write_python"]

MOST_TOKENS, MOST_WIDTH, MOST_HEADS, MOST_EDITS = 16, 64, 8, 200
MOST_BYTES, MOST_REQUESTS, SECONDS = 64_000, 8, 5  # of a request; at a time; until a request must have arrived
SILENCE = 90  # seconds without a sign of life of the page until the lab ends; browsers slow down hidden pages to 60
GRACE = 3  # seconds for a page that was closed to come back, because it was loaded again
MASKS = ("causal", "broken", "none")
NORMS = {"none": None, "layer": LayerNorm, "rms": RMSNorm}
POSITIONS = tuple(name for name in SCHEMES if name in ("none", "rotary", "alibi", "relative"))


@dataclass
class Settings:
    """What a reader has chosen. `from_json` checks all of it.

    Attributes:
        sentence: words, or for a model any text.
        n_head, d_model, d_k, d_v, position, norm, seed: of an attention with random weights.
        layer: of a model, from 0.
        whole: whether the page shows the whole model, with the changed layer in it.
        mask: "causal"; "broken": each token also sees the one after it; "none".
        cut: heads whose result is replaced by zeros, from 1.
        identity: weights that are replaced by the identity: "wq", "wk", "wv", "wo".
        edits: [matrix, row, column, value] of single numbers of X, W_Q1, ..., W_O, in order, from 0.
    """

    sentence: str = "the cat sat"
    n_head: int = 2
    d_model: int = 5
    d_k: int = 7
    d_v: int = 11
    position: str = "none"
    norm: str = "none"
    seed: int = 0
    layer: int = 0
    whole: bool = False
    mask: str = "causal"
    cut: list[int] = field(default_factory=list)
    identity: list[str] = field(default_factory=list)
    edits: list[list[Any]] = field(default_factory=list)
    lang: str = "en"

    @classmethod
    def from_json(cls, values: Any) -> Settings:
        """Check the settings of a request.

        Raises:
            ValueError, TypeError: what is expected and what came.
        """
        if not isinstance(values, dict):
            raise TypeError(f"settings are a JSON object, got {type(values).__name__}")
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}")
        settings = cls(**values)
        if not isinstance(settings.sentence, str) or not settings.sentence.strip() or len(settings.sentence) > 500:
            raise ValueError("the sentence must be a text of 1 to 500 characters")
        for name, most in (("n_head", MOST_HEADS), ("d_model", MOST_WIDTH), ("d_k", MOST_WIDTH), ("d_v", MOST_WIDTH)):
            if check_count(getattr(settings, name), name) > most:
                raise ValueError(f"{name} is at most {most} in the lab, got {getattr(settings, name)}")
        for name in ("seed", "layer"):
            if not 0 <= check_integer(getattr(settings, name), name) < 2**32:
                raise ValueError(f"{name} must be in 0 ... 2**32 - 1, got {getattr(settings, name)}")
        for name, choices in (("mask", MASKS), ("norm", NORMS), ("position", POSITIONS), ("lang", LANGUAGES)):
            check_choice(getattr(settings, name), tuple(choices), name)
        if not isinstance(settings.whole, bool):
            raise TypeError(f"whole must be true or false, got {settings.whole!r}"[:200])
        for name in ("cut", "identity", "edits"):
            if not isinstance(getattr(settings, name), list) or len(getattr(settings, name)) > MOST_EDITS:
                raise ValueError(f"{name} must be a list of at most {MOST_EDITS} entries")
        settings.identity = [check_choice(weight, ("wq", "wk", "wv", "wo"), "identity") for weight in settings.identity]
        settings.cut = [check_count(head, "cut") for head in settings.cut]
        for edit in settings.edits:
            if not (isinstance(edit, list) and len(edit) == 4 and isinstance(edit[0], str)):
                raise ValueError(f"an edit is [matrix, row, column, value], got {edit!r}"[:200])
            edit[1:] = [check_integer(edit[1], "row"), check_integer(edit[2], "column"), check_value(edit[3])]
        return settings


def check_value(value: Any) -> float:
    if not is_number(value) or not abs(value) < 1e30:
        raise ValueError(f"the value must be a number between -1e30 and 1e30, got {str(value)[:50]!r}")
    return float(value)


class Changed(Module):
    """An attention with a norm before it, another mask, and heads that are cut. It shows its steps to `edit`."""

    def __init__(self, attention: Any, norm: Module | None, mask: str, kept: np.ndarray | None) -> None:
        self.attention = attention
        self.norm = norm
        self.mask = mask
        self.kept = kept  # (H, 1, 1): 0 for a head that is cut
        self.has_allow = isinstance(attention, MultiHeadAttention)

    def forward(self, x: Any, cache: Any = None, positions: Any = None, edit: Any = None) -> Tensor:
        """(T, C) or (B, T, C) -> the same shape."""
        scores: list[Tensor] = []
        allow = np.tri(np.shape(x)[-2], k=1, dtype=bool) if self.mask == "broken" else None

        def change(name: str, tensor: Tensor) -> Tensor:
            if name == "scores":
                scores[:] = [tensor]
            if name == "masked" and self.mask != "causal" and not self.has_allow:
                tensor = scores[0] if self.mask == "none" else ops.where(allow, scores[0], -np.inf)
            if name == "heads" and self.kept is not None:
                tensor = tensor * self.kept.astype(tensor.dtype)
            return tensor if edit is None else edit(name, tensor)

        x = x if self.norm is None else self.norm(x)
        options: dict[str, Any] = {"edit": change, "positions": positions, "cache": cache}
        if self.has_allow:
            options |= {"causal": self.mask == "causal", "allow": allow}
        return self.attention(x, **options)


class ChangedWithoutCache(Changed):
    """The same for other masks, with which a cache would not give the same numbers."""

    def forward(self, x: Any, positions: Any = None, edit: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, None, positions, edit)


class Experiment:
    """An attention as the settings say: with random weights, or of a layer of a model.

    Attributes:
        attention: the changed attention.
        x: its input (T, d_model).
        tokens: the names of its rows.
    """

    def __init__(self, settings: Settings, model: GPT | None = None, tokenizer: Tokenizer | None = None) -> None:
        self.settings = settings
        self._is_model = model is not None
        self._tokenizer: Tokenizer | None = None  # of the page of a whole model
        norm: Module | None = None
        if model is None:
            s, self.tokens = settings, settings.sentence.split()
            self._check_length()
            made = MultiHeadAttention(s.d_model, s.n_head, s.d_k, s.d_v, position=s.position, rng=s.seed)
            attention: Any = made.astype(np.float64)
            self.x = embed_words(self.tokens, s.d_model, s.seed)
            kind = NORMS[s.norm]
            norm = None if kind is None else kind(s.d_model).astype(np.float64)
        else:
            assert tokenizer is not None
            ids = tokenizer.encode(settings.sentence)
            if settings.whole and any(edit[0] == "X" for edit in settings.edits):
                raise ValueError("X is computed by the earlier layers: edit it where one layer is shown")
            if settings.layer >= len(model.h):
                raise ValueError(f"this model has the layers 1 to {len(model.h)}, got layer {settings.layer + 1}")
            options = model.config
            has_bias = options.position in ("alibi", "relative") or not isinstance(options.position, str)
            if settings.mask != "causal" and (has_bias or options.window or options.score):
                raise ValueError("the mask can only be changed where scores have no bias, window or score option")
            self.tokens = [name_token(tokenizer, i) for i in ids.tolist()]
            self._check_length()
            run = run_model(model, ids)
            part = run.parts[f"h.{settings.layer}.attn"]
            attention, self.x = part.module, part.x.numpy().copy()
        self._weights = find_weights(attention)
        self._replace_weights()
        n_head = getattr(attention, "n_head", 0)
        if any(head > n_head for head in settings.cut):
            raise ValueError(f"cut names heads 1 to {n_head}, got {settings.cut}")
        kept = np.array([[[head + 1 not in settings.cut]] for head in range(n_head)], float) if settings.cut else None
        kind_of = Changed if settings.mask == "causal" else ChangedWithoutCache
        self.attention = kind_of(attention, norm, settings.mask, kept).eval()
        self._shown: tuple[Any, Any] = (self.attention, self.x)
        if model is not None and settings.whole:
            changed = copy.deepcopy(model).eval()
            changed.h[settings.layer].attn = self.attention
            self._tokenizer = tokenizer
            self._shown = changed, ids

    def _check_length(self) -> None:
        if not 1 <= len(self.tokens) <= MOST_TOKENS:
            raise ValueError(f"the lab shows 1 to {MOST_TOKENS} tokens, the sentence has {len(self.tokens)}")

    def _replace_weights(self) -> None:
        copies = {id(tensor): (tensor, tensor.numpy().copy()) for tensor, _ in self._weights.values()}
        parts = {title: copies[id(tensor)][1][:, columns] for title, (tensor, columns) in self._weights.items()}
        for name in self.settings.identity:
            titles = [title for title in parts if title.startswith(f"W_{name[1].upper()}")]
            if not titles:
                raise ValueError(f"this attention has no {name} that could be replaced")
            for title in titles:
                parts[title][:] = np.eye(*parts[title].shape)
        parts["X"] = self.x
        for title, row, column, value in self.settings.edits:
            rows, columns = parts[title].shape if title in parts else (0, 0)
            if not (0 <= row < rows and 0 <= column < columns):
                shapes = ", ".join(f"{name} {part.shape}" for name, part in parts.items())
                raise ValueError(f"{title[:40]}[{row}, {column}] cannot be edited; there are {shapes}")
            parts[title][row, column] = value
        for tensor, array in copies.values():
            tensor.assign_(array)

    def run(self) -> dict[str, Any]:
        """The page, the verdict of `check.dependencies`, and the Python lines, for JSON."""
        start = time.perf_counter()
        module, x = self._shown
        page = walkthrough(module, x, self.tokens, lang=self.settings.lang, tokenizer=self._tokenizer)
        found = dependencies(self.attention, self.x)
        paths = [{"row": i, "sees": j, "path": found.paths.get((i, j), "").split("; line:")[0]} for i, j in found.leaks]
        return {
            "page": page.html,
            "causal": not found.leaks,
            "leaks": paths,
            "python": write_python(self.settings, self.tokens, self._weights, self._is_model),
            "milliseconds": round(1000 * (time.perf_counter() - start), 1),
        }


def find_weights(attention: Any) -> dict[str, tuple[Tensor, slice]]:
    """The weights by the names of the page, W_Q1, ..., W_O: the parameter, and which of its columns."""
    places: dict[str, tuple[Tensor, slice]] = {}
    if isinstance(attention, MultiHeadAttention):
        d_k, d_v = attention.d_k, attention.d_v
        widths = (("Q", attention.wq, d_k), ("K", attention.wk, d_k), ("V", attention.wv, d_v))
        for letter, tensor, width in widths:
            for i in range(tensor.shape[1] // width):
                places[f"W_{letter}{i + 1}"] = tensor, slice(i * width, (i + 1) * width)
        places["W_O"] = attention.wo, slice(None)
    elif hasattr(attention, "c_attn"):
        width, start = attention.d_k, 0
        for letter, n in (("Q", attention.n_head), ("K", attention.n_kv_head), ("V", attention.n_kv_head)):
            for i in range(n):
                places[f"W_{letter}{i + 1}"] = attention.c_attn.weight, slice(start, start + width)
                start += width
        places["W_O"] = attention.c_proj.weight, slice(None)
    return places


def write_python(s: Settings, tokens: list[str], weights: dict[str, tuple[Tensor, slice]], is_model: bool) -> str:
    """The lines of Python that compute the same Y; a model is opened from the folder MODEL."""
    lines = ["import numpy as np", "import tinygrad_mha as tg"]
    if is_model:
        lines = ["from pathlib import Path", "from tinygrad_mha.cli import open_model"]
        lines += ["from tinygrad_mha.laboratory import Experiment, Settings", "", f"settings = {asdict(s)!r}"]
        lines += ['experiment = Experiment(Settings(**settings), *open_model(Path("MODEL")))']
        return "\n".join([*lines, "y = experiment.attention(experiment.x)"])
    lines += ["from tinygrad_mha.demo import embed_words", ""]
    lines += [f"x = embed_words({tokens!r}, {s.d_model}, {s.seed})"]
    sizes = f"{s.d_model}, {s.n_head}, {s.d_k}, {s.d_v}, position={s.position!r}, rng={s.seed}"
    lines += [f"mha = tg.nn.MultiHeadAttention({sizes}).astype(np.float64)"]
    changes: dict[str, list[str]] = {}
    for name in s.identity:
        for c in (columns for title, (_, columns) in weights.items() if title.startswith(f"W_{name[1].upper()}")):
            part = "[:]" if c.start is None else f"[:, {c.start}:{c.stop}]"
            changes.setdefault(name, []).append(f"{name}{part} = np.eye(*{name}{part}.shape)")
    for title, row, column, value in s.edits:
        if title == "X":
            lines += [f"x[{row}, {column}] = {value!r}"]
            continue
        name = "w" + title[2].lower()
        changes.setdefault(name, []).append(f"{name}[{row}, {column + (weights[title][1].start or 0)}] = {value!r}")
    for name, assignments in changes.items():
        lines += [f"{name} = mha.{name}.numpy().copy()", *assignments, f"mha.{name}.assign_({name})"]
    given, mask = "x", "causal=True"
    if s.norm != "none":
        lines += [f"norm = tg.nn.{NORMS[s.norm].__name__}({s.d_model}).astype(np.float64)"]  # type: ignore[union-attr]
        given = "norm(x)"
    if s.mask != "causal":
        mask = "allow=np.tri(len(x), k=1, dtype=bool)" if s.mask == "broken" else "allow=None"
    edit = ", edit=cut" if s.cut else ""
    if s.cut:
        kept = [float(head + 1 not in s.cut) for head in range(s.n_head)]
        lines += ["", f"kept = np.array({kept}).reshape(-1, 1, 1)", "", "def cut(name, tensor):"]
        lines += ['    return tensor * kept if name == "heads" else tensor', ""]
    return "\n".join([*lines, f"y = mha({given}, {mask}{edit})"])


class LabServer(ThreadingHTTPServer):
    """Serves the lab on 127.0.0.1. `run` returns when its page was closed.

    Attributes:
        address: the address with the token.
    """

    daemon_threads = True
    timeout = 0.2  # between looks at the clock

    def __init__(self, port: int = 0, model: Any = None, tokenizer: Any = None, lang: str = "en") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.tokenizer, self.lang = model, tokenizer, lang
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.token = secrets.token_urlsafe(24)
        self.address = f"http://{self.host}/{self.token}/"
        self.deadline = float("inf")  # until a page has opened
        self.computing = threading.Lock()
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)

    def run(self) -> None:
        """Serve until the page is closed; then the port is free."""
        try:
            while time.monotonic() < self.deadline:
                self.handle_request()
        finally:
            self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless too many are running."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def write_page(self) -> str:
        """The page of the lab, without results."""
        heads, layers = (0, 0) if self.model is None else (self.model.config.n_head, len(self.model.h))
        facts = {"model": self.model is not None, "n_head": heads, "layers": layers}
        choices = {"mask": MASKS, "norm": list(NORMS), "position": POSITIONS}
        data = {"settings": asdict(Settings(lang=self.lang)), "choices": choices, "facts": facts, "tokens": []}
        words = write_json(json.loads(read_page_file("lab_words.json")))
        parts = read_parts("lab") | {"WORDS": words, "DATA": write_json(data)}
        return fill_page("lab.html", parts, [read_parts("page"), read_parts("model")], connect="'self'")


class Handler(BaseHTTPRequestHandler):
    """Answers requests that name this server, carry its token, and come from its own page."""

    server: LabServer
    timeout = SECONDS
    server_version = "lab"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """The page."""
        if self._is_allowed() and self.path.endswith("/"):
            self.server.deadline = time.monotonic() + SILENCE
            self._answer(200, "text/html; charset=utf-8", self.server.write_page())
        else:
            self._answer(403, "text/plain", "the address must be the one that the lab has printed, with its token")

    def do_POST(self) -> None:
        """compute: settings to results. alive, bye: signs of life of the page."""
        name, origin = self.path.rpartition("/")[2], self.headers.get("Origin")
        if not self._is_allowed() or origin != f"http://{self.server.host}" or name not in ("compute", "alive", "bye"):
            self._answer(403, "text/plain", "only the page of the lab may ask this")
            return
        self.server.deadline = time.monotonic() + (GRACE if name == "bye" else SILENCE)
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,6}", length) or int(length) > MOST_BYTES:
            self._answer(413, "application/json", json.dumps({"error": f"a request has at most {MOST_BYTES} bytes"}))
            return
        body = self.rfile.read(int(length))
        if name != "compute":
            self._answer(200, "application/json", "{}")
            return
        try:
            settings = Settings.from_json(json.loads(body))
            with self.server.computing:
                result = Experiment(settings, self.server.model, self.server.tokenizer).run()
            self._answer(200, "application/json", json.dumps(result))
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            self._answer(400, "application/json", json.dumps({"error": str(error)}))

    def _is_allowed(self) -> bool:
        """Whether the request names this server and has its token."""
        parts = self.path.split("/")
        is_ours = len(parts) == 3 and secrets.compare_digest(parts[1].encode(), self.server.token.encode())
        return is_ours and self.headers.get_all("Host") == [self.server.host]

    def _answer(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        for header in (headers | {"Connection": "close"}).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(content)
