"""Text from a language model: `generate` and `stream`, the checks of their arguments, and the loop that both run.

With a cache, the model processes every token once and keeps its keys and values. With `use_cache=False` every step
processes all tokens again; the tests compare the two. Prompts of different lengths are padded on the left, so that
their last tokens are aligned. No query attends to padding, and positions count from the first token of each row.

Axes: B rows (prompts), R rows that are still running, T tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np

from tinygrad_mha import ops
from tinygrad_mha.arguments import as_ids, check_choice, check_count, check_ids, check_number
from tinygrad_mha.data import Tokenizer
from tinygrad_mha.decoding.beam import Hypothesis, beam_search
from tinygrad_mha.decoding.language_model import Cache, LanguageModel, make_cache
from tinygrad_mha.decoding.sampling import Sampler, check_logits, compute_log_probabilities
from tinygrad_mha.decoding.stops import TextWriter, parse_end_ids, parse_stops
from tinygrad_mha.engine import WriteTime
from tinygrad_mha.modes import STATE, no_grad
from tinygrad_mha.tensors import Tensor, plain

__all__ = ["ContextFullWarning", "Options", "generate", "stream"]

Rows = np.ndarray | list[np.ndarray]  # (B, n), or B arrays (n,) if their lengths differ


class ContextFullWarning(UserWarning):
    """The text gets longer than the context: old tokens are dropped, and each new token needs a full forward pass."""


class Options(TypedDict, total=False):
    """The keyword arguments that `generate` and `stream` share; see `generate`."""

    top_k: int | None
    top_p: float | None
    stop: Any
    eos: Any
    tokenizer: Tokenizer | None
    seed: int | None
    use_cache: bool
    on_full: str


@overload
def generate(
    model: LanguageModel,
    idx: Any,
    max_new_tokens: int,
    temperature: float = ...,
    *,
    logprobs: Literal[False] = ...,
    beam: int = ...,
    length_penalty: float = ...,
    **options: Unpack[Options],
) -> Rows: ...


@overload
def generate(
    model: LanguageModel,
    idx: Any,
    max_new_tokens: int,
    temperature: float = ...,
    *,
    logprobs: Literal[True],
    beam: int = ...,
    length_penalty: float = ...,
    **options: Unpack[Options],
) -> tuple[Rows, Rows]: ...


def generate(
    model: LanguageModel,
    idx: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Any = None,
    eos: Any = "model",
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    on_full: str = "error",
    logprobs: bool = False,
    beam: int = 1,
    length_penalty: float = 0.0,
) -> Any:
    """Continue prompts token by token.

    Args:
        model: a `GPT`, or another `LanguageModel`. It runs in eval mode and without gradients.
        idx: token ids: one prompt (T,), a batch (B, T), or a list of prompts of different lengths. With temperature 0
            each row of a batch equals the result of its prompt alone.
        max_new_tokens: the number of new tokens of each row, unless it stops earlier.
        temperature: divides the logits; 0 takes the most probable token (at a tie, the one with the lowest id).
        top_k: draw from the k most probable tokens only.
        top_p: draw from the fewest most probable tokens whose probabilities, after top_k, sum to top_p.
        stop: a token id, a string, or a list of these. A row ends with the token that completes one of them. Only the
            new text is searched. Strings need a tokenizer.
        eos: the end-of-text ids, in addition to `stop`: "model" for `model.end_ids` (from the config of a Hugging Face
            folder), a token id, a list of them, or None. A row ends with such a token, which is included.
        tokenizer: decodes the new tokens to look for strings.
        seed: the same seed gives the same tokens; None draws different ones every time. Each row draws from its own
            generator, so adding rows at the end does not change the others. NumPy's global generator is not used.
        use_cache: whether keys and values are kept. Otherwise every step processes all tokens again.
        on_full: what to do if prompt and new tokens exceed block_size + 1 (the last token is never an input). "error"
            raises a ValueError before anything is computed. "slide" gives a `ContextFullWarning`. Once the context is
            full, every new token shifts all positions, so the cache is of no use: each step processes the last
            block_size tokens again.
        logprobs: also return the log-probability of each new token under the model, before temperature, top_k, top_p.
        beam: the beam width. If it is more than 1, the result is the best sequence of `decoding.beam_search`, and
            temperature, top_k and top_p cannot be used.
        length_penalty: of the beam search; 0 or more.

    Returns:
        The ids with the prompt in front, int64: an array (B, T + n), or a list of B arrays if their lengths differ.
        With `logprobs` a pair: the ids and the log-probabilities (B, n), or a list of arrays (n,).

    Raises:
        ValueError: an empty prompt, a full context, an option out of its range, or logits that are nan or infinite.
        TypeError: ids that are not integers.
        IndexError: ids outside the vocabulary.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=6), seed=0)
        >>> generate(model, [1, 2, 3], 4, temperature=0).shape
        (1, 7)
        >>> [len(row) for row in generate(model, [[1, 2, 3], [5]], 4, seed=0)]
        [7, 5]
    """
    request = Request(
        model, idx, max_new_tokens, temperature, top_k, top_p, stop, eos, tokenizer, seed, use_cache, on_full
    )
    check_number(length_penalty, "length_penalty")
    # 1 is the default temperature; 0 means "no sampling", which is true of a beam search.
    if check_count(beam, "beam") > 1 and not (temperature in (0, 1) and top_k is None and top_p is None):
        raise ValueError(
            f"a beam search draws nothing at random, so it takes no temperature={temperature}, top_k={top_k}, "
            f"top_p={top_p}: leave them out, or pass beam=1 instead of {beam}"
        )
    with model.evaluating(), no_grad():
        new, logs = request.search(beam, length_penalty) if beam > 1 else request.sample(logprobs)
    ids = stack_rows([np.concatenate(pair) for pair in zip(request.prompts, new, strict=True)])
    return (ids, stack_rows(logs)) if logprobs else ids


def stream(
    model: LanguageModel, idx: Any, max_new_tokens: int, temperature: float = 1.0, **options: Unpack[Options]
) -> Iterator[Any]:
    """Continue prompts and yield every token when it is known, without the prompt.

    Args:
        model, idx, max_new_tokens, temperature: see `generate`.
        options: `top_k`, `top_p`, `stop`, `eos`, `tokenizer`, `seed`, `use_cache`, `on_full` of `generate`.

    Yields:
        One value per token. For one prompt (T,): its id (int) or, with a tokenizer, the text (str) that it completes.
        The text is empty while a character is incomplete; one that stays incomplete is U+FFFD at the end. For several
        prompts: an array (B,) with -1 for rows that have stopped, or a list of B strings.

    Raises:
        ValueError, TypeError, IndexError: as `generate`, at the call.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=2, block_size=8, n_layer=1, n_head=2, n_embd=6), seed=0)
        >>> text = "".join(stream(model, [1], 5, seed=0, tokenizer=tg.data.CharTokenizer("ab")))
        >>> len(text), set(text) <= set("ab")
        (5, True)
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"stream() has no option {', '.join(map(repr, sorted(unknown)))}; its options are {known}")
    request = Request(model, idx, max_new_tokens, temperature, **options)
    return request.stream(is_single(idx))


# --------------------------------------------------------------------------------------------------------------------
# The loop


class Step(NamedTuple):
    """One token for every row that is still running."""

    rows: np.ndarray  # the indices of these rows, (R,)
    tokens: list[int]  # (R,)
    logits: np.ndarray  # (R, V), from which the tokens were drawn
    pieces: list[str]  # the text that each token completes; "" without a tokenizer


class Request:
    """A validated request. The constructor checks all arguments and runs no model; see `generate`."""

    def __init__(
        self,
        model: LanguageModel,
        idx: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Any = None,
        eos: Any = "model",
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        use_cache: bool = True,
        on_full: str = "error",
    ) -> None:
        vocab_size, self.block_size = model.config.vocab_size, model.config.block_size
        self.model, self.tokenizer, self.use_cache = model, tokenizer, use_cache
        self.prompts = as_prompts(idx, vocab_size)
        self.max_new_tokens = check_count(max_new_tokens, "max_new_tokens", least=0)
        stops = parse_stops(stop, tokenizer, vocab_size)
        self.stops = stops._replace(ids=stops.ids | parse_end_ids(eos, model, vocab_size))
        self.sampler = Sampler(temperature, top_k, top_p, seed, len(self.prompts))
        self._copy: LanguageModel | None = None  # see `_fast_model`
        self._copied_at = 0
        check_context(max(map(len, self.prompts)), self.max_new_tokens, self.block_size, on_full)

    def steps(self) -> Iterator[Step]:
        """The loop: read the new tokens, draw one token per row, continue with the rows that have not stopped."""
        longest = max(map(len, self.prompts))
        pads = [longest - len(prompt) for prompt in self.prompts]
        ids = np.zeros((len(pads), longest + self.max_new_tokens), np.int64)
        for row, prompt in enumerate(self.prompts):
            ids[row, pads[row] : longest] = prompt
        writers = [self._writer(prompt) for prompt in self.prompts]
        rows = np.arange(len(pads))  # those that are still running
        cache = self._new_cache()
        for length in range(longest, longest + self.max_new_tokens):
            logits = check_logits(self._compute_logits(ids[:, :length], pads, cache))
            tokens = self.sampler.choose(logits, rows)
            ids[:, length] = tokens
            pieces = [writers[row].write(token) for row, token in zip(rows, tokens, strict=True)]
            yield Step(rows, tokens, logits, pieces)
            running = [i for i, row in enumerate(rows) if not writers[row].done]
            if not running:
                return
            if len(running) < len(rows):
                rows, ids, pads = rows[running], ids[running], [pads[i] for i in running]
                cache = None if cache is None else cache.select(running)

    def sample(self, logprobs: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The new tokens of every row, and their log-probabilities (empty arrays unless `logprobs`)."""
        new: list[list[int]] = [[] for _ in self.prompts]
        log_probabilities: list[list[float]] = [[] for _ in self.prompts]
        for step in self.steps():
            for row, token in zip(step.rows, step.tokens, strict=True):
                new[row].append(token)
            if logprobs:
                table = ops.log_softmax(step.logits)  # (R, V)
                for i, (row, token) in enumerate(zip(step.rows, step.tokens, strict=True)):
                    log_probabilities[row].append(table[i, token])
        return [np.array(row, np.int64) for row in new], [np.array(row, float) for row in log_probabilities]

    def stream(self, single: bool) -> Iterator[Any]:
        """Yield what the function `stream` yields.

        Eval mode and no_grad are entered for each step and left before the yield, so the caller never sees them.
        """
        steps, eval_mode = self.steps(), self.model.evaluating()
        while True:
            with eval_mode, no_grad():
                step = next(steps, None)
            if step is None:
                return
            is_text = self.tokenizer is not None
            values: list[Any] = ["" if is_text else -1] * len(self.prompts)  # these for rows that have stopped
            for row, value in zip(step.rows, step.pieces if is_text else step.tokens, strict=True):
                values[row] = value
            if single:
                yield values[0]
            else:
                yield values if is_text else np.array(values)

    def search(self, beam: int, length_penalty: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The best new tokens of every row by beam search, and their log-probabilities."""
        if self.max_new_tokens == 0:
            return [np.array([], np.int64)] * len(self.prompts), [np.array([])] * len(self.prompts)
        found = [self._search_one(prompt, beam, length_penalty) for prompt in self.prompts]
        return [best.tokens for best in found], [best.log_probabilities for best in found]

    def _search_one(self, prompt: np.ndarray, beam: int, length_penalty: float) -> Hypothesis:
        cache = self._new_cache()

        def step(prefixes: np.ndarray, parents: np.ndarray) -> np.ndarray:
            nonlocal cache
            cache = None if cache is None else cache.select(parents)
            return compute_log_probabilities(self._compute_logits(prefixes, [0] * len(prefixes), cache))

        def ends(tokens: np.ndarray) -> bool:
            writer = self._writer(prompt)
            for token in tokens:
                writer.write(int(token))
            return writer.done

        return beam_search(step, prompt, ends, beam, self.max_new_tokens, length_penalty).best

    def _compute_logits(self, ids: np.ndarray, pads: list[int], cache: Cache | None) -> np.ndarray:
        """Run the model on `ids` (R, T), without the tokens in the cache -> logits of the next token (R, V).

        The first `pads[i]` ids of row i are padding. If there are more than block_size ids, only the last are used.
        """
        length = ids.shape[1]
        window = max(0, length - self.block_size)  # the first column of the context
        if window:
            cache = None  # the position of every token has changed
        new = window if cache is None else cache.length  # the first column that the model has not processed
        options: dict[str, Any] = {}
        if max(pads) > window:
            visible = np.maximum(pads, window)  # the first column of each row that is not padding; it has position 0
            options["positions"] = np.maximum(np.arange(new, length) - visible[:, None], 0)
            options["key_allow"] = np.arange(window, length) >= visible[:, None]
        if cache is not None:
            options["cache"] = cache
        model = self._fast_model() if STATE.get().is_silent else self.model
        return plain(model(ids[:, new:], last_only=True, **options))[:, -1]

    def _fast_model(self) -> LanguageModel:
        """The model on arrays, if it can be copied so; again after any array has been replaced, such as its own."""
        if self._copy is None or self._copied_at != WriteTime.replaced:
            self._copied_at = WriteTime.replaced
            self._copy = self.model.copy_on_arrays() if hasattr(self.model, "copy_on_arrays") else self.model
        return self._copy

    def _new_cache(self) -> Cache | None:
        return make_cache(self.model) if self.use_cache else None

    def _writer(self, prompt: np.ndarray) -> TextWriter:
        return TextWriter(prompt, self.max_new_tokens, self.stops, self.tokenizer)


# --------------------------------------------------------------------------------------------------------------------
# Arguments and results


ROW_TYPES = (list, tuple, np.ndarray, Tensor)


def is_single(idx: Any) -> bool:
    """Whether `idx` is one prompt, not several."""
    idx = plain(idx)
    return idx.ndim == 1 if isinstance(idx, np.ndarray) else not any(isinstance(row, ROW_TYPES) for row in idx)


def as_prompts(idx: Any, vocab_size: int) -> list[np.ndarray]:
    """Convert ids (T,), (B, T) or a list of rows to a list of integer arrays, and check them."""
    idx = plain(idx)
    expected = "idx must be token ids: (T,), (B, T), or a list of rows of different lengths"
    if isinstance(idx, str):
        raise TypeError(f"{expected}; got text, encode it first")
    if not isinstance(idx, ROW_TYPES):
        raise TypeError(f"{expected}; got {type(idx).__name__}")
    if isinstance(idx, np.ndarray) and (idx.ndim not in (1, 2) or (idx.ndim == 2 and len(idx) == 0)):
        raise ValueError(f"{expected}; got shape {idx.shape}")
    prompts = [as_ids(row, "idx").astype(np.int64) for row in ([idx] if is_single(idx) else idx)]
    for i, prompt in enumerate(prompts):
        if prompt.ndim != 1:
            raise ValueError(f"{expected}; got a row {i} of shape {prompt.shape}")
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {i} is empty, but a model needs at least one token to continue: begin with a start token, "
                f"such as a line feed or <|endoftext|>"
            )
        check_ids(prompt, vocab_size, "idx" if len(prompts) == 1 else f"idx[{i}]")
    return prompts


def check_context(prompt: int, new: int, block_size: int, on_full: str) -> None:
    """Check that a prompt and `new` tokens fit. The last token is never an input, so block_size + 1 tokens fit."""
    check_choice(on_full, ("error", "slide"), "on_full")
    if new == 0 or prompt + new <= block_size + 1:
        return
    excess = f"a prompt of {prompt} and {new} new tokens exceed the context: block_size is {block_size}"
    if on_full == "error":
        raise ValueError(
            f"{excess}, so at most {block_size + 1} tokens fit (the last is never an input), got {prompt + new}; "
            f'shorten the prompt, lower max_new_tokens, or pass on_full="slide"'
        )
    warnings.warn(
        f"{excess}; once it is full, each new token reads the last {block_size} again, and older ones are dropped",
        ContextFullWarning,
        stacklevel=4,  # the caller of generate or stream
    )


def stack_rows(rows: list[np.ndarray]) -> Rows:
    """Stack rows of equal lengths; return rows of different lengths as they are."""
    return np.stack(rows) if len({len(row) for row in rows}) == 1 else rows
