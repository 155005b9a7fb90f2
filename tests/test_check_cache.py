"""A cache that changes numbers is rejected with the name of its fault; correct ones pass; the ledger counts."""

import json

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.check.caching import kv_cache, list_chunkings
from tinygrad_mha.files import python_files

V = 11
PROMPT = [3, 1, 4, 1, 5, 9]


def gpt(attention=None, **settings):
    """A small GPT whose weights are large enough for attention to matter."""
    config = nn.GPTConfig(**{"vocab_size": V, "block_size": 7, "n_layer": 2, "n_head": 2, "n_embd": 12, **settings})
    model = nn.GPT(config, seed=0, attention=attention)
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.assign_(rng.standard_normal(p.shape) * 0.5)
    return model


# --------------------------------------------------------------------------------------------------------------------
# Correct ones


LLAMA = {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False, "n_kv_head": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_first": False, "dropout": 0.3},
        {"position": "sinusoidal"},
        {"position": "rotary", "n_kv_head": 1, "window": 3},
        {"position": "alibi", "score": "sinks"},
        {"position": "relative", "score": nn.SoftCap(2.0)},
        {"position": "none", "tie_weights": False},
        LLAMA,
    ],
    ids=str,
)
def test_every_option_of_a_gpt_passes_with_nothing_but_rounding(settings):
    model = gpt(**settings)
    before = model.state_dict()
    verdict = kv_cache(model, PROMPT)
    assert verdict.ok, verdict
    assert str(verdict).startswith("GPT: passed")
    assert [f.name for f in verdict.findings] == ["chunks", "padding", "crop", "fork"]
    assert "all 32 ways" in verdict.findings[0].message
    assert verdict.first_divergence is None
    assert np.shape(verdict.differences) == (6, 2, 2)
    assert np.max(verdict.differences) < 1e-13
    assert model.training
    assert all(np.array_equal(a, before[name]) for name, a in model.state_dict().items())


# --------------------------------------------------------------------------------------------------------------------
# One fault each


class Own(nn.Module):
    """Rotary attention from primitives. Each subclass changes one method, which gives it one fault."""

    is_attention = True
    names = ("q", "k", "v", "scores", "masked", "weights", "heads")

    def __init__(self, d=12, n_head=2, rng=None):
        rng = np.random.default_rng(7)
        self.n_head = n_head
        self.w = [tg.Tensor(rng.standard_normal((d, d)) * 0.4, requires_grad=True) for _ in range(4)]

    def forward(self, x, cache=None, positions=None, key_allow=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        start = 0 if cache is None else cache.length
        positions = np.arange(start, start + x.shape[-2]) if positions is None else positions
        q, k, v = (nn.split_heads(x @ w, self.n_head) for w in self.w[:3])
        q, k = self.place(q, k, positions, cache)
        if cache is not None:
            k, v = self.store(cache, k, v)
        q, k, v = show("q", q), show("k", k), show("v", v)
        scores = show("scores", (q @ k.mT) * q.shape[-1] ** -0.5)
        allow = self.mask(q.shape[-2], k.shape[-2], key_allow, cache)
        masked = show("masked", ops.where(allow, scores + self.bias(q.shape[-2], k.shape[-2]), -np.inf))
        heads = show("heads", show("weights", masked.softmax()) @ v)
        return nn.join_heads(heads) @ self.w[3]

    def place(self, q, k, positions, cache):
        return tuple(nn.positions.rotary(t, positions) for t in (q, k))

    def store(self, cache, k, v):
        return cache.append(k, v)

    def bias(self, n, n_k):
        return 0.0

    def mask(self, n, n_k, key_allow, cache):
        allow = nn.causal(n, n_k)
        return allow if key_allow is None else allow & key_allow[:, None, None, :]


class PlacesAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, np.arange(q.shape[-2]), cache)


class PlacesQueriesAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, np.arange(q.shape[-2]), cache)[0], super().place(q, k, positions, cache)[1]


class PlacesKeysAtTheStart(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, positions, cache)[0], super().place(q, k, np.arange(q.shape[-2]), cache)[1]


class PlacesOneTooFar(Own):
    def place(self, q, k, positions, cache):
        return super().place(q, k, np.asarray(positions) + (cache is not None and cache.length > 0), cache)


class BiasFromTheStart(Own):
    def bias(self, n, n_k):
        distance = np.arange(n)[:, None] - np.arange(n_k)
        return -0.5 * np.abs(distance).astype(np.float32)


class MasksFromTheLeft(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = np.tri(n, n_k, dtype=bool)
        return allow if key_allow is None else allow & key_allow[:, None, None, :]


class ForgetsTheCache(Own):
    def store(self, cache, k, v):
        cache.append(k, v)
        return k, v

    def mask(self, n, n_k, key_allow, cache):
        key_allow = None if key_allow is None else key_allow[:, -n_k:]
        return super().mask(n, n_k, key_allow, cache)


class HidesItsOwnKey(Own):
    def mask(self, n, n_k, key_allow, cache):
        own = np.arange(n_k) == np.arange(n_k - n, n_k)[:, None]
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & ~own if cache is not None and cache.length else allow


class AppendsAfterwards(Own):
    """The keys of a call are stored, but seen only from the next call on."""

    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & (np.arange(n_k) < n_k - n) if cache is not None and cache.length else allow


class DropsTheFirst(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        return allow & (np.arange(n_k) > 0) if cache is not None and cache.length else allow


class DropsTheLast(Own):
    def mask(self, n, n_k, key_allow, cache):
        allow = super().mask(n, n_k, key_allow, cache)
        last = np.arange(n_k) == n_k - n - 1
        return allow & ~last if cache is not None and cache.length else allow


class ForgetsTheCausalMask(Own):
    def mask(self, n, n_k, key_allow, cache):
        return (
            np.ones((n, n_k), bool)
            if cache is not None and key_allow is None
            else super().mask(n, n_k, key_allow, cache)
        )


class IgnoresPadding(Own):
    def mask(self, n, n_k, key_allow, cache):
        return nn.causal(n, n_k)


class KeepsItsOwnRows(Own):
    """Rows are kept in the module, which `crop` and `fork` do not reach."""

    def store(self, cache, k, v):
        new = np.array([k.numpy(), v.numpy()])
        self.held = [new if cache.length == 0 else np.concatenate([*self.held, new], axis=-2)]
        cache.append(k, v)
        return tuple(tg.Tensor(rows) for rows in self.held[0])


class CountsItsOwnPositions(Own):
    def place(self, q, k, positions, cache):
        n = q.shape[-2]
        if cache is not None:
            self.held = 0 if cache.length == 0 else self.held
            positions, self.held = np.arange(self.held, self.held + n), self.held + n
        return super().place(q, k, positions, cache)


class StoresHalf(Own):
    dtype = np.float16

    def store(self, cache, k, v):
        return cache.append(*(t.astype(self.dtype).astype(t.dtype) for t in (k, v)))


class StoresSingle(StoresHalf):
    dtype = np.float32


class LooksAhead(Own):
    def mask(self, n, n_k, key_allow, cache):
        return np.ones((n, n_k), bool)


class AppendsTwice(Own):
    def store(self, cache, k, v):
        cache.append(k, v)
        return cache.append(k, v)


NEVER_STORED = "cache.append once"
FAULTS = {
    PlacesAtTheStart: ("chunks", "position not offset"),
    PlacesQueriesAtTheStart: ("chunks", "position not offset"),
    PlacesKeysAtTheStart: ("chunks", "position not offset"),
    PlacesOneTooFar: ("chunks", "position off by one"),
    BiasFromTheStart: ("chunks", "position not offset"),
    MasksFromTheLeft: ("chunks", "mask from the wrong corner (top-left)"),
    ForgetsTheCache: ("chunks", "cache not used"),
    HidesItsOwnKey: ("chunks", "a token missing, the newest: new tokens do not see their own key"),
    AppendsAfterwards: ("chunks", "a token missing: the keys of a call"),
    DropsTheFirst: ("chunks", "trimmed by one: the first"),
    DropsTheLast: ("chunks", "trimmed by one: the last"),
    ForgetsTheCausalMask: ("chunks", "no causal mask with a cache"),
    IgnoresPadding: ("padding", "padding seen"),
    KeepsItsOwnRows: ("crop", "stale after crop"),
    CountsItsOwnPositions: ("crop", "stale after crop"),
    StoresHalf: ("chunks", "dtype"),
    StoresSingle: ("chunks", "dtype"),
    LooksAhead: ("chunks", "without a cache, a row changes with later tokens"),
    AppendsTwice: ("chunks", "a call with a cache fails"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("in_a_gpt", [True, False])
def test_each_fault_is_rejected_by_name(fault, in_a_gpt):
    claim, cause = FAULTS[fault]
    subject = fault().astype(np.float32)
    if in_a_gpt:
        model = gpt()
        model.h[1].attn = subject
        verdict = kv_cache(model, PROMPT)
    else:
        x = np.random.default_rng(3).standard_normal((6, 12)).astype(np.float32)
        verdict = kv_cache(subject, x)
    first = verdict.first_divergence
    assert not verdict.ok
    assert first.name == claim, verdict
    assert first.cause.startswith(cause), verdict
    assert first.cause in [f.cause or f.message for f in verdict.failed]
    assert json.loads(json.dumps(verdict.to_dict()))["first_divergence"]["name"] == claim
    if "fails" not in cause:
        assert first.layer == int(in_a_gpt)
        assert first.head in (0, 1)


@pytest.mark.parametrize(
    "settings", [{}, {"position": "rotary", "n_kv_head": 1}, {"position": "alibi", "norm_first": False}]
)
def test_the_first_difference_is_the_shortest_one_in_the_first_layer_that_differs(settings):
    """All layers have the fault; it shows first in the second token, in layer 0."""
    model = gpt(**settings)
    for block in model.h:
        block.attn = MasksFromTheLeft().astype(np.float32)
    first = kv_cache(model, PROMPT).first_divergence
    assert (first.chunks, first.step, first.layer, first.token) == ((1, 1), 1, 0, 1)
    assert str(first).startswith("chunks: calls of (1, 1) tokens, step 1, layer 0, head ")


def test_differences_belong_to_the_layer_and_head_that_has_the_fault():
    class OneHead(Own):
        def bias(self, n, n_k):
            return (
                np.array([0.0, 1.0], np.float32)[:, None, None] * np.float32(n == 1) * np.arange(n_k, dtype=np.float32)
            )

    model = gpt()
    model.h[1].attn = OneHead().astype(np.float32)
    verdict = kv_cache(model, PROMPT)
    differences = np.array(verdict.differences)
    assert differences.shape == (6, 2, 2)
    assert (differences > 1e-11).nonzero()[1:] != ()
    assert (differences[:, 0] < 1e-13).all()
    assert (differences[:, 1, 0] < 1e-13).all()
    assert (differences[1:, 1, 1] > 1e-3).all()
    first = verdict.first_divergence
    assert (first.layer, first.head) == (1, 1)
    assert first.cause.startswith("no fault that this check knows")


class Plain(nn.Module):
    """An own attention that shows no steps and takes neither padding nor positions."""

    def __init__(self, config=None, rng=None):
        self.w = [
            tg.Tensor(np.random.default_rng(i).standard_normal((12, 12)) * 0.4, requires_grad=True) for i in range(3)
        ]

    def forward(self, x, cache=None):
        q, k, v = (x @ w for w in self.w)
        q, k = self.place(q), self.place(k)
        if cache is not None:
            k, v = self.store(cache, k, v)
        return nn.attention(q, k, v, allow=self.mask(q.shape[-2], k.shape[-2]))

    def place(self, t):
        return t

    def store(self, cache, k, v):
        return cache.append(k, v)

    def mask(self, n, n_k):
        return nn.causal(n, n_k)


class PlainFromTheLeft(Plain):
    def mask(self, n, n_k):
        return np.tri(n, n_k, dtype=bool)


class PlainWithoutMask(Plain):
    def mask(self, n, n_k):
        return np.ones((n, n_k), bool) if n < n_k else nn.causal(n, n_k)


class PlainForgets(Plain):
    def store(self, cache, k, v):
        cache.append(k, v)
        return k, v


class PlainDropsTheFirst(Plain):
    def mask(self, n, n_k):
        return nn.causal(n, n_k) & ((np.arange(n_k) > 0) | (n == n_k))


class PlainDropsTheLast(Plain):
    def mask(self, n, n_k):
        return nn.causal(n, n_k) & ((np.arange(n_k) != n_k - n - 1) | (n == n_k))


class PlainPlacesAtTheStart(Plain):
    def place(self, t):
        return nn.positions.rotary(t, np.arange(t.shape[-2]))


class PlainStoresHalf(Plain):
    def store(self, cache, k, v):
        return cache.append(k.astype(np.float16).astype(k.dtype), v.astype(np.float16).astype(v.dtype))


class PlainHidesItsOwn(Plain):
    def mask(self, n, n_k):
        return nn.causal(n, n_k) & ((np.arange(n_k) != np.arange(n_k - n, n_k)[:, None]) | (n == n_k))


PLAIN_FAULTS = {
    PlainFromTheLeft: "mask from the wrong corner (top-left)",
    PlainWithoutMask: "no causal mask with a cache",
    PlainForgets: "cache not used",
    PlainDropsTheFirst: "trimmed by one: the first",
    PlainDropsTheLast: "trimmed by one: the last",
    PlainPlacesAtTheStart: "position not offset",
    PlainStoresHalf: "dtype",
    PlainHidesItsOwn: "no fault that this check knows gives these numbers; it finds more if forward shows",
}


@pytest.mark.parametrize("fault", PLAIN_FAULTS, ids=lambda c: c.__name__)
def test_most_faults_are_named_where_no_steps_are_shown(fault):
    model = gpt(attention=Plain)
    model.h[0].attn = fault().astype(np.float32)
    first = kv_cache(model, PROMPT).first_divergence
    assert (first.name, first.layer, first.head) == ("chunks", 0, None)
    assert first.cause.startswith(PLAIN_FAULTS[fault])


def test_an_attention_without_steps_padding_or_heads_is_checked_per_layer():
    verdict = kv_cache(gpt(attention=Plain), PROMPT)
    assert verdict.ok
    assert {f.name: f.status for f in verdict.findings}["padding"] == "does not apply"
    assert np.shape(verdict.differences) == (6, 2, 1)
    assert verdict.ledger.total.cached["K reused"] == 0  # no step shows how many rows there are
    assert verdict.ledger.total.cached["multiply-adds"] < verdict.ledger.total.uncached["multiply-adds"]


def test_a_fault_of_calls_without_edit_alone_is_found_though_no_layer_that_shows_its_steps_differs():
    class WrongWithoutEdit(Own):
        def forward(self, x, edit=None, **options):
            y = super().forward(x, edit=edit, **options)
            is_fast = edit is None and options.get("cache") is not None and x.shape[-2] == 1
            return y * 1.001 if is_fast else y

    model = gpt()
    model.h[1].attn = WrongWithoutEdit().astype(np.float32)
    first = kv_cache(model, PROMPT).first_divergence
    assert (first.layer, first.head) == (1, None)
    assert first.cause == "no layer differs while steps are recorded: look at what is computed without edit"


def test_a_fault_of_steps_that_are_shown_alone_is_found():
    class WrongWithEdit(Own):
        def forward(self, x, edit=None, **options):
            y = super().forward(x, edit=edit, **options)
            return y if edit is None or options.get("cache") is None else y * 1.001

    verdict = kv_cache(WrongWithEdit(), np.random.default_rng(0).standard_normal((5, 12)))
    assert verdict.first_divergence.layer == 0


@pytest.mark.parametrize("wrong", ["input", "bias", "mixes"])
def test_faults_outside_of_an_attention_module_are_named(wrong):
    class FromTheStart(nn.Position):
        acts_on = "input" if wrong == "input" else "attention"

        def forward(self, positions, x):
            return np.cos(np.arange(x.shape[-2])[:, None] * np.arange(x.shape[-1])).astype(x.dtype)

        def bias(self, n_head, n_q, n_k, dtype):
            distance = np.arange(n_q)[:, None] - np.arange(n_k)
            return tg.Tensor(np.broadcast_to(-0.5 * np.abs(distance), (n_head, n_q, n_k)), dtype=dtype)

    class Mixes(nn.Module):
        def forward(self, x):
            return x - x.mean(axis=-2, keepdims=True)

    model = gpt(position="rotary" if wrong == "mixes" else FromTheStart())
    if wrong == "mixes":
        model.h[0].mlp = Mixes()
    first = kv_cache(model, PROMPT).first_divergence
    expected = "outside of attention" if wrong == "mixes" else "position not offset"
    assert first.cause.startswith(expected), first
    assert first.head == (0 if wrong == "bias" else None)


# --------------------------------------------------------------------------------------------------------------------
# Attention modules alone, prompts, samples


@pytest.mark.parametrize(
    "settings", [{}, {"position": "rotary", "n_kv_head": 1}, {"position": "alibi", "d_v": 5, "d_out": 7}]
)
def test_an_attention_alone_passes(settings, rng):
    mha = nn.MultiHeadAttention(12, 2, d_k=4, rng=0, **settings)
    for x in (rng.standard_normal((5, 12)), [rng.standard_normal((n, 12)) for n in (2, 5, 3)]):
        verdict = kv_cache(mha, x)
        assert verdict.ok, verdict
        assert np.shape(verdict.differences) == (5, 1, 2)
    assert kv_cache(Own(), rng.standard_normal((2, 5, 12)).astype(np.float32)).ok
    assert kv_cache(gpt().h[0].attn, tg.Tensor(rng.standard_normal((5, 12)))).ok


def test_prompts_of_different_lengths_are_the_rows_of_the_padded_batch():
    class HidesLongPadding(Own):
        def mask(self, n, n_k, key_allow, cache):
            allow = super().mask(n, n_k, None, cache)
            hides = key_allow is not None and (~key_allow).sum() > 4  # not the two pads of the list below
            return allow & key_allow[:, None, None, :] if hides else allow

    model = gpt()
    model.h[0].attn = HidesLongPadding().astype(np.float32)
    assert kv_cache(model, PROMPT).ok
    first = kv_cache(model, [[3, 1, 4], [5, 9, 2, 6, 5]]).first_divergence
    assert (first.name, first.cause[:12]) == ("padding", "padding seen")


def test_long_prompts_are_read_in_a_sample_of_chunkings():
    assert len(list_chunkings(7)) == 64
    sample = list_chunkings(20, most=50)
    assert len(set(sample)) == 50
    assert sample[:2] == [(20,), (1,) * 20]
    assert {sum(chunks) for chunks in sample} == {20}
    assert sample == list_chunkings(20, most=50)
    verdict = kv_cache(gpt(block_size=20), np.arange(20) % V, most=5)
    assert verdict.ok
    assert "5 of 524288 ways" in str(verdict)


@pytest.mark.parametrize(
    ("model", "ids", "error", "message"),
    [
        (lambda: nn.Linear(3, 3), [1, 2], TypeError, "a GPT, or an attention whose forward takes cache; got Linear"),
        (lambda: nn.Transformer(V, V, 8, 2, 1, 16, 9), [1, 2], TypeError, "got Transformer"),
        (lambda: np.ones(3), [1, 2], TypeError, "got ndarray"),
        (gpt, [1], ValueError, "fewer than 2 tokens, got 1"),
        (gpt, [1.5, 2.5], TypeError, "integers"),
        (gpt, [1, 99], IndexError, "99"),
        (gpt, [1] * 8, ValueError, "block_size is 7"),
        (lambda: gpt(attention=WithoutCache), [1, 2], ValueError, "takes no cache, so there is nothing to compare"),
        (lambda: nn.MultiHeadAttention(4, 2), [1, 2], ValueError, "an attention takes rows x: floats"),
        (lambda: nn.MultiHeadAttention(4, 2), np.ones((3, 5)), ValueError, "4"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_the_reason(model, ids, error, message):
    with pytest.raises(error, match=message):
        kv_cache(model(), ids)


class WithoutCache(Plain):
    def forward(self, x):
        return super().forward(x)


def test_most_must_leave_room_for_one_chunk_and_single_tokens():
    with pytest.raises(ValueError, match="most must be an integer of at least 2"):
        kv_cache(gpt(), PROMPT, most=1)


# --------------------------------------------------------------------------------------------------------------------
# The ledger


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_kv_head": 1, "position": "rotary"},
        {"n_layer": 3, "activation": "swiglu", "norm": "rms", "bias": False, "n_inner": 5},
        {"score": "sinks", "window": 3},
    ],
    ids=str,
)
def test_the_ledger_equals_its_closed_forms(settings):
    """L layers, n = 1 new token after s, T = s + n; C = H d wide, K heads of keys, F wide inside, V tokens."""
    model = gpt(**settings)
    config = model.config
    L, C, H, F = config.n_layer, config.n_embd, config.n_head, config.n_inner or 4 * config.n_embd
    d, K, size = C // H, config.n_kv_head or H, 4
    matrices = 3 if config.activation == "swiglu" else 2
    per_token = 2 * C * C + 2 * C * K * d + matrices * C * F  # of one layer
    ledger = kv_cache(model, PROMPT).ledger
    for s, step in enumerate(ledger.steps):
        T = s + 1
        for work, n, old, kept in ((step.cached, 1, s, 1), (step.uncached, T, 0, 0)):
            for row in ("Q", "scores"):
                assert (work[f"{row} computed"], work[f"{row} reused"], work[f"{row} discarded"]) == (L * n, 0, L * n)
            for row in ("K", "V"):
                expected = (L * n, L * old, L * (n - kept))
                assert (work[f"{row} computed"], work[f"{row} reused"], work[f"{row} discarded"]) == expected
            assert work["multiply-adds"] == L * (n * per_token + 2 * n * T * C) + C * V
            assert work["bytes"] == L * size * n * (C + 2 * K * d + H * T)
            assert work["bytes kept"] == L * size * kept * 2 * K * d
    T, total = len(PROMPT), ledger.total
    assert total.cached["K reused"] == total.cached["V reused"] == L * T * (T - 1) // 2
    assert total.cached["K computed"] == L * T
    assert total.uncached["K computed"] == total.uncached["K discarded"] == L * T * (T + 1) // 2
    assert total.cached["multiply-adds"] == L * T * (per_token + (T + 1) * C) + T * C * V
    squares = T * (T + 1) * (2 * T + 1) // 6
    assert total.uncached["multiply-adds"] == L * (T * (T + 1) // 2 * per_token + 2 * squares * C) + T * C * V
    assert total.cached["bytes kept"] == L * T * 2 * K * d * size


def test_bytes_are_those_of_the_dtype_of_the_model_and_of_its_cache():
    for dtype in (np.float32, np.float64):
        model = gpt().astype(dtype)
        cache = model.new_cache()
        with tg.no_grad():
            model.eval()(PROMPT, cache=cache)
        assert kv_cache(model, PROMPT).ledger.total.cached["bytes kept"] == cache.nbytes


def test_a_cache_that_is_not_used_shows_in_the_ledger():
    """Counted, not derived: an attention that computes all keys again reuses none."""
    verdict = kv_cache(ForgetsTheCache(), np.random.default_rng(0).standard_normal((5, 12)))
    assert verdict.ledger.total.cached["K reused"] == 0
    assert kv_cache(Own(), np.random.default_rng(0).standard_normal((5, 12))).ledger.total.cached["K reused"] == 10


def test_the_ledger_is_text_data_and_a_table():
    verdict = kv_cache(gpt(), PROMPT[:3])
    lines = str(verdict.ledger).splitlines()
    assert len(lines) == 1 + 2 * 4
    assert lines[0].split()[:6] == ["step", "cache", "Q", "K", "V", "scores"]
    assert lines[-2].split()[:7] == ["total", "with", "6", "6", "6", "6", "12"]
    data = json.loads(json.dumps(verdict.to_dict()))["ledger"]
    assert data["total"]["cached"]["K reused"] == 6
    assert len(data["steps"]) == 3
    assert "<table>" in verdict._repr_html_()
    assert "multiply-adds" in verdict._repr_html_()


def test_numbers_that_are_not_finite_prove_nothing():
    with pytest.raises(ValueError, match="nan or infinite"):
        kv_cache(nn.MultiHeadAttention(6, 2, rng=0), np.full((3, 6), np.nan))


# --------------------------------------------------------------------------------------------------------------------
# What equal numbers do not show


class Cached(nn.Module):
    """Causal attention with one head; subclasses change a step of it."""

    def __init__(self):
        self.q, self.k, self.v = (nn.Linear(12, 12, rng=i) for i in range(3))

    def forward(self, x, cache=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        q, k, v = show("q", self.q(x)), show("k", self.k(x)), show("v", self.v(x))
        k, v = (k, v) if cache is None else cache.append(k, v)
        scores = show("scores", q @ k.mT / q.shape[-1] ** 0.5)
        allow = nn.causal(q.shape[-2], k.shape[-2])
        return ops.where(allow, scores, -np.inf).softmax() @ v


class Zeros(Cached):
    def forward(self, x, cache=None, edit=None):
        return super().forward(x, cache, edit) * 0.0


class ItsOwnValue(Cached):
    def forward(self, x, cache=None, edit=None):
        super().forward(x, cache, edit)
        return self.v(x)


class KeepsX(Cached):
    def forward(self, x, cache=None, edit=None):
        rows = x if cache is None else cache.append(x, x)[0]
        return super().forward(rows, None, edit)[-x.shape[-2] :]


ROWS = np.random.default_rng(0).standard_normal((5, 12))


@pytest.mark.parametrize("kind", [Zeros, ItsOwnValue])
def test_a_result_that_needs_no_earlier_token_is_not_plainly_passed(kind):
    assert "does not depend on earlier tokens" in kv_cache(kind(), ROWS).summary
    assert kv_cache(Cached(), ROWS).summary == "passed"


def test_rows_of_old_tokens_that_are_computed_again_are_counted_in_the_summary():
    verdict = kv_cache(KeepsX(), ROWS)
    assert verdict.ok
    assert "15 rows of Q" in verdict.summary
    assert "5 are needed" in verdict.summary


def test_an_attention_that_shows_no_scores_is_told_why_nothing_is_counted():
    class Silent(Cached):
        def forward(self, x, cache=None):
            return super().forward(x, cache)

    assert "not counted" in str(kv_cache(Silent(), ROWS))
    assert "not counted" not in str(kv_cache(Cached(), ROWS))


def test_an_attention_that_exits_or_never_returns_is_not_ok(monkeypatch):
    class Exits(Cached):
        def forward(self, x, cache=None):
            if cache is not None:
                raise SystemExit(0)
            return super().forward(x)

    class Loops(Cached):
        def forward(self, x, cache=None):
            while True:
                pass

    monkeypatch.setattr(python_files, "SECONDS", 0.05)
    for model, says in ((Exits(), "sys.exit(0)"), (Loops(), "endless loop")):
        verdict = kv_cache(model, ROWS)
        assert verdict.exit_code == 2
        assert says in verdict.problem
        assert "total" not in str(verdict)
