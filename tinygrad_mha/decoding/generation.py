"""Text from a model: how one token is drawn from logits, and the loop that asks for one token after another.

The cached loop reads every token once and keeps its keys and values; with `use_cache=False` every step reads all of it
again, which is the oracle of the cached one. Prompts of different lengths are padded on the left, so that their last
tokens stand side by side; padding is hidden from every query, and positions count from each row's own first token.

Axes: B rows (prompts), T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_ids, is_integer, is_number
from tinygrad_mha.data import StreamDecoder, Tokenizer
from tinygrad_mha.modes import no_grad
from tinygrad_mha.nn import GPT, GPTConfig, KVCache, Module
from tinygrad_mha.tensors import Tensor, plain

# --------------------------------------------------------------------------------------------------------------------
# Sampling. Each of these takes an array of logits, (..., V), and looks along its last axis.


def with_temperature(logits: np.ndarray, temperature: float) -> np.ndarray:
    """logits / temperature less a constant, which no softmax sees; float64, the largest is 0.

    The largest is subtracted first, so a tiny temperature sends the others to -inf and never the largest to inf.
    """
    logits = np.asarray(logits, np.float64)
    with np.errstate(over="ignore"):
        return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def top_k_only(logits: np.ndarray, k: int) -> np.ndarray:
    """The `k` largest, -inf elsewhere; all of them if there are no more than k. Of equals the first ones are kept."""
    if k >= logits.shape[-1]:
        return logits
    kth = -np.partition(-logits, k - 1, axis=-1)[..., k - 1 : k]
    above, equal = logits > kth, logits == kth
    room = k - above.sum(axis=-1, keepdims=True)
    return np.where(above | (equal & (equal.cumsum(axis=-1) <= room)), logits, -np.inf)


def top_p_only(logits: np.ndarray, p: float) -> np.ndarray:
    """The fewest, likeliest first, whose probabilities sum to `p` or more, -inf elsewhere (arXiv:1904.09751).

    The one that crosses p is kept, and so is the first. Of equals the first ones are kept.
    """
    if p >= 1:
        return logits  # a sum of rounded probabilities may reach 1 before the last of them
    order = np.argsort(-logits, axis=-1, kind="stable")
    sorted_p = ops.softmax(np.take_along_axis(logits, order, axis=-1))
    before = sorted_p.cumsum(axis=-1) - sorted_p
    keep_sorted = before < p - ROUNDING
    keep_sorted[..., 0] = True
    keep = np.empty_like(keep_sorted)
    np.put_along_axis(keep, order, keep_sorted, axis=-1)
    return np.where(keep, logits, -np.inf)


ROUNDING = 1e-6  # of probabilities from float32 logits: a sum that is p but for rounding should reach p


def probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> np.ndarray:
    """What `generate` draws from: temperature, then top-k, then top-p of what that left. (..., V), float64.

    Example:
        >>> probabilities(np.log([0.5, 0.41, 0.09]), top_p=0.9).round(4)
        array([0.5495, 0.4505, 0.    ])
    """
    check_sampling(temperature, top_k, top_p)
    logits = np.asarray(logits)
    if temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    logits = with_temperature(logits, temperature)
    if top_k is not None:
        logits = top_k_only(logits, top_k)
    if top_p is not None:
        logits = top_p_only(logits, top_p)
    return ops.softmax(logits)


def draw(p: np.ndarray, rng: np.random.Generator) -> int:
    """An index with the probabilities `p`, (V,): the first at which their sum exceeds a random share of the total.

    The share is below the total after rounding too, so there is one, and what has probability 0 is never drawn.
    """
    sums = p.cumsum()
    return int(sums.searchsorted(rng.random() * sums[-1], side="right"))


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number, 0 (the likeliest token) or more, got {temperature!r}")
    if top_k is not None and not (is_integer(top_k) and top_k >= 1):
        raise ValueError(f"top_k must be an integer of 1 or more, or None to keep all, got {top_k!r}")
    if top_p is not None and not (is_number(top_p) and 0 <= top_p <= 1):
        raise ValueError(f"top_p must be a number from 0 to 1, or None to keep all, got {top_p!r}")


# --------------------------------------------------------------------------------------------------------------------
# What is called


def generate(
    model: GPT,
    idx: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Any = None,
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    on_full: str = "error",
    logprobs: bool = False,
    beam: int = 1,
) -> Any:
    """Continue prompts, token by token: ids with the prompt in front.

    Args:
        model: a GPT. It runs in eval mode and without gradients; both are as before between tokens and at the end.
        idx: token ids: one prompt (T,), a batch (B, T), or a list of prompts of different lengths. Greedily, each row
            gives what its prompt gives alone.
        max_new_tokens: how many tokens each row gets, unless it stops before.
        temperature: what logits are divided by; 0 takes the likeliest token (of equals the first).
        top_k: draw from the k likeliest only.
        top_p: draw from the fewest tokens, likeliest first, that hold this much of the probability left by top_k.
        stop: a token id, a string, or a list of these. A row ends with the token that completes one; what stands in
            the prompt stops nothing. Strings are looked for in the new text, which takes the tokenizer.
        tokenizer: what strings to stop at are written with.
        seed: the same seed (0 is one), the same tokens; None is different every time. Each row draws from a generator
            of its own, so rows behind it do not matter to it. NumPy's global generator is neither used nor disturbed.
        use_cache: whether keys and values are kept. Without, every step reads everything again: slow, and the oracle.
        on_full: what happens where prompt and new tokens are more than block_size + 1 (the last token is never read).
            "error": a ValueError, before anything is computed. "slide": a `ContextFullWarning`, and from there on each
            token costs a whole context: positions have moved, so the cache is dropped and the last block_size tokens
            are read anew.
        logprobs: also return the logarithms of the probabilities that the model gave to the tokens it wrote, before
            temperature, top_k and top_p.
        beam: with more than 1, a beam search instead of drawing: at each step so many of the likeliest texts go on, or
            are set aside if they stop; in the end the one with the largest mean log-probability per new token wins. A
            beam as wide as all possible texts is an exhaustive search. Takes no temperature, top_k and top_p.

    Returns:
        ids, int64: (B, T + n), or a list of B arrays where rows differ in length. With `logprobs` a pair of that and
        of an array (B, n), or a list, of floats.

    Raises:
        ValueError: an empty prompt, a full context, or an option out of its range.
        TypeError: ids that are not integers.
        IndexError: ids that are not in the vocabulary.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=6), seed=0)
        >>> generate(model, [1, 2, 3], 4, temperature=0).shape
        (1, 7)
        >>> [len(row) for row in generate(model, [[1, 2, 3], [5]], 4, seed=0)]
        [7, 5]
    """
    task = Task(model, idx, max_new_tokens, stop, tokenizer, use_cache, on_full)
    sampler = Sampler(temperature, top_k, top_p, seed, len(task.prompts))
    if not is_integer(beam) or beam < 1:
        raise ValueError(f"beam must be an integer of 1 or more, got {beam!r}")
    if beam > 1 and not (temperature in (0, 1) and top_k is None and top_p is None):
        raise ValueError("a beam search draws nothing: leave out temperature, top_k and top_p, or beam")
    written = [task.beam_search(prompt, beam) for prompt in task.prompts] if beam > 1 else task.drawn(sampler, logprobs)
    ids = packed([np.array([*prompt, *new], np.int64) for prompt, (new, _) in zip(task.prompts, written, strict=True)])
    return (ids, packed([np.array(logs, float) for _, logs in written])) if logprobs else ids


def stream(
    model: GPT,
    idx: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Any = None,
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    on_full: str = "error",
) -> Iterator[Any]:
    """The tokens of `generate` as they come, without the prompt. Arguments and errors are those of `generate`.

    Yields:
        One thing per token: its id or, with a tokenizer, the text that it completes, which may be empty: a character
        is given out when it is whole, and one that stays incomplete at the end as U+FFFD.

        For one prompt (T,) that is an int, or a str. For several, an array (B,) in which rows that have stopped are
        -1, or a list of B strings.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=2, block_size=8, n_layer=1, n_head=2, n_embd=6), seed=0)
        >>> text = "".join(stream(model, [1], 5, seed=0, tokenizer=tg.data.CharTokenizer("ab")))
        >>> len(text), set(text) <= set("ab")
        (5, True)
    """
    task = Task(model, idx, max_new_tokens, stop, tokenizer, use_cache, on_full)
    steps = task.steps(Sampler(temperature, top_k, top_p, seed, len(task.prompts)))
    if is_single(idx):
        return (step.tokens[0] if tokenizer is None else step.pieces[0] for step in steps)
    return columns(steps, len(task.prompts)) if tokenizer is None else texts(steps, len(task.prompts))


def columns(steps: Iterator[Step], n: int) -> Iterator[np.ndarray]:
    for step in steps:
        column = np.full(n, -1)
        column[step.rows] = step.tokens
        yield column


def texts(steps: Iterator[Step], n: int) -> Iterator[list[str]]:
    for step in steps:
        pieces = [""] * n
        for row, piece in zip(step.rows, step.pieces, strict=True):
            pieces[row] = piece
        yield pieces


def packed(rows: list[np.ndarray]) -> Any:
    """Rows as one array if they are equally long, else as they are."""
    return np.stack(rows) if len({len(row) for row in rows}) == 1 else rows


class ContextFullWarning(UserWarning):
    """The context will be full: old tokens fall out of it, and every new one costs a whole context."""


# --------------------------------------------------------------------------------------------------------------------
# The loop


class Step(NamedTuple):
    """One token for every row that has not stopped."""

    rows: np.ndarray  # which rows these are, indices (R,)
    tokens: list[int]  # R ids
    logits: np.ndarray  # (R, V): what they were drawn from
    pieces: list[str]  # the text that they complete; "" without a tokenizer


class Sampler:
    """Draws tokens, each row with a generator of its own."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, n_rows: int
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generators = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(n_rows)]

    def choose(self, logits: np.ndarray, rows: np.ndarray) -> list[int]:
        """A token for each of the rows `rows`, whose logits are (R, V)."""
        if self.temperature == 0:
            return [int(token) for token in logits.argmax(axis=-1)]
        p = probabilities(logits, self.temperature, self.top_k, self.top_p)
        return [draw(p[i], self.generators[row]) for i, row in enumerate(rows)]


class Task:
    """What was asked for: everything is checked when it is made, and nothing computed."""

    def __init__(
        self,
        model: GPT,
        idx: Any,
        max_new_tokens: int,
        stop: Any,
        tokenizer: Tokenizer | None,
        use_cache: bool,
        on_full: str,
    ) -> None:
        self.model = model
        self.modules = [module for _, module in model.named_modules()]
        self.prompts = as_prompts(idx, model.config.vocab_size)
        if not is_integer(max_new_tokens) or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer, 0 or more, got {max_new_tokens!r}")
        self.max_new_tokens = int(max_new_tokens)
        self.stop_ids, self.stop_strings = as_stops(stop, tokenizer, model.config.vocab_size)
        self.tokenizer = tokenizer
        self.use_cache = use_cache
        check_context(max(map(len, self.prompts)), self.max_new_tokens, model.config.block_size, on_full)

    def new_cache(self) -> KVCache | None:
        return KVCache(self.model.config.n_layer) if self.use_cache else None

    def writer(self, prompt: np.ndarray) -> Writer:
        return Writer(prompt, self.max_new_tokens, self.stop_ids, self.stop_strings, self.tokenizer)

    def steps(self, sampler: Sampler) -> Iterator[Step]:
        """The loop: read what is new, draw a token for each row, go on with the rows that have not stopped."""
        longest = max(map(len, self.prompts))
        pads = np.array([longest - len(prompt) for prompt in self.prompts])
        ids = np.zeros((len(pads), longest + self.max_new_tokens), np.int64)
        for row, prompt in enumerate(self.prompts):
            ids[row, pads[row] : longest] = prompt
        writers = [self.writer(prompt) for prompt in self.prompts]
        rows = np.arange(len(pads))  # those that have not stopped
        cache = self.new_cache()
        for length in range(longest, longest + self.max_new_tokens):
            logits = self.last_logits(ids[rows, :length], pads[rows], cache)
            tokens = sampler.choose(logits, rows)
            ids[rows, length] = tokens
            pieces = [writers[row].write(token) for row, token in zip(rows, tokens, strict=True)]
            yield Step(rows, tokens, logits, pieces)
            running = np.flatnonzero([not writers[row].done for row in rows])
            if len(running) == 0:
                return
            if len(running) < len(rows):
                rows = rows[running]
                cache = None if cache is None else cache.select(running)

    def last_logits(self, ids: np.ndarray, pads: np.ndarray, cache: KVCache | None) -> np.ndarray:
        """The logits behind the last of the tokens `ids`, (R, T) -> (R, V), reading only those that no cache holds.

        The first `pads[i]` ids of row i are padding. Of more than block_size tokens the last ones are read.
        """
        length = ids.shape[1]
        first = max(0, length - self.model.config.block_size)
        if first:
            cache = None  # every token has another position now
        start = first if cache is None else cache.length
        begin = np.maximum(pads, first)  # each row's first token that is seen, at position 0
        options: dict[str, Any] = {}
        if (begin > first).any():
            options["positions"] = np.maximum(np.arange(start, length) - begin[:, None], 0)
            options["key_allow"] = np.arange(first, length) >= begin[:, None]
        with inference(self.modules):
            logits = self.model(ids[:, start:], cache=cache, last_only=True, **options).numpy()[:, -1]
        if not np.isfinite(logits.max(axis=-1)).all():
            raise ValueError("the logits are nan or infinite, so no token can be chosen: has the training diverged?")
        return logits

    def drawn(self, sampler: Sampler, logprobs: bool) -> list[Written]:
        written: list[Written] = [([], []) for _ in self.prompts]
        for step in self.steps(sampler):
            log = ops.log_softmax(step.logits) if logprobs else step.logits
            for i, row in enumerate(step.rows):
                tokens, logs = written[row]
                tokens.append(step.tokens[i])
                logs.append(log[i, step.tokens[i]])
        return written

    def beam_search(self, prompt: np.ndarray, width: int) -> Written:
        """Of each step the `width` likeliest texts, one row of a batch for each, which share the prompt's cache."""
        running: list[Written] = [([], [])]
        ended: list[Written] = []
        cache = self.new_cache()
        for _ in range(self.max_new_tokens):
            ids = np.array([[*prompt, *tokens] for tokens, _ in running])
            log = ops.log_softmax(self.last_logits(ids, np.zeros(len(ids), np.int64), cache).astype(np.float64))
            totals = log + np.array([sum(logs) for _, logs in running])[:, None]
            best = np.argsort(-totals, axis=None, kind="stable")[:width]
            parents, texts = [], []
            for parent, token in zip(*np.unravel_index(best, totals.shape), strict=True):
                tokens, logs = running[parent]
                text = [*tokens, int(token)], [*logs, float(log[parent, token])]
                if self.ends(prompt, text[0]):
                    ended.append(text)
                else:
                    parents.append(parent)
                    texts.append(text)
            if not texts:
                break
            running = texts
            cache = None if cache is None else cache.select(parents)
        return max(ended, key=lambda text: sum(text[1]) / len(text[1]), default=running[0])

    def ends(self, prompt: np.ndarray, tokens: list[int]) -> bool:
        writer = self.writer(prompt)
        for token in tokens:
            writer.write(token)
        return writer.done


Written = tuple[list[int], list[float]]  # new tokens, and the logarithms of their probabilities


@contextmanager
def inference(modules: Sequence[Module]) -> Iterator[None]:
    """Eval mode and no gradients, and afterwards everything as it was."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Writer:
    """What one row writes, and when it is done."""

    def __init__(
        self, prompt: np.ndarray, limit: int, ids: set[int], strings: list[str], tokenizer: Tokenizer | None
    ) -> None:
        self.left = limit
        self.ids, self.strings = ids, strings
        self.done = False
        self.tail = ""  # of the new text: as much as may be the beginning of a string to stop at
        self.decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        if self.decoder is not None:
            for token in prompt:  # it may end inside of a character
                self.decoder.push(int(token))

    def write(self, token: int) -> str:
        """Take a token in; returns the text that it completes."""
        self.left -= 1
        piece = "" if self.decoder is None else self.decoder.push(token)
        text = self.tail + piece
        self.done = self.left == 0 or token in self.ids or any(string in text for string in self.strings)
        self.tail = text[-max(map(len, self.strings), default=1) :]
        return piece + self.decoder.flush() if self.done and self.decoder is not None else piece


# --------------------------------------------------------------------------------------------------------------------
# What is given


def is_single(idx: Any) -> bool:
    """Whether `idx` is one prompt, rather than several."""
    idx = plain(idx)
    return idx.ndim == 1 if isinstance(idx, np.ndarray) else not any(isinstance(row, ROWS) for row in idx)


ROWS = (list, tuple, np.ndarray, Tensor)


def as_prompts(idx: Any, vocab_size: int) -> list[np.ndarray]:
    """One row of ids (T,), a batch (B, T) or a list of rows, as a list of rows."""
    idx = plain(idx)
    expected = "idx must be token ids: (T,), (B, T), or a list of rows of different lengths"
    if not isinstance(idx, ROWS):
        raise TypeError(f"{expected}; got {'text, encode it first' if isinstance(idx, str) else type(idx).__name__}")
    if isinstance(idx, np.ndarray) and (idx.ndim not in (1, 2) or (idx.ndim == 2 and len(idx) == 0)):
        raise ValueError(f"{expected}; got shape {idx.shape}")
    prompts = [as_ids(row, "idx") for row in ([idx] if is_single(idx) else idx)]
    for i, prompt in enumerate(prompts):
        if prompt.ndim != 1:
            raise ValueError(f"{expected}; got a row {i} of shape {prompt.shape}")
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {i} is empty, and a model continues at least one token: begin with a start token, "
                f"such as a line feed or <|endoftext|>"
            )
        check_ids(prompt, vocab_size, "idx" if len(prompts) == 1 else f"idx[{i}]")
    return prompts


def as_stops(stop: Any, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[set[int], list[str]]:
    """What to stop at, as ids and strings."""
    stops = [] if stop is None else [stop] if isinstance(stop, str) or np.ndim(stop) == 0 else list(stop)
    ids, strings = set(), []
    for one in stops:
        if isinstance(one, str):
            if not one:
                raise ValueError("stop must not hold an empty string, which is everywhere")
            if tokenizer is None:
                raise ValueError(f"stop={one!r} is text, so a tokenizer must be given, tokenizer=...; or give its id")
            tokenizer.encode(one)  # raises if it can never be written
            strings.append(one)
        elif is_integer(one):
            if not 0 <= one < vocab_size:
                raise ValueError(f"stop holds the id {one}, which is not in the vocabulary, 0 to {vocab_size - 1}")
            ids.add(int(one))
        else:
            raise TypeError(f"stop must be a token id, a string, or a list of these, got {one!r}")
    return ids, strings


def check_context(prompt: int, new: int, block_size: int, on_full: str) -> None:
    """The last new token is not read, so prompt and new tokens may be one more than the context holds."""
    if on_full not in ("error", "slide"):
        raise ValueError(f'on_full must be "error" or "slide", got {on_full!r}')
    if new == 0 or prompt + new <= block_size + 1:
        return
    what = f"a prompt of {prompt} and {new} new tokens are more than the context holds: block_size is {block_size}"
    if on_full == "error":
        raise ValueError(f'{what}, and the last token needs no place; shorten one, or pass on_full="slide"')
    warnings.warn(
        f"{what}; when it is full, each new token reads the last {block_size} anew and knows of none before them",
        ContextFullWarning,
        stacklevel=4,  # whoever called generate or stream
    )


# --------------------------------------------------------------------------------------------------------------------
# What it costs


def multiply_adds(config: GPTConfig, prompt: int, new: int, cached: bool = True) -> int:
    """How many numbers are multiplied and added in the matrix products that generate `new` tokens after `prompt`.

    Counted is what the program does for one row: full rectangles of scores (it masks half of a square, but computes
    it), the head for the last token only, and beyond block_size a whole context for every token.

    Example:
        >>> config = tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=6)
        >>> multiply_adds(config, 4, 3, cached=True), multiply_adds(config, 4, 3, cached=False)
        (3114, 7602)
    """
    width = config.n_embd
    keys = width // config.n_head * (config.n_kv_head or config.n_head)
    inner = config.n_inner or 4 * width
    per_token = width * (width + 2 * keys) + width * width + 2 * width * inner  # c_attn, c_proj, mlp
    total = 0
    for length in range(prompt, prompt + new):
        n_k = min(length, config.block_size)
        n_q = 1 if cached and prompt < length <= config.block_size else n_k
        total += config.n_layer * n_q * (per_token + 2 * n_k * width)  # q k^T, and the weights times v
        total += width * config.vocab_size
    return total
