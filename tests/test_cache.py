"""A cache changes the cost of a computation and nothing else; only calls that are given it change it."""

import gc
import weakref

import numpy as np
import pytest

from tinygrad_mha import Tensor, enable_grad, nn, no_grad, record

V, LAYERS = 11, 3
PROMPT = np.random.default_rng(0).integers(0, V, (2, 6))


def gpt(**settings):
    """A small GPT in float64 whose weights are large enough for every mistake to show."""
    config = {"vocab_size": V, "block_size": 8, "n_layer": LAYERS, "n_head": 4, "n_embd": 24, **settings}
    model = nn.GPT(nn.GPTConfig(**config), seed=0).astype(np.float64).eval()
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.assign_(rng.standard_normal(p.shape) * 0.5)
    return model


def compositions(n):
    """Every way to write n as an ordered sum of positive numbers."""
    if n == 0:
        yield []
    for first in range(1, n + 1):
        for rest in compositions(n - first):
            yield [first, *rest]


def chunked(model, ids, chunks, cache):
    """The outputs of `model` when `ids` come in chunks."""
    outputs, start = [], 0
    for n in chunks:
        outputs.append(model(ids[:, start : start + n], cache=cache).data)
        start += n
    return np.concatenate(outputs, axis=1)


@pytest.fixture(autouse=True)
def without_gradients():
    with no_grad():
        yield


# --------------------------------------------------------------------------------------------------------------------
# The same numbers


@pytest.mark.parametrize(
    ("position", "n_kv_head", "norm_first"),
    [
        ("learned", None, True),
        ("learned", 1, False),
        ("sinusoidal", None, True),
        ("rotary", 2, True),
        ("rotary", None, False),
        ("alibi", 2, False),
        ("alibi", None, True),
        ("relative", 2, True),
        (nn.Relative(num_buckets=4, max_distance=5, bidirectional=False), None, False),
        ("none", 2, True),
    ],
)
def test_every_composition_of_a_prompt_into_chunks_gives_the_same_logits(position, n_kv_head, norm_first):
    model = gpt(position=position, n_kv_head=n_kv_head, norm_first=norm_first)
    whole = model(PROMPT).data
    ways = list(compositions(6))
    assert len(ways) == 32
    for chunks in ways:
        cache = nn.KVCache(LAYERS)
        np.testing.assert_allclose(chunked(model, PROMPT, chunks, cache), whole, rtol=0, atol=1e-12)
        assert cache.length == 6


@pytest.mark.parametrize("position", [None, "rotary", "alibi", nn.Relative(num_buckets=4, max_distance=4)])
def test_the_same_holds_for_one_attention_with_free_widths(position, rng):
    mha = nn.MultiHeadAttention(5, 4, d_k=6, d_v=11, d_out=13, n_kv_head=2, position=position, rng=0).astype(np.float64)
    x = rng.standard_normal((2, 6, 5))
    whole = mha(x, causal=True).data
    for chunks in compositions(6):
        cache, start = nn.KVCache(), 0
        for n in chunks:
            y = mha(x[:, start : start + n], causal=True, cache=cache)
            np.testing.assert_allclose(y.data, whole[:, start : start + n], rtol=0, atol=1e-12)
            start += n


def test_the_block_of_llama_can_be_cached_with_prompts_padded_in_front():
    model = gpt(norm="rms", activation="swiglu", position="rotary", bias=False, n_kv_head=2)
    key_allow = np.array([[False, False, True, True, True, True], [True] * 6])
    positions = np.maximum(key_allow.cumsum(1) - 1, 0)
    for split in range(1, 6):
        cache, parts = nn.KVCache(LAYERS), []
        for part in (slice(0, split), slice(split, 6)):
            options = {"key_allow": key_allow[:, : part.stop], "positions": positions[:, part]}
            parts.append(model(PROMPT[:, part], cache=cache, **options).data)
        logits = np.concatenate(parts, 1)
        np.testing.assert_allclose(logits[0, 2:], model(PROMPT[0, 2:]).data, atol=1e-12)
        np.testing.assert_allclose(logits[1], model(PROMPT[1]).data, atol=1e-12)


def test_cropping_to_a_length_that_is_not_an_integer_is_refused():
    cache = nn.KVCache(LAYERS)
    gpt()(PROMPT, cache=cache)
    for n in (1.5, True, "2"):
        with pytest.raises(TypeError, match="n must be an integer"):
            cache.crop(n)
    assert cache.length == 6
    cache.crop(np.int64(2))
    assert cache.length == 2


def test_a_sequence_without_a_batch_axis_can_be_cached(rng):
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[0, :4], cache=cache)
    np.testing.assert_allclose(model(PROMPT[0, 4:], cache=cache).data, model(PROMPT[:1]).data[0, 4:], atol=1e-12)


def test_greedy_tokens_are_equal_with_and_without_a_cache_for_every_prompt_length():
    model = gpt()
    for length in range(1, 8):
        ids = PROMPT[:, :1].repeat(length, 1) * np.arange(1, length + 1) % V
        cache, new = nn.KVCache(LAYERS), ids
        while ids.shape[1] < 8:
            following = model(new, cache=cache, last_only=True).data.argmax(-1)
            np.testing.assert_array_equal(following, model(ids).data[:, -1:].argmax(-1))
            assert cache.length == ids.shape[1]
            ids, new = np.concatenate([ids, following], 1), following


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "alibi", "relative", "none"])
def test_prompts_padded_in_front_equal_each_prompt_alone(position):
    model = gpt(position=position)
    key_allow = np.array([[False, False, True, True, True, True], [True] * 6])
    positions = np.maximum(key_allow.cumsum(1) - 1, 0)
    cache = nn.KVCache(LAYERS)
    padded = model(PROMPT, cache=cache, key_allow=key_allow, positions=positions).data
    np.testing.assert_allclose(padded[0, 2:], model(PROMPT[0, 2:]).data, atol=1e-12)
    np.testing.assert_allclose(padded[1], model(PROMPT[1]).data, atol=1e-12)
    following = np.array([[3], [5]])
    key_allow = np.concatenate([key_allow, [[True], [True]]], 1)
    step = model(following, cache=cache, key_allow=key_allow, positions=positions[:, -1:] + 1).data
    np.testing.assert_allclose(step[0, 0], model([*PROMPT[0, 2:], 3]).data[-1], atol=1e-12)
    np.testing.assert_allclose(step[1, 0], model([*PROMPT[1], 5]).data[-1], atol=1e-12)


def test_a_cached_query_sees_the_oldest_and_the_newest_key():
    """Zero scores: the output is the mean of all values, 0 to 4, not the first of them."""
    mha = nn.MultiHeadAttention(1, 1).astype(np.float64)
    for p, value in ((mha.wq, 0.0), (mha.wk, 1.0), (mha.wv, 1.0), (mha.wo, 1.0)):
        p.assign_([[value]])
    cache = nn.KVCache()
    mha(np.arange(4.0)[:, None], causal=True, cache=cache)
    assert mha(np.array([[4.0]]), causal=True, cache=cache).item() == 2.0


def test_float32_stays_float32_in_the_cache():
    model = nn.GPT(nn.GPTConfig(V, 8, LAYERS, 4, 24), seed=0)
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    assert model(PROMPT[:, :1], cache=cache).dtype == np.float32
    assert cache.nbytes == 2 * LAYERS * 2 * 7 * 24 * 4


# --------------------------------------------------------------------------------------------------------------------
# Whose it is


def test_a_call_that_is_given_no_cache_changes_none():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    first = model(PROMPT[:, :1], cache=cache.fork()).data
    model(PROMPT[:1] + 1 - 1)
    model(PROMPT, cache=nn.KVCache(LAYERS))
    assert cache.length == 6
    np.testing.assert_array_equal(model(PROMPT[:, :1], cache=cache.fork()).data, first)


def test_two_interleaved_sequences_do_not_disturb_each_other():
    model = gpt()
    a, b = nn.KVCache(LAYERS), nn.KVCache(LAYERS)
    for i in range(6):
        one = model(PROMPT[:1, i : i + 1], cache=a).data
        two = model(PROMPT[1:, i : i + 1], cache=b).data
        np.testing.assert_allclose(one, model(PROMPT[:1, : i + 1]).data[:, -1:], atol=1e-12)
        np.testing.assert_allclose(two, model(PROMPT[1:, : i + 1]).data[:, -1:], atol=1e-12)


def test_what_the_caller_passed_and_received_is_not_the_memory_of_the_cache():
    model = gpt()
    cache, ids = nn.KVCache(LAYERS), PROMPT.copy()
    _, trace = model(ids, cache=cache, trace=True)
    expected = model(PROMPT[:, :1], cache=cache.fork()).data
    ids[:] = 0
    steps = [t for attention in trace.attention for t in attention]
    before = [t.data.copy() for t in steps]
    for t in steps:
        shares = any(np.shares_memory(t.data, rows.k) or np.shares_memory(t.data, rows.v) for rows in cache._rows)
        assert not (shares and t.data.flags.writeable)
    np.testing.assert_array_equal(model(PROMPT[:, :1], cache=cache).data, expected)
    cache.crop(1)
    model(PROMPT[:, 2:4], cache=cache)
    for t, values in zip(steps, before, strict=True):
        np.testing.assert_array_equal(t.data, values)


def test_a_cache_under_gradients_raises_names_no_grad_and_stays_as_it_was():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :3], cache=cache)
    with enable_grad(), pytest.raises(ValueError, match=r"use it under tg\.no_grad\(\)"):
        model(PROMPT[:, 3:], cache=cache)
    assert cache.length == 3
    np.testing.assert_allclose(model(PROMPT[:, 3:], cache=cache).data, model(PROMPT).data[:, 3:], atol=1e-12)


def test_a_call_that_fails_halfway_adds_nothing(monkeypatch):
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :2], cache=cache)

    def broken(*args, **kwargs):
        raise KeyError("halfway")

    with monkeypatch.context() as patch:
        patch.setattr(model.h[2].attn.c_attn, "forward", broken)
        with pytest.raises(KeyError, match="halfway"):
            model(PROMPT[:, :5], cache=cache)
    assert cache.length == 2
    twin = cache.fork()
    for c in (cache, twin):
        np.testing.assert_allclose(model(PROMPT[:, 2:], cache=c).data, model(PROMPT).data[:, 2:], atol=1e-12)
        assert c.length == 6


def test_a_fork_of_a_call_that_failed_halfway_has_one_length_in_all_layers(monkeypatch):
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :2], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.h[2].attn.c_attn, "forward", lambda *args: {}["halfway"])
        with pytest.raises(KeyError, match="halfway"):
            model(PROMPT[:, :5], cache=cache)
    twin = cache.fork()
    assert [twin[i].appended for i in range(LAYERS)] == [2] * LAYERS
    assert twin[0].keys().shape[-2] == 2


def test_the_memory_of_a_cache_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        cache = nn.KVCache(LAYERS)
        gpt()(PROMPT, cache=cache)
        memory = weakref.ref(cache._rows[0].k)
        del cache
        assert memory() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------------------------
# Growth, fork, crop, select


def buffers(cache):
    return [rows.k for rows in cache._rows]


def test_growth_moves_the_memory_a_logarithmic_number_of_times():
    mha = nn.MultiHeadAttention(2, 1)
    cache, moves, before = nn.KVCache(), 0, None
    for _ in range(1000):
        mha(np.ones((1, 2), np.float32), causal=True, cache=cache)
        moves += cache._rows[0].k is not before
        before = cache._rows[0].k
    assert cache.length == 1000
    assert moves <= 8
    assert cache._rows[0].k.shape[-2] < 2 * 1000 + 16


def test_grouped_heads_cache_their_own_keys_and_values_only():
    caches = {}
    for n_kv_head in (1, 2, 4):
        caches[n_kv_head] = nn.KVCache(LAYERS)
        gpt(n_kv_head=n_kv_head)(PROMPT, cache=caches[n_kv_head])
    assert caches[4].nbytes == 2 * LAYERS * 2 * 6 * 24 * 8
    assert caches[2].nbytes * 2 == caches[1].nbytes * 4 == caches[4].nbytes


def test_a_fork_shares_the_rows_until_both_go_on():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :3], cache=cache)
    twin = cache.fork()
    assert all(a is b for a, b in zip(buffers(cache), buffers(twin), strict=True))
    before = buffers(cache)
    one = model(PROMPT[:, 3:], cache=cache).data
    assert all(a is b for a, b in zip(buffers(cache), before, strict=True))  # the first to go on copies nothing
    assert (cache.length, twin.length) == (6, 3)
    other = (PROMPT[:, 3:] + 1) % V
    two = model(other, cache=twin).data
    assert not any(np.shares_memory(a, b) for a, b in zip(buffers(cache), buffers(twin), strict=True))
    np.testing.assert_allclose(one, model(PROMPT).data[:, 3:], atol=1e-12)
    np.testing.assert_allclose(two, model(np.concatenate([PROMPT[:, :3], other], 1)).data[:, 3:], atol=1e-12)
    again = model(PROMPT[:, :1], cache=cache).data
    np.testing.assert_allclose(again, model(np.concatenate([PROMPT, PROMPT[:, :1]], 1)).data[:, 6:], atol=1e-12)


def test_many_forks_of_one_prompt_each_give_what_they_would_alone():
    model = gpt()
    root = nn.KVCache(LAYERS)
    model(PROMPT[:, :5], cache=root)
    forks = [root.fork() for _ in range(4)]
    for round_ in range(2):
        for token, fork in enumerate(forks):
            model(np.full((2, 1), token + round_), cache=fork)
    for token, fork in enumerate(forks):
        ids = np.concatenate([PROMPT[:, :5], np.full((2, 1), token), np.full((2, 1), token + 1), [[7], [7]]], 1)
        np.testing.assert_allclose(model([[7], [7]], cache=fork).data, model(ids).data[:, -1:], atol=1e-12)
    assert root.length == 5


def test_cropping_drops_the_last_tokens_and_others_can_follow():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    before = buffers(cache)
    cache.crop(2)
    assert cache.length == 2
    other = (PROMPT[:, 2:] + 3) % V
    expected = model(np.concatenate([PROMPT[:, :2], other], 1)).data[:, 2:]
    np.testing.assert_allclose(model(other, cache=cache).data, expected, atol=1e-12)
    assert all(a is b for a, b in zip(buffers(cache), before, strict=True))  # nobody shares it, so nothing is copied


def test_cropping_to_the_whole_length_changes_nothing():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :5], cache=cache)
    cache.crop(5)
    assert cache.length == 5
    np.testing.assert_allclose(model(PROMPT[:, 5:], cache=cache).data, model(PROMPT).data[:, 5:], atol=1e-12)


def test_cropping_one_fork_leaves_the_other_as_it_was():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    twin = cache.fork()
    cache.crop(2)
    model((PROMPT[:, 2:] + 3) % V, cache=cache)
    step = model(PROMPT[:, :1], cache=twin).data
    np.testing.assert_allclose(step, model(np.concatenate([PROMPT, PROMPT[:, :1]], 1)).data[:, -1:], atol=1e-12)


def test_cropping_to_nothing_makes_room_for_another_batch():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    cache.crop(0)
    assert (cache.length, cache.nbytes) == (0, 0)
    np.testing.assert_allclose(model(PROMPT[:1], cache=cache).data, model(PROMPT[:1]).data, atol=1e-12)


@pytest.mark.parametrize("n", [-1, 7])
def test_cropping_to_a_negative_or_too_large_length_is_refused(n):
    cache = nn.KVCache(LAYERS)
    gpt()(PROMPT, cache=cache)
    with pytest.raises(ValueError, match=f"crop keeps from 0 to 6 tokens, got {n}"):
        cache.crop(n)
    assert cache.length == 6


def test_select_takes_rows_of_the_batch_with_memory_of_their_own():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :5], cache=cache)
    chosen = cache.select([1, 0, 1])
    assert (chosen.length, cache.length) == (5, 5)
    step = model([[1], [2], [3]], cache=chosen).data
    for row, (source, token) in enumerate([(1, 1), (0, 2), (1, 3)]):
        np.testing.assert_allclose(step[row, 0], model([*PROMPT[source, :5], token]).data[-1], atol=1e-12)
    assert cache.length == 5
    np.testing.assert_allclose(model(PROMPT[:, 5:], cache=cache).data, model(PROMPT).data[:, 5:], atol=1e-12)


def test_tokens_that_were_cropped_are_not_selected():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    cache.crop(4)
    chosen = cache.select([1, 0])
    assert chosen.length == 4
    np.testing.assert_allclose(
        model(PROMPT[::-1, 4:], cache=chosen).data, model(PROMPT).data[::-1, 4:], rtol=0, atol=1e-12
    )


def test_a_cache_without_a_batch_axis_has_nothing_to_select_from():
    cache = nn.KVCache(LAYERS)
    gpt()(PROMPT[0], cache=cache)
    with pytest.raises(ValueError, match="there is no batch to select from"):
        cache.select([0])


# --------------------------------------------------------------------------------------------------------------------
# What does not fit


def test_a_cache_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="the cache is for 2 layers, the model has 3"):
        gpt()(PROMPT, cache=nn.KVCache(2))
    with pytest.raises(ValueError, match=r"this cache is for 2 layers: pass each layer its own part, cache\[i\]"):
        nn.MultiHeadAttention(5, 2)(np.ones((3, 5)), cache=nn.KVCache(2))
    with pytest.raises(ValueError, match="n_layer must be an integer of at least 1"):
        nn.KVCache(0)
    with pytest.raises(IndexError, match="layers 0 to 1, got 2"):
        nn.KVCache(2)[2]


def test_a_user_defined_model_passes_each_layer_its_part_of_the_cache(rng):
    layers = [nn.MultiHeadAttention(5, 2, rng=i).astype(np.float64) for i in range(2)]
    x = rng.standard_normal((6, 5))
    whole = layers[1](layers[0](x, causal=True), causal=True).data
    cache = nn.KVCache(2)
    for i in range(6):
        step = x[i : i + 1]
        for j, layer in enumerate(layers):
            step = layer(step, causal=True, cache=cache[j])
        np.testing.assert_allclose(step.data, whole[i : i + 1], atol=1e-12)


def test_another_batch_or_dtype_does_not_continue_a_cache():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    with pytest.raises(ValueError, match=r"k of shape \(2, 4, 6, 6\), float64 .* \(1, 4, 1, 6\), float64"):
        model([[1]], cache=cache)
    with pytest.raises(ValueError, match="float32: use a new cache for another batch or model"):
        model.astype(np.float32)([[1], [1]], cache=cache)
    assert cache.length == 6


def test_a_cache_and_new_tokens_beyond_the_context_are_refused_and_leave_the_cache():
    model = gpt()
    cache = nn.KVCache(LAYERS)
    model(PROMPT, cache=cache)
    with pytest.raises(ValueError, match=r"9 tokens \(6 of them in the cache\).*block_size is 8"):
        model(PROMPT[:, :3], cache=cache)
    assert cache.length == 6


def test_cross_attention_takes_no_cache():
    with pytest.raises(ValueError, match="cross-attention"):
        nn.MultiHeadAttention(5, 2)(np.ones((3, 5)), memory=np.ones((7, 5)), cache=nn.KVCache())


# --------------------------------------------------------------------------------------------------------------------
# Seen from outside


def test_repr_says_how_much_it_holds():
    cache = nn.KVCache(LAYERS)
    assert repr(cache) == "KVCache(0 tokens, 3 layers)"
    gpt()(PROMPT, cache=cache)
    assert repr(cache) == "KVCache(6 tokens, 3 layers, k (2, 4, 6, 6), v (2, 4, 6, 6))"


def test_a_recorded_cached_step_is_a_graph_of_new_rows_joined_to_cached_ones(rng):
    mha = nn.MultiHeadAttention(5, 2, rng=0)
    cache = nn.KVCache()
    x = rng.standard_normal((4, 5)).astype(np.float32)
    mha(x[:3], causal=True, cache=cache)
    last = Tensor(x[3:], name="X_4")
    with record():
        y = mha(last, causal=True, cache=cache)
    names, stack = set(), [y]
    while stack:
        t = stack.pop()
        names.add(t.name)
        stack.extend(i for i in (t.node.inputs if t.node else ()) if isinstance(i, Tensor))
    assert {"cached K", "cached V", "X_4", "W_K", "K", "V", "S", "Y"} <= names
    np.testing.assert_allclose(y.data, mha(x, causal=True).data[3:], atol=1e-6)


def test_a_trace_with_a_cache_shows_all_keys_and_one_query():
    model = gpt(n_kv_head=2)
    cache = nn.KVCache(LAYERS)
    model(PROMPT[:, :5], cache=cache)
    _, trace = model(PROMPT[:, 5:], cache=cache, trace=True)
    _, whole = model(PROMPT, trace=True)
    for step, expected in zip(trace.attention, whole.attention, strict=True):
        assert step.q.shape == (2, 4, 1, 6)
        np.testing.assert_allclose(step.k.data, expected.k.data, atol=1e-12)
        np.testing.assert_allclose(step.weights.data, expected.weights.data[..., -1:, :], atol=1e-12)
