"""Translators: the Transformer of the package, and the per-word and recurrent models of the translation examples.

They equal torch, every way of computing a result gives the same numbers, and bad input is named.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn
from tinygrad_mha.decoding.beam import beam_search
from tinygrad_mha.nn.module import copy_on_arrays

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "translation"))

import recurrent
from models import PerWord, Seq2Seq

PAD, START, END = 0, 1, 2
SRC = np.array([[3, 4, 5, 9, 10], [7, 6, 10, 0, 0], [8, 0, 0, 0, 0]])
TGT = np.array([[1, 3, 4, 4, 6, 5, 2], [1, 5, 6, 2, 0, 0, 0], [1, 4, 4, 5, 2, 0, 0]])


def transformer(norm_first=True, seed=3, **options):
    sizes = {"d_model": 6, "n_head": 2, "n_layer": 2, "d_ff": 13, "max_len": 11}
    return nn.Transformer(11, 7, **sizes, norm_first=norm_first, seed=seed, **options)


def seq2seq(cell):
    return Seq2Seq(11, 7, d_model=5, max_len=11, n_hidden=6, cell=cell, seed=3)


def per_word(**options):
    return PerWord(11, 7, d_model=6, d_ff=13, max_len=11, seed=3, **options)


MODELS = {
    "norm first": lambda: transformer(norm_first=True),
    "norm last": lambda: transformer(norm_first=False),
    "rnn": lambda: seq2seq("rnn"),
    "gru": lambda: seq2seq("gru"),
}
ALL = MODELS | {"per word": per_word}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(params=ALL)
def any_model(request):
    return ALL[request.param]()


def close(ours, theirs, tolerance=1e-10):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------------------
# Torch


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
@pytest.mark.parametrize("padded", [False, True])
def test_recurrent_layers_equal_torch(kind, padded, rng):
    torch = pytest.importorskip("torch")
    ours = getattr(recurrent, kind)(5, 7, rng=0).astype(np.float64)
    for _, p in ours.named_parameters():
        p.assign_(rng.standard_normal(p.shape))
    theirs = getattr(torch.nn, kind)(5, 7, batch_first=True, dtype=torch.float64)
    names = {"w_x": "weight_ih_l0", "w_h": "weight_hh_l0", "b_x": "bias_ih_l0", "b_h": "bias_hh_l0"}
    for name, other in names.items():
        getattr(theirs, other).data = torch.tensor(getattr(ours, name).numpy().T.copy())

    x, h = rng.standard_normal((3, 11, 5)), rng.standard_normal((3, 7))
    lengths = np.array([11, 4, 1]) if padded else np.array([11, 11, 11])
    valid = np.arange(11) < lengths[:, None]
    x_1, h_1 = tg.Tensor(x, requires_grad=True), tg.Tensor(h, requires_grad=True)
    states, last = ours(x_1, h_1, valid if padded else None)

    x_2, h_2 = (torch.tensor(a, requires_grad=True) for a in (x, h[None]))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x_2, torch.tensor(lengths), batch_first=True)
    packed_states, last_2 = theirs(packed, h_2)
    states_2, _ = torch.nn.utils.rnn.pad_packed_sequence(packed_states, batch_first=True)
    close(np.where(valid[..., None], states.numpy(), 0), states_2)
    close(last.numpy(), last_2[0])

    g, g_last = rng.standard_normal(states.shape), rng.standard_normal(last.shape)
    ((states * np.where(valid[..., None], g, 0)).sum() + (last * g_last).sum()).backward()
    ((states_2 * torch.tensor(g)).sum() + (last_2[0] * torch.tensor(g_last)).sum()).backward()
    close(x_1.grad, x_2.grad)
    close(h_1.grad, h_2.grad[0])
    for name, other in names.items():
        close(getattr(ours, name).grad.T, getattr(theirs, other).grad)


def torch_names(model):
    """Yield (our names, torch's name): torch stores (out, in), and W_Q, W_K and W_V in one matrix."""
    parts = [(f"encoder.{i}", f"encoder.layers.{i}", {"attn": "self_attn"}) for i in range(model.n_layer)]
    both = {"attn": "self_attn", "cross": "multihead_attn"}
    parts += [(f"decoder.{i}", f"decoder.layers.{i}", both) for i in range(model.n_layer)]
    for ours, theirs, attentions in parts:
        for a, b in attentions.items():
            yield [f"{ours}.{a}.w{x}" for x in "qkv"], f"{theirs}.{b}.in_proj_weight"
            yield [f"{ours}.{a}.b{x}" for x in "qkv"], f"{theirs}.{b}.in_proj_bias"
            yield [f"{ours}.{a}.wo"], f"{theirs}.{b}.out_proj.weight"
            yield [f"{ours}.{a}.bo"], f"{theirs}.{b}.out_proj.bias"
        for kind in ("weight", "bias"):
            yield [f"{ours}.mlp.c_fc.{kind}"], f"{theirs}.linear1.{kind}"
            yield [f"{ours}.mlp.c_proj.{kind}"], f"{theirs}.linear2.{kind}"
            for n in range(1, len(attentions) + 2):
                yield [f"{ours}.ln_{n}.{kind}"], f"{theirs}.norm{n}.{kind}"
    if model.norm_first:
        for kind in ("weight", "bias"):
            yield [f"ln_source.{kind}"], f"encoder.norm.{kind}"
            yield [f"ln_target.{kind}"], f"decoder.norm.{kind}"


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_equals_torch(norm_first, rng):
    torch = pytest.importorskip("torch")
    ours = transformer(norm_first).astype(np.float64)
    for _, p in ours.named_parameters():
        p.assign_(p.numpy() + 0.3 * rng.standard_normal(p.shape))
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    last = [torch.nn.LayerNorm(6, dtype=torch.float64) if norm_first else None for _ in range(2)]
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(6, 2, 13, **options), 2, last[0], enable_nested_tensor=False
    )
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(6, 2, 13, **options), 2, last[1])
    theirs = torch.nn.Transformer(
        6, 2, custom_encoder=encoder, custom_decoder=decoder, batch_first=True, dtype=torch.float64
    )
    parameters = dict(ours.named_parameters())
    theirs_by_name = dict(theirs.named_parameters())
    pairs = list(torch_names(ours))
    assert {b for _, b in pairs} == set(theirs_by_name)
    for names, other in pairs:
        theirs_by_name[other].data = torch.tensor(np.concatenate([parameters[name].numpy().T for name in names]))

    tables = [
        torch.tensor(e.weight.numpy(), requires_grad=True) for e in (ours.source_embedding, ours.target_embedding)
    ]
    head = torch.tensor(ours.head.numpy(), requires_grad=True)
    i = np.arange(6)
    angles = np.arange(11)[:, None] / 10000.0 ** ((i - i % 2) / 6)
    positions = torch.tensor(np.where(i % 2, np.cos(angles), np.sin(angles)))

    def embed(table, ids):
        return table[torch.tensor(ids)] * 6**0.5 + positions[: ids.shape[1]]

    padding = torch.tensor(SRC == PAD)
    n = TGT.shape[1] - 1
    logits = (
        theirs(
            embed(tables[0], SRC),
            embed(tables[1], TGT[:, :-1]),
            tgt_mask=torch.tensor(~nn.causal(n)),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_key_padding_mask=torch.tensor(TGT[:, :-1] == PAD),
        )
        @ head.T
    )
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 7), torch.tensor(TGT[:, 1:].ravel()), ignore_index=PAD)
    loss.backward()

    real = TGT[:, :-1] != PAD
    close(ours(SRC, TGT[:, :-1]).numpy()[real], logits[torch.tensor(real)])
    ours_loss = ours.loss(SRC, TGT)
    close(ours_loss.numpy(), loss)
    ours_loss.backward()
    for names, other in pairs:
        close(np.concatenate([parameters[name].grad.T for name in names]), theirs_by_name[other].grad)
    close(ours.source_embedding.weight.grad, tables[0].grad)
    close(ours.target_embedding.weight.grad, tables[1].grad)
    close(ours.head.grad, head.grad)


# --------------------------------------------------------------------------------------------------------------------
# Every way of computing a result


SMALL = {
    "norm first": lambda: nn.Transformer(5, 4, d_model=4, n_head=2, n_layer=1, d_ff=3, max_len=7, norm_first=True),
    "norm last": lambda: nn.Transformer(5, 4, d_model=4, n_head=2, n_layer=1, d_ff=3, max_len=7, norm_first=False),
    "rnn": lambda: Seq2Seq(5, 4, d_model=2, max_len=7, n_hidden=3, cell="rnn"),
    "gru": lambda: Seq2Seq(5, 4, d_model=2, max_len=7, n_hidden=3, cell="gru"),
    "per word": lambda: PerWord(5, 4, d_model=2, d_ff=3, max_len=7),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_equal_finite_differences(name, rng):
    """Small models, wide enough for layer norm to vary, with weights moved away from their initial values."""
    model = SMALL[name]().astype(np.float64)
    for _, p in model.named_parameters():
        p.assign_(p.numpy() + 0.3 * rng.standard_normal(p.shape))
    src, tgt = np.array([[3, 4, 3], [4, 0, 0]]), np.array([[1, 3, 3], [1, 2, 0]])
    no_effect = [path for path, _ in model.named_parameters() if path.endswith(".bk")]
    weights = rng.standard_normal(model(src, tgt).shape)

    class Logits(nn.Module):
        def __init__(self):
            self.model = model

        def forward(self):
            return self.model(src, tgt) * weights

    assert tg.gradcheck(Logits(), zero=[f"model.{path}" for path in no_effect]).ok


def test_padding_changes_no_logit(any_model):
    longer = np.pad(SRC, [(0, 0), (0, 3)])
    a, b = any_model(SRC, TGT[:, :-1]), any_model(longer, TGT[:, :-1])
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_a_sentence_has_the_same_logits_alone_and_in_a_batch(any_model):
    batch = any_model(SRC, TGT[:, :-1]).numpy()
    for i, (src, tgt) in enumerate(zip(SRC, TGT, strict=True)):
        alone = any_model(src[src != PAD], tgt[:-1]).numpy()
        np.testing.assert_allclose(alone, batch[i], rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_batch_is_the_mean_over_its_words(any_model):
    lengths = (TGT != PAD).sum(axis=1) - 1
    alone = [any_model.loss(s, t[t != PAD]).item() for s, t in zip(SRC, TGT, strict=True)]
    assert any_model.loss(SRC, TGT).item() == pytest.approx(np.average(alone, weights=lengths), rel=1e-5)


def test_later_target_words_change_no_earlier_logit(model):
    changed = TGT[:, :-1].copy()
    changed[:, 4] = 3
    a, b = model(SRC, TGT[:, :-1]).numpy(), model(SRC, changed).numpy()
    np.testing.assert_array_equal(a[:, :4], b[:, :4])
    assert np.abs(a[:, 4:] - b[:, 4:]).max() > 1e-3


@tg.no_grad
def test_cached_decoding_equals_the_whole_forward(model):
    tgt = TGT[:, :-1]
    whole = model(SRC, tgt).numpy()
    state = model.begin(SRC)
    for t in range(tgt.shape[1]):
        np.testing.assert_allclose(model.advance(state, tgt[:, t]).numpy(), whole[:, t], rtol=1e-5, atol=1e-6)


@tg.no_grad
def test_a_selected_state_continues_its_rows(model):
    rows = np.array([2, 0, 2, 1])
    state = model.begin(SRC)
    model.advance(state, TGT[:, 0])
    selected = model.advance(state.select(rows), TGT[rows, 1])
    np.testing.assert_allclose(selected.numpy(), model(SRC, TGT[:, :2]).numpy()[rows, 1], rtol=1e-5, atol=1e-6)


def translate_naively(model, src, limit):
    """Greedy decoding of one source by whole forward passes."""
    read = [START]
    while len(read) <= limit and (len(read) == 1 or read[-1] != END):
        read.append(int(model(src, np.array(read)).numpy()[-1].argmax()))
    return [word for word in read[1:] if word != END]


def search_naively(model, src, beam, limit):
    """Beam search for one source by whole forward passes."""

    def step(prefixes, parents):
        return tg.ops.log_softmax(model(np.repeat(src[None], len(prefixes), axis=0), prefixes).numpy()[:, -1])

    best = beam_search(step, [START], END, beam, limit).best.tokens
    return [word for word in best.tolist() if word != END]


@pytest.mark.parametrize("beam", [1, 3])
def test_generation_equals_whole_forward_passes_alone_and_in_a_batch(model, beam):
    model = model.astype(np.float64)
    together = [row.tolist() for row in model.generate(SRC, beam=beam, max_new_tokens=9)]
    sources = [row[row != PAD] for row in SRC]
    assert together == [model.generate(src, beam=beam, max_new_tokens=9).tolist() for src in sources]
    if beam == 1:
        assert together == [translate_naively(model, src, 9) for src in sources]
    assert together == [search_naively(model, src, beam, 9) for src in sources]


def test_a_beam_of_one_is_greedy_decoding(model):
    model = model.astype(np.float64)
    greedy = model.generate(SRC, max_new_tokens=8)
    for row, words in zip(SRC, greedy, strict=True):
        best = model.search(row, beam=1, max_new_tokens=8).best.tokens
        assert best[best != END].tolist() == words.tolist()


def test_a_wide_beam_finds_the_best_of_all_translations(model):
    model = model.astype(np.float64)
    src = SRC[0]
    found = model.search(src, beam=7**3, max_new_tokens=3)
    assert len(found.hypotheses) == 1 + 6 + 6 * 6 * 7
    for hypothesis in found.hypotheses[:: len(found.hypotheses) // 11]:
        read = np.concatenate([[START], hypothesis.tokens])
        logits = tg.ops.log_softmax(model(src, read[:-1]).numpy())
        total = np.take_along_axis(logits, read[1:, None], -1).sum()
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-9)
    assert np.exp([hypothesis.log_probability for hypothesis in found.hypotheses]).sum() == pytest.approx(1)


@pytest.mark.parametrize("length_penalty", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_translations_under_the_rule_of_generate(seed, length_penalty):
    model = nn.Transformer(5, 4, d_model=6, n_head=2, n_layer=1, d_ff=7, max_len=5, seed=seed).astype(np.float64)
    scores = {}
    for n in range(1, 5):
        for tokens in itertools.product(range(4), repeat=n):
            if END not in tokens[:-1] and (tokens[-1] == END or n == 4):
                with tg.no_grad():
                    logs = tg.ops.log_softmax(model([3, 4], [START, *tokens[:-1]]).numpy())
                total = logs[np.arange(n), list(tokens)].sum()
                scores[tokens] = total / ((5 + n) / 6) ** length_penalty
    found = model.search([3, 4], beam=4**4, max_new_tokens=4, length_penalty=length_penalty)
    assert tuple(found.best.tokens.tolist()) == max(scores, key=scores.get)
    assert found.best.score == pytest.approx(max(scores.values()), abs=1e-12)


@pytest.mark.parametrize("beam", [1, 3])
def test_logits_that_are_nan_are_refused_as_by_gpt(any_model, beam):
    for parameter in any_model.parameters():
        parameter.assign_(np.full(parameter.shape, np.nan))
    gpt = nn.GPT(nn.GPTConfig(vocab_size=7, block_size=5, n_layer=1, n_head=1, n_embd=2))
    gpt.wte.weight.assign_(np.full((7, 2), np.nan))
    with pytest.raises(ValueError, match="no token can be chosen") as by_gpt:
        tg.generate(gpt, [1], 1, temperature=0)
    with pytest.raises(ValueError, match="logits are nan or infinite") as error:
        any_model.generate(SRC, beam=1 if isinstance(any_model, PerWord) else beam)
    assert str(error.value) == str(by_gpt.value)


def test_cross_attention_keys_are_computed_once_for_a_whole_translation(monkeypatch):
    model, calls = transformer(), []
    project = nn.MultiHeadAttention.project_memory
    monkeypatch.setattr(
        nn.MultiHeadAttention, "project_memory", lambda self, x: calls.append(x.shape) or project(self, x)
    )
    model.generate(SRC, max_new_tokens=5)
    assert calls == [(3, 5, 6)] * model.n_layer


def test_the_trace_holds_the_attention_weights():
    model = transformer()
    logits, trace = model(SRC, TGT[:, :-1], trace=True)
    np.testing.assert_allclose(logits.numpy(), model(SRC, TGT[:, :-1]).numpy(), rtol=1e-5, atol=1e-6)
    assert [len(steps) for steps in trace] == [2, 2, 2]
    weights = trace.cross[1].weights.numpy()
    assert weights.shape == (3, 2, 6, 5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert not weights[np.broadcast_to((SRC == PAD)[:, None, None], weights.shape)].any()


def test_a_shared_table_is_one_parameter_whose_gradient_sums_all_uses():
    model = nn.Transformer(7, 7, 6, 2, 1, 13, max_len=11, shared=True, seed=0)
    assert model.head is model.source_embedding.weight is model.target_embedding.weight
    apart = nn.Transformer(7, 7, 6, 2, 1, 13, max_len=11, seed=0)
    state = model.state_dict()
    table = state["source_embedding.weight"]
    apart.load_state_dict(state | {"target_embedding.weight": table, "head": table})
    for m in (model, apart):
        m.loss(SRC % 7 + (SRC == 7), TGT).backward()
    three = (apart.source_embedding.weight, apart.target_embedding.weight, apart.head)
    np.testing.assert_allclose(model.head.grad, sum(p.grad for p in three), rtol=1e-4, atol=1e-6)


def test_without_positions_the_order_of_the_words_changes_no_answer():
    mixer = nn.MultiHeadAttention(6, 2, rng=0)
    order = [2, 0, 3, 1, 4]
    for positions, equal in [(False, True), (True, False)]:
        model = per_word(mixer=mixer, positions=positions)
        a, b = model(SRC[0]).numpy()[:5], model(SRC[0][order]).numpy()[:5]
        assert np.allclose(a[order], b, atol=1e-5) == equal


def test_without_a_mixer_each_answer_depends_on_one_word():
    changed = SRC.copy()
    changed[0, 1] = 8
    a, b = per_word()(SRC).numpy(), per_word()(changed).numpy()
    differs = np.abs(a - b).max(axis=-1) > 0
    assert np.argwhere(differs).tolist() == [[0, 1]]


def test_dropout_is_active_in_training_mode_only():
    model = transformer(dropout=0.5)
    a, b = (model(SRC, TGT[:, :-1]).numpy() for _ in range(2))
    assert np.abs(a - b).max() > 1e-3
    for beam in (1, 3):
        first, second = ([row.tolist() for row in model.generate(SRC, beam, max_new_tokens=6)] for _ in range(2))
        assert first == second
    assert model.search(SRC[0]).nodes == model.search(SRC[0]).nodes
    model.eval()
    np.testing.assert_array_equal(model(SRC, TGT[:, :-1]).numpy(), model(SRC, TGT[:, :-1]).numpy())


def test_every_dropout_changes_the_logits():
    """Each generator belongs to one dropout; another draw of any single one gives other logits."""
    model = transformer(dropout=0.5)
    names = sorted(model.generators())
    blocks = [f"encoder.{i}.{part}" for i in range(2) for part in ("attn", "drop")]
    blocks += [f"decoder.{i}.{part}" for i in range(2) for part in ("attn", "cross", "drop")]
    assert len(names) == 1 + len(blocks)
    assert all(any(name.startswith(part) for name in names) for part in ["drop", *blocks])
    reference = copy.deepcopy(model)(SRC, TGT[:, :-1]).numpy()
    for name in names:
        twin = copy.deepcopy(model)
        twin.generators()[name].random(dtype=np.float32)
        assert np.abs(twin(SRC, TGT[:, :-1]).numpy() - reference).max() > 1e-4, name


@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_acts_on_the_output_of_every_sublayer(norm_first, rng):
    model = transformer(norm_first)
    for block in (model.encoder[0], model.decoder[0]):
        block.drop.p = 1.0
    x = tg.Tensor(rng.standard_normal((3, 5, 6)).astype(np.float32))
    encoder, decoder = model.encoder[0], model.decoder[0]
    encoded = encoder(x, None, None)
    decoded = decoder(x, x, None)
    if norm_first:
        np.testing.assert_array_equal(encoded.numpy(), x.numpy())
        np.testing.assert_array_equal(decoded.numpy(), x.numpy())
    else:
        np.testing.assert_array_equal(encoded.numpy(), encoder.ln_2(encoder.ln_1(x)).numpy())
        np.testing.assert_array_equal(decoded.numpy(), decoder.ln_3(decoder.ln_2(decoder.ln_1(x))).numpy())


def test_dropout_acts_on_the_embeddings_of_both_sides():
    model = transformer()
    model.drop.p = 1.0
    a, b = np.array([3, 4, 5]), np.array([6, 8, 10])
    np.testing.assert_array_equal(model.encode(a).numpy(), model.encode(b).numpy())
    np.testing.assert_array_equal(model(a, [1, 3]).numpy(), model(b, [1, 5]).numpy())
    model.drop.p = 0.0
    assert np.abs(model.encode(a).numpy() - model.encode(b).numpy()).max() > 0.1
    assert np.abs(model(a, [1, 3]).numpy() - model(a, [1, 5]).numpy()).max() > 0.1


@pytest.mark.parametrize("beam", [1, 3])
def test_generation_leaves_every_mode_as_it_was(any_model, beam):
    if isinstance(any_model, PerWord):
        beam = 1
    for training in (True, False):
        any_model.train(training)
        any_model.named_modules()[-1][1].training = not training
        before = [module.training for _, module in any_model.named_modules()]
        any_model.generate(SRC, beam=beam, max_new_tokens=3)
        assert [module.training for _, module in any_model.named_modules()] == before
        assert any_model.training == training


def test_one_source_is_encoded_as_in_a_batch(model):
    alone = model.encode(SRC[0])
    assert alone.shape == model.encode(SRC).shape[1:]
    np.testing.assert_allclose(alone.numpy(), model.encode(SRC).numpy()[0], rtol=1e-5, atol=1e-6)


def test_search_keeps_four_beams_and_generation_one_by_default(model):
    model = model.astype(np.float64)
    assert model.search(SRC[0]).nodes == model.search(SRC[0], beam=4).nodes
    assert model.search(SRC[0]).nodes != model.search(SRC[0], beam=3).nodes
    assert model.generate(SRC[0]).tolist() == model.generate(SRC[0], beam=1).tolist()


@pytest.mark.parametrize("beam", [1, 2])
def test_an_answer_has_at_most_max_len_words(beam):
    model = transformer()
    model.ln_target.weight.assign_(np.zeros(6))  # the same logits at every step: word 5 is the most probable
    model.ln_target.bias.assign_(10 * model.head.numpy()[5])
    assert model.generate(SRC[0], beam=beam).tolist() == [5] * 11
    assert model.generate(SRC[0], beam=beam, max_new_tokens=100).tolist() == [5] * 11
    assert model.generate(SRC[0], beam=beam, max_new_tokens=4).tolist() == [5] * 4


def test_initial_word_vectors_have_the_spread_of_the_sinusoids():
    model = nn.Transformer(499, 503, d_model=64, n_head=2, n_layer=1, d_ff=13, max_len=11)
    for table in (model.source_embedding.weight, model.target_embedding.weight, model.head):
        assert table.numpy().std() * 64**0.5 == pytest.approx(1, abs=0.02)
    logits = model(np.arange(3, 14), np.arange(3, 14)).numpy()
    assert 0.5 < logits.std() < 2


def test_the_per_word_network_adds_its_residuals():
    class Double(nn.Module):
        def forward(self, x, key_allow):
            return 2 * x

    model = per_word(mixer=Double())
    x = 3 * model.embedding(SRC)
    expected = model.head(x + model.mlp(x))
    np.testing.assert_allclose(model(SRC).numpy()[:, :5], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_saved_model_translates_the_same(any_model, tmp_path):
    any_model.save(tmp_path / "model.safetensors")
    twin = copy.deepcopy(any_model)
    for p in twin.parameters():
        p.assign_(np.zeros_like(p.numpy()))
    twin.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(twin(SRC, TGT[:, :-1]).numpy(), any_model(SRC, TGT[:, :-1]).numpy())


# --------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("src", "error", "message"),
    [
        ([[3, 4], [0, 0]], ValueError, "src: sentence 1 is empty"),
        ([], ValueError, "1 words or more"),
        ([[]], ValueError, "1 words or more"),
        ([3] * 12, ValueError, "12 words, but this model has max_len = 11"),
        ([3, 11], IndexError, r"src\[1\] is 11, expected 0 to 10"),
        ([0.5], TypeError, "must be integers"),
    ],
)
def test_bad_sources_are_named(any_model, src, error, message):
    with pytest.raises(error, match=message):
        any_model.generate(src)
    with pytest.raises(error, match=message):
        any_model.loss(src, TGT[0])


@pytest.mark.parametrize(
    ("tgt", "error", "message"),
    [
        ([1], ValueError, "2 words or more"),
        ([1, *[3] * 11, 2], ValueError, "13 words"),
        ([1, 7], IndexError, r"tgt\[1\] is 7, expected 0 to 6"),
    ],
)
def test_bad_targets_are_named(any_model, tgt, error, message):
    with pytest.raises(error, match=message):
        any_model.loss(SRC[0], tgt)


def test_batches_of_different_sizes_are_refused(model):
    with pytest.raises(ValueError, match=r"got \(3, 5\) and \(2, 6\)"):
        model(SRC, TGT[:2, :-1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Transformer(11, 7, 5, 2, 1, 8, 9), "multiple of n_head"),
        (lambda: nn.Transformer(11, 7, 6, 2, 1, 8, 9, shared=True), "11 and 7 words"),
        (lambda: nn.Transformer(11, 7, 6, 2, 1, 8, 9, norm="pre"), "norm_first must be True .* got 'pre'"),
        (lambda: nn.Transformer(11, 7, 6, 2, 1, 8, 9, "post"), "norm_first must be True .* got 'post'"),
        (lambda: nn.Transformer(11, 7, 6, 2, 0, 8, 9), "n_layer"),
        (lambda: nn.Transformer(11, 2, 6, 2, 1, 8, 9), "three different ids"),
        (lambda: nn.Transformer(11, 7, 6, 2, 1, 8, 9, pad=1), "three different ids"),
        (lambda: Seq2Seq(11, 7, 6, 9, cell="lstm"), "'rnn', 'gru'"),
        (lambda: per_word().generate(SRC, beam=2), "leave beam at 1"),
        (lambda: transformer().search(SRC), r"one source \(S,\)"),
        (lambda: transformer().generate(SRC, max_new_tokens=0), "max_new_tokens"),
        (lambda: recurrent.RNN(5, 7)(np.zeros((3, 5))), r"\(B, T, n_in\)"),
        (lambda: recurrent.RNN(5, 7)(np.zeros((3, 2, 6))), "last axis of length 5"),
        (lambda: recurrent.GRU(5, 7)(np.zeros((3, 2, 5)), np.zeros((3, 5))), r"\(3, 7\)"),
        (lambda: recurrent.GRU(5, 7)(np.zeros((3, 2, 5)), valid=np.ones((3, 2))), "valid must be boolean"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_translates_with_a_twin_on_arrays_that_computes_the_same(norm_first):
    sizes = {"d_model": 6, "n_head": 2, "n_layer": 2, "d_ff": 12, "max_len": 9, "dropout": 0.5}
    model = nn.Transformer(11, 7, norm_first=norm_first, **sizes).astype(np.float64)
    twin = copy_on_arrays(model)
    src = np.array([[3, 4, 5, 0], [6, 3, 9, 10]])
    with model.evaluating(), tg.no_grad():
        states = model.begin(src), twin.begin(src)
        for tokens in ([1, 1], [3, 5]):
            expected, got = (m.advance(s, np.array(tokens)) for m, s in zip((model, twin), states, strict=True))
            assert isinstance(got, np.ndarray)
            np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)
