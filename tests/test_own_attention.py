"""An attention of a user's own in a GPT: what it takes and gives, and what is refused with the reason."""

import base64
import copy
import json
import pickle
import re

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops

SIZES = {"vocab_size": 11, "block_size": 13, "n_layer": 2, "n_head": 2, "n_embd": 6}
GUIDE = "docs/your_own_attention.md"


class Gain(nn.Module):
    """Composed of ours: the scores of each head times a learned gain."""

    def __init__(self, config, rng):
        position = config.make_position() if config.make_position().acts_on == "attention" else None
        self.mha = nn.MultiHeadAttention(config.n_embd, config.n_head, position=position, rng=rng)
        self.gain = tg.Tensor(np.full((config.n_head, 1, 1), 1.5), requires_grad=True)

    def forward(self, x, edit=None, **options):
        def change(name, tensor):
            tensor = tensor * self.gain if name == "scores" else tensor
            return tensor if edit is None else edit(name, tensor)

        return self.mha(x, causal=True, edit=change, **options)


class Linear(nn.Module):
    """From primitives: weights that are proportional to elu(scores) + 1 instead of their exponentials."""

    is_attention = True

    def __init__(self, config, rng):
        self.n_head = config.n_head
        self.q, self.k, self.v, self.o = (nn.Linear(config.n_embd, config.n_embd, rng=rng) for _ in range(4))

    def forward(self, x, cache=None, positions=None, key_allow=None, edit=None):
        show = edit or (lambda name, tensor: tensor)
        q, k, v = (nn.split_heads(project(x), self.n_head) for project in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = show("q", q), show("k", k), show("v", v)
        scores = show("scores", q @ k.mT / q.shape[-1] ** 0.5)
        allow = nn.allow_past(q, k, key_allow)
        positive = ops.sigmoid(scores) if allow is None else ops.where(allow, ops.sigmoid(scores), 0.0)
        weights = show("weights", positive / (positive.sum(axis=-1, keepdims=True) + 1e-6))
        return self.o(show("concat", nn.join_heads(show("heads", weights @ v))))


OWN = [Gain, Linear]


def make(attention, **settings):
    return nn.GPT(nn.GPTConfig(**{**SIZES, **settings}), seed=0, attention=attention)


@pytest.mark.parametrize("attention", OWN)
def test_a_cache_and_batches_of_different_lengths_give_what_one_prompt_gives_without(attention):
    model, prompts = make(attention), [[3, 1, 4, 1, 5], [9], [2, 6]]
    alone = [tg.generate(model, p, 5, temperature=0, use_cache=False)[0] for p in prompts]
    for use_cache in (True, False):
        rows = tg.generate(model, prompts, 5, temperature=0, use_cache=use_cache)
        assert [row.tolist() for row in rows] == [row.tolist() for row in alone]


@pytest.mark.parametrize("position", ["rotary", "alibi", "relative"])
def test_a_composition_uses_the_scheme_of_the_configuration(position):
    model = make(Gain, position=position, n_embd=8)
    rows = [tg.generate(model, [[3, 1, 4], [2]], 5, temperature=0, use_cache=use_cache) for use_cache in (True, False)]
    assert [row.tolist() for row in rows[0]] == [row.tolist() for row in rows[1]]


@pytest.mark.parametrize("attention", OWN)
def test_it_trains_saves_copies_and_is_checked(attention, tmp_path, rng):
    model = make(attention)
    ids = rng.integers(0, 11, (3, 8))
    optimizer = tg.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.save(tmp_path / "model.safetensors")
    other = nn.GPT(model.config, seed=7, attention=attention)
    other.load(tmp_path / "model.safetensors")
    for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(same(ids).data, model(ids).data)
    exact, x = copy.deepcopy(model.h[1].attn).astype(np.float64), rng.standard_normal((5, 6))
    cotangent = rng.standard_normal((5, 6))
    tg.gradcheck(lambda x: (exact(x) * cotangent).sum(), x)


def test_a_trace_and_edits_see_its_own_numbers():
    model = make(Linear)
    logits, trace = model([[3, 1, 4, 1, 5]], trace=True)
    steps = trace.attention[1]
    np.testing.assert_array_equal(logits.data, model([[3, 1, 4, 1, 5]]).data)
    expected = np.tril(ops.sigmoid(steps.scores.numpy()))
    expected /= expected.sum(axis=-1, keepdims=True) + 1e-6
    np.testing.assert_allclose(steps.weights.data, expected, rtol=1e-5)
    assert steps.masked is None  # it has no such step
    names = []
    model([3, 1], edit=lambda name, tensor: (names.append(name), tensor)[1])
    assert names[:7] == [f"h.0.{name}" for name in ("q", "k", "v", "scores", "weights", "heads", "concat")]
    without = model([3, 1, 4], edit=lambda name, t: t * 0.0 if name == "h.1.heads" else t)
    assert not np.allclose(without.data, model([3, 1, 4]).data)


def test_the_graph_shows_the_own_module():
    model = make(Linear)
    graph = tg.graph(model([[3, 1, 4]]), depth=3)
    assert "Linear" in graph.dot


def own(forward):
    """A factory of modules with this forward."""

    class Own(nn.Module):
        def __init__(self, config, rng):
            self.w = tg.Tensor(rng.standard_normal((config.n_embd, config.n_embd)), requires_grad=True)

    Own.forward = forward
    return Own


def bad_batch(self, x):
    return x * 2.0 if x.ndim == 3 else x * 1.0


def pads_count(self, x, key_allow=None):
    total = (np.tri(x.shape[-2], dtype=np.float32) @ x) if x.ndim == 2 else x * 1.0
    return total if x.ndim == 2 else ops.matmul(np.tri(x.shape[-2], dtype=np.float32), x)


def forgets(self, x, cache=None):
    q = k = x @ self.w * 0.1  # small, so that every token attends to several
    if cache is not None:
        cache.append(k, k)  # and does not use what it returns
    return nn.attention(q, k, k, allow=nn.causal(q.shape[-2]))


def masks_from_the_left(self, x, cache=None):
    q = k = x @ self.w * 0.1  # small, so that every token attends to several
    if cache is not None:
        k, _ = cache.append(k, k)
    return nn.attention(q, k, k, allow=np.tri(q.shape[-2], k.shape[-2], dtype=bool))


REFUSED = [
    (lambda config, rng: None, TypeError, "must return a Module, got a NoneType"),
    (lambda config: None, TypeError, r"is called as attention\(config, rng\): too many positional arguments"),
    (nn.MultiHeadAttention(6, 2), TypeError, "must be a class or function, .* got a MultiHeadAttention"),
    (lambda config, rng: nn.MultiHeadAttention(6, 2, rng=rng), ValueError, "lets a token see later ones"),
    (own(lambda self, x: (x, x)), TypeError, "returned a tuple, not one Tensor"),
    (own(lambda self, x: x.numpy()), TypeError, "returned a ndarray, not one Tensor"),
    (
        own(lambda self, x: x[..., :3]),
        ValueError,
        r"must return the shape and dtype of its input, \(3, 6\) float32, got \(3, 3\)",
    ),
    (own(lambda self, x: x * np.ones(6)), ValueError, r"\(3, 6\) float32, got \(3, 6\) float64"),
    (own(lambda self, x: x.concat(x)), ValueError, "fails on 3 tokens: AttributeError"),
    (own(lambda self, x, **options: x @ self.w), ValueError, "must call cache.append once .* holds 0 tokens"),
    (own(bad_batch), ValueError, "different numbers for a batch of one sequence"),
    (own(pads_count), ValueError, "declares key_allow, but a padding token in front changes its result"),
    (own(forgets), ValueError, "declares cache, but returns different numbers with it than without it"),
    (own(masks_from_the_left), ValueError, "declares cache, but returns different numbers with it than without it"),
    (
        lambda config, rng: nn.Linear(6, config["n"]),
        TypeError,
        r"attention\(config, rng\) failed: .* config is a GPTConfig",
    ),
]


@pytest.mark.parametrize(("attention", "error", "message"), REFUSED)
def test_a_missed_contract_is_refused_when_the_model_is_made(attention, error, message):
    with pytest.raises(error, match=message) as raised:
        make(attention)
    assert GUIDE in str(raised.value)


def test_padding_in_front_is_tried_at_the_positions_of_the_tokens_behind_it():
    class Table(nn.Module):
        """Adds a vector of each position to its token: unlike rotary positions, a shift changes the result."""

        def __init__(self, config, rng):
            self.table = nn.Embedding(config.block_size, config.n_embd, std=1.0, rng=rng)
            self.mha = nn.MultiHeadAttention(config.n_embd, config.n_head, rng=rng)

        def forward(self, x, positions=None, key_allow=None):
            places = np.arange(x.shape[-2]) if positions is None else positions
            return self.mha(x + self.table(places), causal=True, key_allow=key_allow)

    assert make(Table)([[3, 1, 4]]).shape == (1, 3, 11)


def test_an_attention_that_states_that_it_is_not_causal_may_let_tokens_see_later_ones():
    looks_ahead = own(lambda self, x: x + 0.1 * x.mean(axis=-2, keepdims=True))
    with pytest.raises(ValueError, match="or state is_causal = False in the class"):
        make(looks_ahead)
    looks_ahead.is_causal = False
    model = make(looks_ahead)
    assert not np.allclose(model([1, 2, 3]).numpy()[:2], model([1, 2]).numpy())


def test_a_scheme_of_the_configuration_that_the_attention_leaves_out_is_refused():
    with pytest.raises(ValueError, match=r"does not hold the scheme of position=.alibi.: give it"):
        make(Linear, position="alibi")


def test_a_forward_of_x_alone_generates_without_a_cache_and_refuses_the_rest():
    model = make(own(lambda self, x: x @ self.w))
    assert tg.generate(model, [1, 2, 3], 3, temperature=0).shape == (1, 6)
    assert model([1, 2], trace=True)[1].attention[0] == nn.AttentionTrace()
    with pytest.raises(ValueError, match="takes no cache: declare cache"), tg.no_grad():
        model([1, 2], cache=nn.KVCache(2))
    with pytest.raises(ValueError, match="takes no key_allow"):
        tg.generate(model, [[1, 2], [3]], 3)
    with pytest.raises(ValueError, match="takes no edit"):
        model([1, 2], edit=lambda name, tensor: tensor)
    with pytest.raises(ValueError, match="did not show its weights"):
        tg.viz.heatmap(model([1, 2], trace=True)[1])


def test_an_edit_that_is_declared_and_ignored_is_refused():
    model = make(own(lambda self, x, edit=None: x @ self.w))
    with pytest.raises(ValueError, match="ignores edit"):
        model([1, 2], edit=lambda name, tensor: tensor)


def test_no_hugging_face_folder_holds_it(tmp_path):
    with pytest.raises(ValueError, match=r"no Hugging Face folder can hold the attention Gain\. Use save"):
        make(Gain).save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_the_check_disturbs_nothing():
    class Noisy(Gain):
        def __init__(self, config, rng):
            super().__init__(config, rng)
            self.rng, self.calls = rng, 0

        def forward(self, x, **options):
            self.rng.standard_normal()
            self.calls += 1
            return super().forward(x, **options)

    model = make(Noisy)
    assert model.h[0].attn.calls == 0
    for name, tensor in make(Gain).state_dict().items():
        np.testing.assert_array_equal(tensor, model.state_dict()[name])


def test_targets_in_the_place_of_the_cache_are_refused_with_the_right_call():
    with pytest.raises(TypeError, match=r"cache must be a KVCache.*model\.loss\(idx, targets\)"):
        nn.GPT(nn.GPTConfig(**SIZES))([[1, 2]], [[2, 3]])


# --------------------------------------------------------------------------------------------------------------------
# The walkthrough


class Talking(nn.Module):
    """The heads' scores are mixed before the softmax (talking heads); the mixture is the identity at first."""

    def __init__(self, config, rng):
        self.mha = nn.MultiHeadAttention(config.n_embd, config.n_head, n_kv_head=config.n_kv_head, rng=rng)
        self.mix = tg.Tensor(np.eye(config.n_head), requires_grad=True, name="mix")

    def forward(self, x, edit=None, **options):
        def change(name, tensor):
            if name == "scores":
                tensor = ops.einsum("hg,...gqk->...hqk", self.mix, tensor)
            return tensor if edit is None else edit(name, tensor)

        return self.mha(x, causal=True, edit=change, **options)


def equations(page, head=0):
    texts = [text for step in read_page(page)["walks"][head] for text in (*step["forward"], *step["backward"])]
    return {text.partition(" = ")[0]: text.replace("\u2060", "").replace("\u00a0", " ") for text in texts}


def read_page(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)[1])


def values_of(page, what="values"):
    values = {}
    for name, matrix in read_page(page)["matrices"].items():
        if matrix[what] is None:
            continue
        ((kind, text),) = matrix[what].items()
        values[name] = np.frombuffer(base64.b64decode(text), "<" + kind).reshape(matrix["rows"], matrix["columns"])
    return values


FIELDS = {"Q": "q", "K": "k", "V": "v", "scores": "scores", "masked": "masked", "S": "weights", "H": "heads"}


@pytest.mark.parametrize("attention", [*OWN, Talking])
def test_the_walkthrough_of_a_gpt_shows_the_numbers_of_its_own_attention(attention):
    model, ids = make(attention), [3, 1, 4, 1, 5]
    page = tg.walkthrough(model, ids, layer=1)
    logits, trace = model(ids, trace=True)
    tg.ops.cross_entropy(logits[:-1], ids[1:]).backward()
    values = values_of(page)
    for title, field in FIELDS.items():
        step = getattr(trace.attention[1], field)
        assert (step is None) == (f"{title}_1" not in values)
        for head in range(2 if step is not None else 0):
            np.testing.assert_allclose(values[f"{title}_{head + 1}"], step.data[head], rtol=1e-4, atol=1e-6)
    assert all(step["agrees"] for step in read_page(page)["decode"])


def test_its_equations_are_read_from_its_run():
    shown = equations(tg.walkthrough(make(Gain), [3, 1, 4, 1, 5], layer=0), head=1)
    assert shown["Q_2"] == "Q_2 = X @ W_Q2"
    assert shown["scores_2"] == "scores_2 = Q_2 @ K_2ᵀ / √3 * gain_2"
    assert shown["∂Q_2"] == "∂Q_2 = ∂scores_2 * gain_2 / √3 @ K_2"
    assert shown["Concat"] == "Concat = H_1 | H_2"
    shown = equations(tg.walkthrough(make(Linear), [3, 1, 4, 1, 5], layer=0))
    assert "masked_1" not in shown
    positive = "where(condition 5×5, sigmoid({}), 0)"
    first, again = positive.format(" scores_1 "), positive.format("scores_1")
    assert shown["S_1"] == f"S_1 = {first} / (row sum({again}) + 1e−6)"


def test_heads_that_depend_on_each_other_are_shown_together_although_their_numbers_agree():
    page = tg.walkthrough(make(Talking), [3, 1, 4, 1, 5], layer=0)
    shown = equations(page)
    assert all(part in shown["scores_1"] for part in ("Q_1", "K_1", "Q_2", "K_2", "mix"))


def test_keys_that_heads_share_are_shown(rng):
    page = tg.walkthrough(make(Talking, n_embd=8, n_head=4, n_kv_head=2), [3, 1, 4, 1, 5], layer=0)
    assert {"K_1", "K_2", "H_4"} <= set(values_of(page))
    assert "K_3" not in values_of(page)


def test_an_attention_by_itself_is_shown_too(rng):
    page = tg.walkthrough(Gain(nn.GPTConfig(**SIZES), 0), rng.standard_normal((5, 6)))
    assert equations(page)["scores_1"] == "scores_1 = Q_1 @ K_1ᵀ / √3 * gain_1"
    with pytest.raises(ValueError, match="causal by itself"):
        tg.walkthrough(Gain(nn.GPTConfig(**SIZES), 0), rng.standard_normal((5, 6)), causal=False)


def test_a_walkthrough_without_the_steps_it_needs_says_which_are_missing():
    class Silent(Linear):
        def forward(self, x, edit=None, **options):
            show = edit or (lambda name, tensor: tensor)
            return super().forward(x, edit=lambda name, t: show(name, t) if name in ("q", "heads") else t, **options)

    with pytest.raises(ValueError, match=r"Silent does not so show k, v, weights\. Let its forward call .*edit\(name"):
        tg.walkthrough(make(Silent), [1, 2, 3], layer=0)
    with pytest.raises(ValueError, match=r"Own does not so show q, k, v, weights, heads"):
        tg.walkthrough(make(own(lambda self, x: x @ self.w)), [1, 2, 3])


class Temperature(nn.CausalSelfAttention):
    """GPT-2's attention with other scores; its `per_head`, which it inherits, does not know."""

    def forward(self, x, edit=None, **options):
        def change(name, tensor):
            tensor = tensor / 2.0 if name == "scores" else tensor
            return tensor if edit is None else edit(name, tensor)

        return super().forward(x, edit=change, **options)


@pytest.mark.parametrize("settings", [{}, {"position": "relative"}, {"n_kv_head": 1, "window": 3, "score": "sinks"}])
def test_a_subclass_of_the_attention_of_gpt_2_keeps_its_settings(settings, rng):
    same, model = make(nn.CausalSelfAttention, **settings), make(Temperature, **settings)
    built_in = nn.GPT(same.config)
    assert sum(p.size for p in same.h[0].attn.parameters()) == sum(p.size for p in model.h[0].attn.parameters())
    model.load_state_dict(same.state_dict())
    for parameter in model.h[0].attn.heads.position.parameters():
        parameter.assign_(rng.standard_normal(parameter.shape))
    assert not np.allclose(model([3, 1, 4, 1]).data, same([3, 1, 4, 1]).data, rtol=1e-7)
    assert built_in([3, 1]).shape == same([3, 1]).shape
    rows = [tg.generate(model, [[3, 1, 4], [2]], 5, temperature=0, use_cache=use_cache) for use_cache in (True, False)]
    assert [row.tolist() for row in rows[0]] == [row.tolist() for row in rows[1]]


def test_the_walkthrough_shows_an_overridden_forward_and_not_the_inherited_per_head():
    page = tg.walkthrough(make(Temperature), [3, 1, 4, 1, 5], layer=0)
    assert equations(page)["scores_1"] == "scores_1 = Q_1 @ K_1ᵀ / √3 / 2"
    assert equations(page)["V_1"] == "V_1 = X @ W_V1 + b_V1"
    assert np.array_equal(values_of(page)["W_V1"], make(Temperature).h[0].attn.c_attn.weight.numpy()[:, 12:15])


def test_an_attention_without_an_axis_of_heads_has_one_head(rng):
    class One(nn.Module):
        is_attention = True

        def __init__(self, config, rng):
            self.q, self.k, self.v = (nn.Linear(config.n_embd, config.n_embd, rng=rng) for _ in range(3))

        def forward(self, x, edit=None):
            show = edit or (lambda name, tensor: tensor)
            q, k, v = (show(name, layer(x)) for name, layer in zip("qkv", (self.q, self.k, self.v), strict=True))
            return ops.attend(q, k, v, nn.causal(x.shape[-2]), observe=show)

    page = tg.walkthrough(make(One), [3, 1, 4, 1, 5], layer=0)
    assert equations(page)["scores_1"] == "scores_1 = Q_1 @ K_1ᵀ / √6"
    assert len(read_page(page)["walks"]) == 1


def test_heads_that_are_changed_before_they_are_shown_are_written_head_by_head():
    class Scaled(Gain):
        def forward(self, x, edit=None, **options):
            def change(name, tensor):
                tensor = ops.tanh(tensor) * self.gain if name == "q" else tensor
                return tensor if edit is None else edit(name, tensor)

            return self.mha(x, causal=True, edit=change, **options)

    shown = equations(tg.walkthrough(make(Scaled), [3, 1, 4, 1, 5], layer=0), head=1)
    assert shown["Q_2"] == "Q_2 = tanh( X @ W_Q2 ) * gain_2"
    assert shown["∂gain_2"].startswith("∂gain_2 = sum( ∂Q_2 * tanh( X @ W_Q2 )")


def test_heads_of_a_matrix_that_is_no_product_are_its_columns():
    class Scaled(nn.Module):
        def __init__(self, linear):
            self.linear = linear
            self.gain = tg.Tensor(np.arange(1, 7, dtype=np.float32), requires_grad=True, name="gain")

        def forward(self, x):
            return self.linear(x) * self.gain

    class Own(Linear):
        def __init__(self, config, rng):
            super().__init__(config, rng)
            self.q = Scaled(self.q)

    model, ids = make(Own), [3, 1, 4, 1, 5]
    page = tg.walkthrough(model, ids, layer=1)
    _, trace = model(ids, trace=True)
    np.testing.assert_allclose(values_of(page)["Q_2"], trace.attention[1].q.data[1], rtol=1e-5)
    assert equations(page, head=1)["Q_2"].replace(" ", "").endswith("*gain)[:,3:6]")


@pytest.mark.parametrize("n_head", [1, 2, 3])
@pytest.mark.parametrize("is_joint", [False, True])
def test_a_learned_parameter_below_another_operation_is_shown_with_its_value_and_gradient(n_head, is_joint, rng):
    class Sharp(Gain):
        def forward(self, x, edit=None, **options):
            def change(name, tensor):
                if name == "scores":  # the gain is used twice: its gradient is a sum
                    factor = ops.softmax(self.gain, axis=-3) if is_joint else self.gain.exp()
                    tensor = tensor * factor * self.gain.exp()
                return tensor if edit is None else edit(name, tensor)

            return self.mha(x, causal=True, edit=change, **options)

    model, ids = make(Sharp, n_head=n_head), [3, 1, 4, 1, 5]
    gain = model.h[1].attn.gain
    gain.name = "log_temp"
    gain.assign_(rng.standard_normal(gain.shape))
    page = tg.walkthrough(model, ids, layer=1)
    tg.ops.cross_entropy(model(ids)[:-1], ids[1:]).backward()
    matrices, texts = values_of(page), equations(page)
    gradients = values_of(page, "gradient")
    assert not any("constant" in text for text in texts.values())
    if n_head > 1 and not is_joint:
        titles = [f"log_temp{i + 1}" for i in range(n_head)]
        root = {2: "√3", 3: "√2"}[n_head]
        expected = f"scores_1 = Q_1 @ K_1ᵀ / {root} * exp( log_temp1 ) * exp(log_temp1)"
        assert texts["scores_1"].replace("  ", " ") == expected
    else:
        titles = ["log_temp"]
    values, gradient = (np.concatenate([table[t].ravel() for t in titles]) for table in (matrices, gradients))
    np.testing.assert_allclose(values, gain.data.ravel(), rtol=1e-6)
    np.testing.assert_allclose(gradient, gain.grad.ravel(), rtol=1e-4, atol=1e-7)
    assert np.abs(gain.grad).max() > 1e-4


def test_a_multi_head_attention_put_in_by_hand_is_shown_with_the_mask_that_the_gpt_uses():
    model = nn.GPT(nn.GPTConfig(**SIZES))
    model.h[0].attn = nn.MultiHeadAttention(6, 2, rng=0)  # without causal=True
    page = tg.walkthrough(model, [3, 1, 4], layer=0)
    assert "masked_1" not in equations(page)
    assert (values_of(page)["S_1"] > 0).all()
