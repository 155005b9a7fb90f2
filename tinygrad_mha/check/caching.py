"""`kv_cache`: a computation with a cache compared with the same computation without it.

Axes: B rows of a batch, T tokens, n new tokens of a call, H heads, C width.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinygrad_mha.arguments import check_count
from tinygrad_mha.check.cache_faults import NOT_OFFSET, TOLERANCE, Case, find_cause, run_attention
from tinygrad_mha.check.differences import compare_rows
from tinygrad_mha.check.ledger import Ledger, LedgerStep, count_work
from tinygrad_mha.check.verdict import Finding, StoppedError, Verdict, as_plain_data, confining
from tinygrad_mha.decoding.generation import as_prompts
from tinygrad_mha.modes import no_grad, record
from tinygrad_mha.nn import GPT, KVCache
from tinygrad_mha.nn.contract import GUIDE, find_options
from tinygrad_mha.nn.heads import Steps, select_layer_cache
from tinygrad_mha.nn.module import Module
from tinygrad_mha.tables import make_pre
from tinygrad_mha.tensors import Tensor, as_tensor, plain

__all__ = ["CacheVerdict", "Divergence", "kv_cache", "list_chunkings"]

MOST_CASES = 6  # wrong calls that a cause must explain


def list_chunkings(n: int, most: int = 64, seed: int = 0) -> list[tuple[int, ...]]:
    """Ways to read `n` tokens in chunks: all 2^(n - 1), or `most` of them, one chunk and single tokens included.

    Example:
        >>> list_chunkings(3)
        [(3,), (2, 1), (1, 2), (1, 1, 1)]
    """
    # Each way says whether a chunk ends after token 0, 1, ...
    ways: Iterable[tuple[int, ...]] = itertools.product((0, 1), repeat=n - 1)
    if 2 ** (n - 1) > most:
        drawn = np.random.default_rng(seed).integers(0, 2, (4 * most, n - 1)).tolist()
        ways = itertools.islice(dict.fromkeys([(0,) * (n - 1), (1,) * (n - 1), *map(tuple, drawn)]), most)
    ends = ([0, *(np.flatnonzero(way) + 1).tolist(), n] for way in ways)
    return [tuple(b - a for a, b in itertools.pairwise(places)) for places in ends]


# --------------------------------------------------------------------------------------------------------------------
# The verdict


@dataclass(frozen=True)
class Divergence(Finding):
    """A claim that failed, and where numbers with a cache first differ from those without it.

    Attributes:
        chunks: the number of tokens of each call up to this one; () if a call raised an error, which is the cause.
        step: the index of this call.
        layer, head: None if no layer differs, or the attention shows no heads.
        token: its index in its sequence.
        difference: the largest in the call, relative to the largest element without a cache.
    """

    chunks: tuple[int, ...] = ()
    step: int = 0
    layer: int | None = None
    head: int | None = None
    token: int = 0
    difference: float = np.inf

    def __str__(self) -> str:
        if not self.chunks:
            return f"{self.name}: {self.cause}"
        places = {name: getattr(self, name) for name in ("step", "layer", "head", "token")}
        place = ", ".join(f"{name} {index}" for name, index in places.items() if index is not None)
        return f"{self.name}: calls of {self.chunks} tokens, {place}: {self.difference:.1e} off. {self.cause}"


@dataclass(repr=False)
class CacheVerdict(Verdict):
    """The verdict of `kv_cache`.

    Attributes:
        differences: the largest difference of each step, layer and head, as nested lists, when the prompt is read token
            by token; one number for a layer that shows no heads.
        ledger: what these steps computed, reused and discarded, and what they would without a cache.
    """

    differences: list[list[list[float]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def first_divergence(self) -> Divergence | None:
        """The first claim that failed, or None."""
        return next((finding for finding in self.findings if isinstance(finding, Divergence)), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python data, ready for JSON."""
        first = None if self.first_divergence is None else vars(self.first_divergence)
        facts = {"first_divergence": first, "differences": self.differences, "ledger": self.ledger.to_dict()}
        return super().to_dict() | as_plain_data(facts)

    def __str__(self) -> str:
        return super().__str__() + (f"\n{self.ledger}" if self.ledger.steps else "")

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (make_pre(str(self.ledger)) if self.ledger.steps else "")


def kv_cache(model: Module, ids: Any, *, most: int = 64) -> CacheVerdict:
    """Compare a model with a cache with the same model without one, in float64, and count what the cache saves.

    A copy in eval mode runs. The claims: a prompt may be read in chunks, in all 2^(T - 1) ways or a sample of them
    ("chunks"); rows of a batch, padded in front, are as each row alone ("padding"); a cache can be cropped and
    continued with other tokens ("crop"), and a fork and the original can both be continued ("fork"). Numbers may differ
    by 1e-11 of the largest one. The cause of a difference is found by putting known faults into the computation without
    a cache.

    A model is compared with itself. What is wrong with and without a cache alike, such as a mask or a position, is a
    matter of `check.attention`. The verdict has a caveat if nothing depends on earlier tokens, or if rows of old tokens
    are computed again. A call that exits or takes more than 20 seconds is its `problem`.

    Args:
        model: a `GPT` with any attention that takes a cache; a `MultiHeadAttention`, which is called with causal=True;
            or an attention of your own for a GPT, by itself.
        ids: token ids of a GPT, or rows x (T, C) of an attention: one sequence, a batch, or a list of sequences of
            different lengths. The longest is the prompt.
        most: the number of chunkings, if there are more than these.

    Raises:
        TypeError: another kind of model, or ids that are not integers.
        ValueError: an attention that takes no cache, fewer than 2 tokens, or more than the context holds.

    Example:
        >>> model = tg.nn.GPT(tg.nn.GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=6))
        >>> verdict = kv_cache(model, [3, 1, 4, 1, 5])
        >>> verdict.ok, verdict.ledger.total.cached["K reused"]
        (True, 20)
    """
    check_count(most, "most", least=2)
    with no_grad():
        try:
            return examine_all(Subject(model, ids, np.float64), model, ids, most)
        except StoppedError as error:
            return CacheVerdict(type(model).__name__, problem=str(error))


def examine_all(subject: Subject, model: Module, ids: Any, most: int) -> CacheVerdict:
    """Try all claims, and count."""
    if not np.isfinite(subject.whole(subject.prompt, False)[None, "y"]).all():
        raise ValueError("without a cache the result is nan or infinite, so nothing can be compared")
    findings = [subject.examine(claim, ways) for claim, ways in subject.list_scenarios(most).items()]
    verdict = CacheVerdict(type(model).__name__, findings)
    if verdict.first_divergence is None or verdict.first_divergence.chunks:  # no call raised an error
        verdict.differences = subject.measure_differences()
        dtype = next((p.dtype for p in model.parameters()), np.float64)  # torch may hold the parameters
        verdict.ledger = Subject(model, ids, dtype).count_ledger()
        verdict.caveat = subject.describe_untested(verdict.ledger)
    return verdict


# --------------------------------------------------------------------------------------------------------------------
# Calls


class Watched(Module):
    """An attention in its place that keeps what its last call received and returned, and its steps if `shows`."""

    shows = False

    def __init__(self, attention: Module) -> None:
        self.attention = attention
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Any, cache: Any = None, edit: None = None, **options: Any) -> Tensor:
        x, steps = as_tensor(x), Steps()
        if self.shows and "edit" in find_options(type(self.attention).forward):
            options["edit"] = steps
        y = run_attention(self.attention, x, cache=select_layer_cache(cache), **options)
        shown = {name: tensor for name, tensor in steps.trace()._asdict().items() if tensor is not None}
        self.seen = {"x": x, **shown, "y": y}
        return y


class Call(NamedTuple):
    """A call that reads the columns start .. stop - 1 of `rows`; shorter rows are padded in front."""

    rows: list[np.ndarray]
    start: int
    stop: int
    cache: KVCache | None = None

    def pads(self) -> np.ndarray:
        """The number of columns in front of each row."""
        return max(map(len, self.rows)) - np.array([len(row) for row in self.rows])

    def positions(self) -> np.ndarray:
        """Those of the columns, (B, n); 0 for padding."""
        return np.maximum(np.arange(self.start, self.stop) - self.pads()[:, None], 0)

    def run(self, model: Any, **options: Any) -> Tensor:
        """(n, width) for one row, else (B, n, width)."""
        if len(self.rows) > 1:
            options |= {"positions": self.positions(), "key_allow": np.arange(self.stop) >= self.pads()[:, None]}
        longest = max(self.rows, key=len)  # padding is made of tokens, which must not be seen
        rows = np.array([np.concatenate([longest[: len(longest) - len(row)], row]) for row in self.rows])
        columns = rows[:, self.start : self.stop]
        return model(columns if len(rows) > 1 else columns[0], cache=self.cache, **options)

    def tokens(self) -> Iterator[tuple[int, slice, slice]]:
        """For each row with tokens in this call its index, the columns of the call and the tokens that they hold."""
        for i, pad in enumerate(self.pads().tolist()):
            if pad < self.stop:
                first = max(self.start, pad)
                yield i, slice(first - self.start, None), slice(first - pad, self.stop - pad)


class Compared(NamedTuple):
    """A matrix (n, width) of a call compared with that of the computation without a cache."""

    layer: int | None  # None for the result of the model
    part: str  # "x", "heads" or "y"
    head: int | None
    row: int
    columns: slice
    tokens: slice
    differences: np.ndarray  # of each token, relative


Scenario = Callable[[], Iterator[Call]]
Arrays = dict[tuple[int | None, str], np.ndarray]
"""(B, ...) by layer, None for the model, and part: "x", "y" and the names of steps."""


class Failure(NamedTuple):
    """The calls of a scenario up to the first wrong one, what they computed, and what is wrong first."""

    calls: list[Call]
    runs: list[Arrays]
    wrong: Compared


class Subject:
    """A copy of a model in eval mode with watched attentions, and the sequences that it reads."""

    def __init__(self, model: Any, ids: Any, dtype: Any) -> None:
        if not isinstance(model, Module) or "cache" not in find_options(type(model).forward):
            kind = type(model).__name__
            raise TypeError(f"kv_cache checks a GPT, or an attention whose forward takes cache; got {kind}. {GUIDE}")
        self.model: Any = copy.deepcopy(model).eval().astype(dtype)
        self.vocab_size = model.config.vocab_size if isinstance(model, GPT) else 0
        self.rows = as_prompts(ids, self.vocab_size) if self.vocab_size else as_sequences(ids, dtype)
        blocks: Any = self.model.h if isinstance(self.model, GPT) else []
        self.watched = [Watched(attention) for attention in ([block.attn for block in blocks] or [self.model])]
        self.options = [find_options(type(watched.attention).forward) for watched in self.watched]
        if not all("cache" in options for options in self.options):
            raise ValueError(f"the attention of a block takes no cache, so there is nothing to compare. {GUIDE}")
        for block, watched in zip(blocks, self.watched, strict=False):
            block.attn = watched
        self.model = self.model if blocks else self.watched[0]
        self.prompt = max(self.rows, key=len)
        if len(self.prompt) < 2:
            raise ValueError(f"a cache shows nothing with fewer than 2 tokens, got {len(self.prompt)}")
        if all(len(row) == len(self.prompt) for row in self.rows):  # make a batch that needs padding
            self.rows = [*self.rows, self.prompt[: (len(self.prompt) + 1) // 2], self.prompt[-1:]]
        self._wholes: dict[tuple[bytes, bool], Arrays] = {}

    # ------------------------------------------------------------------------------------------------------ scenarios

    def list_scenarios(self, most: int) -> dict[str, list[Scenario]]:
        """What is done with a cache, for each claim."""
        n = len(self.prompt)
        paddings = dict.fromkeys([(n,), (n // 2, n - n // 2), (1,) * n])
        return {
            "chunks": [partial(self.read, [self.prompt], chunks) for chunks in list_chunkings(n, most)],
            "padding": [partial(self.read, self.rows, chunks) for chunks in paddings],
            "crop": [partial(self.crop, m) for m in range(n)],
            "fork": [partial(self.fork, m) for m in range(1, n)],
        }

    def new_cache(self) -> KVCache:
        return KVCache(len(self.watched))

    def read(self, rows: list[np.ndarray], chunks: tuple[int, ...]) -> Iterator[Call]:
        cache = self.new_cache()
        for start, stop in itertools.pairwise([0, *np.cumsum(chunks).tolist()]):
            yield Call(rows, start, stop, cache)

    def crop(self, m: int) -> Iterator[Call]:
        n, cache = len(self.prompt), self.new_cache()
        yield Call([self.prompt], 0, n, cache)
        cache.crop(m)
        yield Call([self.change_end(m)], m, n, cache)

    def fork(self, m: int) -> Iterator[Call]:
        """The fork reads other tokens, then the original continues, then the fork."""
        n, cache = len(self.prompt), self.new_cache()
        yield Call([self.prompt], 0, m, cache)
        fork, other, middle = cache.fork(), self.change_end(m), (m + n + 1) // 2
        yield Call([other], m, middle, fork)
        yield Call([self.prompt], m, n, cache)
        if middle < n:
            yield Call([other], middle, n, fork)

    def change_end(self, m: int) -> np.ndarray:
        """The prompt with other tokens from m on."""
        end = self.prompt[m:]
        return np.concatenate([self.prompt[:m], (end + 1) % self.vocab_size if self.vocab_size else 0.5 - end])

    # ----------------------------------------------------------------------------------------------------- comparisons

    def run(self, call: Call, show: bool = False, **options: Any) -> Arrays:
        """The result, and what each layer received, returned and, with `show`, its steps, (B, ...)."""
        for layer in self.watched:
            layer.shows = show
        with confining():
            y = self.result = call.run(self.model, **options)
        found: dict[tuple[int | None, str], Tensor] = {
            (i, name): tensor for i, layer in enumerate(self.watched) for name, tensor in layer.seen.items()
        }
        batch = slice(None) if len(call.rows) > 1 else None
        return {key: t.numpy()[batch] for key, t in (found | {(None, "y"): y}).items()}

    def whole(self, row: np.ndarray, show: bool) -> Arrays:
        """The same for a row without a cache."""
        key = row.tobytes(), show
        if key not in self._wholes:
            self._wholes[key] = self.run(Call([row], 0, len(row)), show)
        return self._wholes[key]

    def compare(self, call: Call, now: Arrays, show: bool) -> Iterator[Compared]:
        """Compare what `run` returned for a call, in the order of the computation."""
        for row, columns, tokens in call.tokens():
            right = self.whole(call.rows[row], show)
            for (layer, part), array in now.items():
                if part in ("x", "heads", "y"):
                    a, b = array[row][..., columns, :], right[layer, part][0]
                    for head in range(len(a)) if a.ndim == 3 else (None,):
                        pair = (a, b) if head is None else (a[head], b[head])
                        yield Compared(layer, part, head, row, columns, tokens, compare_rows(*pair, tokens))

    def follow(self, scenarios: list[Scenario], show: bool) -> tuple[float, list[Failure]]:
        """The largest difference of results, and the first wrong call of each scenario that fails, shortest first."""
        largest, failures = 0.0, []
        for scenario in scenarios:
            calls: list[Call] = []
            runs: list[Arrays] = []
            for call in scenario():
                calls.append(call)
                runs.append(self.run(call, show))
                found = list(self.compare(call, runs[-1], show))
                largest = max(largest, *(float(c.differences.max()) for c in found if c.layer is None))
                wrong = next((c for c in found if c.differences.max() > TOLERANCE), None)
                if wrong is not None:
                    failures.append(Failure(calls, runs, wrong))
                    break
        return largest, sorted(failures, key=lambda f: (f.wrong.layer is None, f.calls[-1].stop, len(f.calls)))

    def examine(self, claim: str, scenarios: list[Scenario]) -> Finding:
        """Compare every call of every scenario with the computation without a cache."""
        if claim == "padding" and not all("key_allow" in options for options in self.options):
            return Finding(claim, "does not apply", "an attention takes no key_allow for rows of a padded batch")
        try:
            largest, failures = self.follow(scenarios, show=False)
            # Steps tell the place and the cause. They may be computed differently, so one scenario shows them anyway.
            shown = self.follow(scenarios if failures else scenarios[-1:], show=True)[1]
        except StoppedError:
            raise
        except Exception as error:
            return Divergence(claim, "failed", cause=f"a call with a cache fails: {type(error).__name__}: {error}")
        possible = 2 ** (len(self.prompt) - 1) if claim == "chunks" else len(scenarios)
        ways = f"all {possible} ways" if possible == len(scenarios) else f"{len(scenarios)} of {possible} ways"
        message = f"{ways}: largest difference {largest:.1e}, tolerance {TOLERANCE:.0e}"
        if not failures and not shown:
            return Finding(claim, "passed", message)
        cause = "no layer differs while steps are recorded: look at what is computed without edit"
        cause = self.explain(claim, shown) if shown else cause
        calls, _, wrong = (shown or failures)[0]
        step, chunks = len(calls) - 1, tuple(call.stop - call.start for call in calls)
        token = wrong.tokens.start + int(np.argmax(wrong.differences > TOLERANCE))
        size = float(wrong.differences.max())
        example = {"chunks": chunks, "step": step, "layer": wrong.layer, "head": wrong.head, "token": token}
        return Divergence(claim, "failed", message, cause, example, {"difference": size}, difference=size, **example)

    def explain(self, claim: str, failures: list[Failure]) -> str:
        """The cause: the place of the first difference tells it, or else what reproduces several of them."""
        calls, runs, wrong = failures[0]
        if wrong.layer is None or (wrong.part == "x" and wrong.layer > 0):
            return "outside of attention: what follows it depends on which tokens share a call"
        if wrong.part == "x":
            tokens = calls[-1].rows[wrong.row][wrong.tokens]
            alone = self.run(Call([tokens], 0, len(tokens)))[0, "x"][0]
            is_equal = compare_rows(runs[-1][0, "x"][wrong.row][wrong.columns], alone).max() <= TOLERANCE
            return NOT_OFFSET if is_equal else "before attention: the vectors of tokens or positions differ"
        cases = [self.make_case(f) for f in failures if f.wrong[:2] == wrong[:2]]
        different = {(case.start, case.stop): case for case in reversed(cases)}
        return find_cause(list(different.values())[-MOST_CASES:], claim)

    def make_case(self, failure: Failure) -> Case:
        """What the attention of the wrong layer was given and returned."""
        calls, runs, (layer, _, _, row, columns, tokens, _) = failure
        assert layer is not None
        shown = {part: array[row][..., columns, :] for (i, part), array in runs[-1].items() if i == layer}
        history = np.concatenate([run[layer, "x"][row] for run in runs])
        positions = np.concatenate([call.positions()[row] for call in calls])
        x = self.whole(calls[-1].rows[row], True)[layer, "x"][0]
        assert calls[-1].cache is not None
        keys = calls[-1].cache[layer].keys()
        keys = keys[row] if len(calls[-1].rows) > 1 else keys
        return Case(self.watched[layer].attention, x, tokens.start, tokens.stop, history, positions, keys, shown)

    def measure_differences(self) -> list[list[list[float]]]:
        """The largest difference of each call, layer and head, token by token."""
        steps = []
        for call in self.read([self.prompt], (1,) * len(self.prompt)):
            found = list(self.compare(call, self.run(call, show=True), show=True))
            heads = {i for i, part, *_ in found if part == "heads"}
            layers = [
                [c for c in found if c[:2] == (i, "heads" if i in heads else "y")] for i in range(len(self.watched))
            ]
            steps.append([[float(c.differences.max()) for c in layer] for layer in layers])
        return steps

    def describe_untested(self, ledger: Ledger) -> str:
        """What equal numbers do not show: that a cache is needed, and that it saves something; else ""."""
        last = np.concatenate([self.change_end(0)[:-1], self.prompt[-1:]])  # all tokens before it are others
        rows = [self.whole(row, False)[None, "y"][0][-1:] for row in (self.prompt, last)]
        if compare_rows(*rows).max() <= TOLERANCE:
            return "the last row does not depend on earlier tokens, so a wrong cache would pass too"
        needed, computed = len(self.prompt) * len(self.watched), ledger.total.cached
        again = [name for name in ("Q", "K", "V") if computed[f"{name} computed"] > needed]
        counts = ", ".join(f"{computed[f'{name} computed']:,} rows of {name}" for name in again)
        return f"old tokens are computed again: {counts} with a cache, {needed:,} are needed" if again else ""

    def count_ledger(self) -> Ledger:
        """Read the prompt token by token with a cache and without one, as `generate` does, and count."""
        ledger, cache = Ledger(), self.new_cache()
        options = {"last_only": True} if self.vocab_size else {}
        with record():
            for t in range(len(self.prompt)):
                works = []
                for call in (Call([self.prompt], t, t + 1, cache), Call([self.prompt], 0, t + 1)):
                    self.run(call, show=True, **options)
                    seen = [watched.seen for watched in self.watched]
                    works.append(count_work(self.result, seen, 0 if call.cache is None else 1))
                ledger.steps.append(LedgerStep(*works))
        return ledger


def as_sequences(x: Any, dtype: Any) -> list[np.ndarray]:
    """The sequences (T, C) of an attention in `x`: one, a batch, or a list of them."""
    x = plain(x)
    rows = [np.asarray(plain(row)) for row in ([x] if getattr(x, "ndim", 0) == 2 else x)]
    if any(row.ndim != 2 or row.dtype.kind != "f" for row in rows):
        got = ", ".join(f"{row.shape} {row.dtype}" for row in rows)
        raise ValueError(f"an attention takes rows x: floats (T, C), a batch of them, or a list; got {got}")
    return [row.astype(dtype) for row in rows]
