"""Hugging Face folders: Llama held against transformers, what survives a round trip, and the end of a text.

The folders of GPT-1 and GPT-2 are tested in test_gpt.py and test_reference_models.py.
"""

import copy
import json
import os

import numpy as np
import pytest
from recorded_data import project

import tinygrad_mha as tg
from tinygrad_mha import nn
from tinygrad_mha.cli import main
from tinygrad_mha.data import BYTE_SYMBOLS, BPETokenizer, CharTokenizer, load_tokenizer
from tinygrad_mha.files import CheckpointError, load_arrays, save_arrays

LLAMA = {"norm": "rms", "activation": "swiglu", "position": "rotary", "bias": False}
SIZES = {"vocab_size": 13, "block_size": 17, "n_layer": 2, "n_head": 6, "n_embd": 36}
IDS = np.random.default_rng(0).integers(0, 13, (3, 11))
FORMS = [
    {},
    {"n_kv_head": 2, "n_inner": 23, "tie_weights": False},
    {"n_kv_head": 1, "rope_base": 500.0, "eps": 1e-3},
    {"n_kv_head": 3, "position": nn.positions.Rotary(base=700.0)},
]
GPTS = [{}, {"norm_first": False}, LLAMA]


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a.data if hasattr(a, "backward") else a, b, rtol=0, atol=tolerance)


def make_model(**settings):
    """A GPT in float64 whose parameters are all random, so that each one matters."""
    model = nn.GPT(nn.GPTConfig(**{**SIZES, **settings})).astype(np.float64).eval()
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        parameter.assign_(("ln_" in name and "weight" in name) + 0.4 * rng.standard_normal(parameter.shape))
    return model


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def edit_json(path, **changes):
    content = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "delete"}))


def edit_arrays(folder, change):
    arrays = load_arrays(folder / "model.safetensors")
    save_arrays(folder / "model.safetensors", change(arrays), {"format": "pt"})


@pytest.fixture
def exact(transformers, monkeypatch):
    """transformers with a Llama in float64 throughout; its own computes norms and angles in float32 always."""
    import torch
    from transformers.models.llama import modeling_llama

    class Double:
        float = float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(modeling_llama, "torch", Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return transformers


# --------------------------------------------------------------------------------------------------------------------
# Llama: the public model of 260 000 parameters


@pytest.fixture(scope="module")
def story(data):
    """stories260K in float64, the recorded results, and its folder."""
    folder = data / "hf-llama" / "stories260K"
    return nn.GPT.from_pretrained(folder, dtype=np.float64), np.load(folder / "expected_float64.npz"), folder


def compute_gradients(model, ids):
    model.zero_grad()
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward(leaves_only=True)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def to_their_layout(gradients, config):
    """Our gradients under the names and in the layout of transformers' Llama, written out name by name."""
    theirs = {"model.embed_tokens.weight": gradients["wte.weight"], "model.norm.weight": gradients["ln_f.weight"]}
    if "lm_head.weight" in gradients:
        theirs["lm_head.weight"] = gradients["lm_head.weight"]
    key_width = (config.n_kv_head or config.n_head) * config.n_embd // config.n_head
    for i in range(config.n_layer):
        layer = f"model.layers.{i}"
        ours = {name.removeprefix(f"h.{i}."): g for name, g in gradients.items() if name.startswith(f"h.{i}.")}
        parts = np.split(ours["attn.c_attn.weight"], [config.n_embd, config.n_embd + key_width], axis=1)
        for name, part in zip("qkv", parts, strict=True):
            theirs[f"{layer}.self_attn.{name}_proj.weight"] = part.T
        theirs[f"{layer}.input_layernorm.weight"] = ours["ln_1.weight"]
        theirs[f"{layer}.self_attn.o_proj.weight"] = ours["attn.c_proj.weight"].T
        theirs[f"{layer}.post_attention_layernorm.weight"] = ours["ln_2.weight"]
        theirs[f"{layer}.mlp.gate_proj.weight"] = ours["mlp.c_gate.weight"].T
        theirs[f"{layer}.mlp.up_proj.weight"] = ours["mlp.c_fc.weight"].T
        theirs[f"{layer}.mlp.down_proj.weight"] = ours["mlp.c_proj.weight"].T
    return theirs


def compare_with(theirs, model, ids):
    """Hold logits, hidden states, the loss and all gradients against those of a Llama of transformers."""
    import torch

    result = theirs(torch.tensor(ids), output_hidden_states=True)
    loss = torch.nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), torch.tensor(ids[:, 1:]).flatten())
    loss.backward()
    logits, trace = model(ids, trace=True)
    close(logits, result.logits.detach().numpy())
    close(model(ids), result.logits.detach().numpy())
    for ours, expected in zip((*trace.hidden[:-1], trace.final), result.hidden_states, strict=True):
        close(ours, expected.detach().numpy())
    our_loss, gradients = compute_gradients(model, ids)
    assert our_loss == pytest.approx(loss.item(), abs=1e-12)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    ours = to_their_layout(gradients, model.config)
    assert set(ours) == set(expected)
    for name, gradient in ours.items():
        close(gradient, expected[name])


def test_the_recorded_results_differ_only_by_the_float32_rounding_of_transformers(story):
    model, expected, _ = story
    logits, trace = model(expected["ids"], trace=True)
    close(logits, expected["logits"], 1e-5)
    for i, hidden in enumerate((*trace.hidden[:5], trace.final)):
        close(hidden, expected[f"hidden.{i}"], 1e-5)
    loss, gradients = compute_gradients(model, expected["ids"])
    assert loss == pytest.approx(0.536974512131742, abs=1e-12)  # of transformers in float64 throughout, see below
    assert loss == pytest.approx(0.536974501629178, abs=1e-7)
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    assert norm == pytest.approx(3.6897608556988835, abs=1e-12)
    assert norm == pytest.approx(3.6897607431690016, abs=1e-6)
    recorded = {key.removeprefix("projections."): expected[key] for key in expected.files if "projections" in key}
    ours = to_their_layout(gradients, model.config)
    assert set(ours) == set(recorded)
    for name, gradient in ours.items():
        close(project(gradient), recorded[name], 2e-6)


@pytest.mark.filterwarnings("default")
def test_logits_hidden_states_and_every_gradient_equal_those_of_transformers_in_float64(story, exact):
    import torch

    model, expected, folder = story
    theirs = exact.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    compare_with(theirs, model, expected["ids"])


@pytest.mark.filterwarnings("default")
def test_with_its_float32_rounding_transformers_gives_the_recorded_results(story, transformers):
    import torch

    _, expected, folder = story
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        close(theirs(torch.tensor(expected["ids"])).logits.numpy(), expected["logits"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_decoding_tells_the_published_story(story, use_cache):
    model, expected, folder = story
    ids = tg.generate(model, [1], 200, temperature=0, eos=None, use_cache=use_cache)[0]
    np.testing.assert_array_equal(ids, expected["greedy"])
    pieces = json.loads((folder / "vocabulary.json").read_text())["pieces"]
    written = b"".join(bytes([i - 3]) if 3 <= i < 259 else pieces[i].encode() for i in ids[1:])
    assert (
        written.decode()
        .lstrip()
        .startswith("Once upon a time, there was a little girl named Lily. She loved to play outside in the park.")
    )


def test_float32_tells_the_same_story(story):
    _, expected, folder = story
    model = nn.GPT.from_pretrained(folder)
    assert model.wte.weight.dtype == np.float32
    np.testing.assert_array_equal(tg.generate(model, [1], 200, temperature=0, eos=None)[0], expected["greedy"])


def test_the_folder_is_written_back_with_the_same_arrays_settings_and_ids(story, tmp_path):
    _, _, folder = story
    nn.GPT.from_pretrained(folder).save_pretrained(tmp_path)
    theirs, ours = (load_arrays(path / "model.safetensors") for path in (folder, tmp_path))
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = json.loads((folder / "config.json").read_text())
    assert config.items() >= {key: expected[key] for key in config if key in expected}.items()
    assert (tmp_path / "generation_config.json").read_text().split() == (
        folder / "generation_config.json"
    ).read_text().split()


# --------------------------------------------------------------------------------------------------------------------
# Llama: random models, in both directions


@pytest.mark.parametrize("settings", FORMS)
def test_a_llama_that_was_saved_opens_with_the_same_numbers(tmp_path, settings):
    model = make_model(**{**LLAMA, **settings})
    again = nn.GPT.from_pretrained(save(model, tmp_path))
    close(again(IDS), model(IDS).data, 0)
    assert again.config.norm == "rms"
    assert not again.training
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.filterwarnings("default")
def test_transformers_opens_a_llama_of_ours_and_computes_the_same(tmp_path, exact, settings):
    import torch

    model = make_model(**{**LLAMA, **settings})
    theirs, report = exact.LlamaForCausalLM.from_pretrained(
        save(model, tmp_path), dtype=torch.float64, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    compare_with(theirs, model, IDS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.filterwarnings("default")
def test_we_open_a_llama_of_transformers_and_compute_the_same(tmp_path, exact, tied, kv_heads):
    import torch

    torch.manual_seed(0)
    config = exact.LlamaConfig(
        vocab_size=13,
        hidden_size=36,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        max_position_embeddings=17,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        attn_implementation="sdpa",
    )
    theirs = exact.LlamaForCausalLM(config).double().eval()
    theirs.save_pretrained(tmp_path)
    model = nn.GPT.from_pretrained(tmp_path)
    assert model.config.rope_base == 700.0
    compare_with(theirs, model, IDS)


# --------------------------------------------------------------------------------------------------------------------
# Llama: older folders, and those that are refused


def test_folders_of_older_versions_open(tmp_path):
    model = make_model(**LLAMA, rope_base=500.0)
    folder = save(model, tmp_path)
    config = folder / "config.json"
    for keys in (
        {"rope_parameters": "delete", "rope_scaling": None, "rope_theta": 500.0, "num_key_value_heads": "delete"},
        {"rope_theta": "delete", "rope_scaling": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": 6},
        {"rope_scaling": {"type": "default"}, "rope_theta": 500, "head_dim": None, "hidden_act": "swish"},
    ):
        edit_json(config, **keys)
        close(nn.GPT.from_pretrained(folder)(IDS), model(IDS).data, 0)
    edit_json(config, rope_theta="delete", rope_scaling="delete")
    assert nn.GPT.from_pretrained(folder).config.rope_base == 10000.0

    def without_prefix(arrays):
        buffers = {f"layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3) for i in range(2)}
        return {name.removeprefix("model."): a for name, a in arrays.items()} | buffers

    edit_json(config, rope_theta=500.0)
    edit_arrays(folder, without_prefix)
    close(nn.GPT.from_pretrained(folder)(IDS), model(IDS).data, 0)


def test_a_head_is_not_tied_unless_the_folder_says_so(tmp_path):
    model = make_model(**LLAMA, tie_weights=False)
    edit_json(save(model, tmp_path) / "config.json", tie_word_embeddings="delete")
    close(nn.GPT.from_pretrained(tmp_path)(IDS), model(IDS).data, 0)


def test_settings_that_we_lack_are_all_named(tmp_path):
    folder = save(make_model(**LLAMA), tmp_path)
    edit_json(
        folder / "config.json",
        attention_bias=True,
        mlp_bias=True,
        attention_dropout=0.25,
        head_dim=8,
        hidden_act="gelu",
        rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0},
    )
    with pytest.raises(CheckpointError) as caught:
        nn.GPT.from_pretrained(folder)
    for part in (
        str(folder / "config.json"),
        "attention_bias = True",
        "mlp_bias = True",
        "attention_dropout = 0.25",
        "rope_type = 'llama3'",
        "head_dim = 8",
        "the activation 'gelu' (known: silu, swish)",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": "delete", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
        ({"rope_parameters": "twice"}, "rope_type = 'twice'"),
        ({"hidden_act": ["silu"]}, r"the activation \['silu'\]"),
        ({"num_attention_heads": 0}, "n_head must be"),
        ({"num_attention_heads": "six"}, "n_head must be an integer"),
        ({"num_key_value_heads": 4}, "n_head must be a multiple of n_kv_head"),
        ({"rms_norm_eps": 0}, "eps must be a positive number"),
        ({"num_hidden_layers": 3}, r"missing h\.2\.ln_1\.weight"),
        ({"intermediate_size": 23}, r"h\.0\.mlp\.c_fc\.weight has shape \(36, 144\), expected \(36, 23\)"),
        ({"tie_word_embeddings": False}, r"missing lm_head\.weight"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"eos_token_id": "the end"}, "eos_token_id must be a token id or a list of token ids, got 'the end'"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path, changes, message):
    folder = save(make_model(**LLAMA), tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        nn.GPT.from_pretrained(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change"),
    [("k", None), ("q", np.zeros((36, 35))), ("v", np.zeros((11, 36))), ("k", np.zeros(432))],
)
def test_queries_keys_and_values_that_do_not_fit_together_are_named(tmp_path, part, change):
    folder = save(make_model(**LLAMA, n_kv_head=2), tmp_path)
    name = f"model.layers.1.self_attn.{part}_proj.weight"

    def spoil(arrays):
        return {key: array for key, array in {**arrays, name: change}.items() if array is not None}

    edit_arrays(folder, spoil)
    with pytest.raises(CheckpointError, match=r"missing arrays or shapes that do not fit together") as caught:
        nn.GPT.from_pretrained(folder)
    shape = () if change is None else change.shape
    assert f"{name} {shape}" in str(caught.value)


# --------------------------------------------------------------------------------------------------------------------
# What survives a round trip


@pytest.mark.parametrize("settings", GPTS)
def test_a_head_tied_or_untied_by_hand_is_saved_as_the_model_holds_it(tmp_path, settings):
    for tied in (True, False):
        model = make_model(**settings, tie_weights=not tied)
        weight = model.wte.weight
        model.lm_head.weight = weight if tied else tg.Tensor(weight.data + 0.5, requires_grad=True)
        again = nn.GPT.from_pretrained(save(model, tmp_path))
        assert again.config.tie_weights == tied
        assert (again.lm_head.weight is again.wte.weight) == tied
        close(again(IDS), model(IDS).data, 0)


@pytest.mark.parametrize("settings", GPTS)
def test_special_ids_and_the_generation_config_survive_opening_and_saving(tmp_path, settings):
    first, second = tmp_path / "first", tmp_path / "second"
    save(make_model(**settings), first)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    generation = {"eos_token_id": [2, 5], "temperature": 0.7, "top_k": 11}
    edit_json(first / "config.json", **ids)
    edit_json(first / "generation_config.json", **generation)
    model = nn.GPT.from_pretrained(first)
    assert (model.special_ids, model.generation_config, model.end_ids) == (ids, generation, (2, 5))
    twin = copy.deepcopy(model)
    twin.generation_config["eos_token_id"].append(7)
    assert (twin.end_ids, model.end_ids) == ((2, 5, 7), (2, 5))
    save(model, second)
    assert sorted(os.listdir(second)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((second / "config.json").read_text()).items() >= ids.items()
    assert json.loads((second / "generation_config.json").read_text()) == generation
    again = nn.GPT.from_pretrained(second)
    assert (again.special_ids, again.generation_config) == (ids, generation)


def test_a_model_without_special_ids_writes_none_and_leaves_no_old_generation_config(tmp_path):
    model = make_model()
    model.generation_config |= {"eos_token_id": np.int64(3), "temperature": np.float64(0.7)}
    opened = nn.GPT.from_pretrained(save(model, tmp_path))
    assert (opened.end_ids, opened.generation_config["temperature"]) == ((3,), 0.7)
    model.generation_config.clear()
    assert nn.GPT.from_pretrained(save(model, tmp_path)).end_ids == ()
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


class Doubled(nn.CausalSelfAttention):
    """An attention of a user's own."""

    def forward(self, x, **options):
        return 2 * super().forward(x, **options)


def test_parameters_and_attentions_that_no_format_has_are_named_and_nothing_is_written(tmp_path):
    model = make_model()
    model.h[1].attn.temperature = tg.Tensor([2.0], requires_grad=True)
    with pytest.raises(ValueError, match=r"gpt2: the parameter h\.1\.attn\.temperature"):
        save(model, tmp_path / "model")
    model = make_model(**LLAMA)
    model.h[0].attn.c_proj.bias = tg.Tensor(np.zeros(36), requires_grad=True)
    with pytest.raises(ValueError, match=r"llama: the parameter h\.0\.attn\.c_proj\.bias"):
        save(model, tmp_path / "model")
    model = make_model()
    model.h[1].attn.__class__ = Doubled  # with the same parameters
    with pytest.raises(ValueError, match="no Hugging Face folder can hold the attention Doubled"):
        save(model, tmp_path / "model")
    model = make_model()
    model.special_ids["eos_token_id"] = 2.5
    with pytest.raises(TypeError, match=r"eos_token_id must be a token id or a list of token ids, got 2\.5"):
        save(model, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def make_bpe():
    tokens = [*BYTE_SYMBOLS, "he", "hel", "Ġa", "<|endoftext|>", "<pad>"]
    merges = [("h", "e"), ("he", "l"), ("Ġ", "a")]
    return BPETokenizer({token: i for i, token in enumerate(tokens)}, merges, ["<|endoftext|>", "<pad>"])


@pytest.mark.parametrize("settings", GPTS)
def test_a_tokenizer_is_saved_with_the_model(tmp_path, settings):
    pytest.importorskip("tokenizers")
    model = make_model(**{**settings, "vocab_size": 263})
    text = "hello a 你é <|endoftext|> <pad>"
    for tokenizer, files in (
        (make_bpe(), ["merges.txt", "tokenizer.json", "vocab.json"]),
        (CharTokenizer.of(text), ["characters.json"]),
    ):
        folder = tmp_path / type(tokenizer).__name__
        model.save_pretrained(folder, tokenizer=tokenizer)
        assert sorted({*os.listdir(folder)} - {"config.json", "model.safetensors"}) == files
        np.testing.assert_array_equal(load_tokenizer(folder).encode(text), tokenizer.encode(text))
    os.remove(tmp_path / "BPETokenizer" / "tokenizer.json")
    again = load_tokenizer(tmp_path / "BPETokenizer")  # from vocab.json and merges.txt
    np.testing.assert_array_equal(again.encode(text), make_bpe().encode(text))


@pytest.mark.parametrize("settings", [{}, LLAMA])
@pytest.mark.filterwarnings("default")
def test_transformers_opens_the_tokenizer_that_we_save(tmp_path, transformers, settings):
    make_model(**{**settings, "vocab_size": 263}).save_pretrained(tmp_path, tokenizer=make_bpe())
    text = "hello a 你é <|endoftext|> <pad>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == make_bpe().encode(text, allow_special=True).tolist()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has 14 tokens, the model 13"):
        make_model().save_pretrained(tmp_path / "model", tokenizer=CharTokenizer("abcdefghijklmn"))
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------------------------------
# The end of a text


def greedy(model, n=5, **options):
    """The new tokens of each row."""
    return [row[3:].tolist() for row in tg.generate(model, [[1, 2, 3], [5, 6, 7]], n, temperature=0, **options)]


@pytest.mark.parametrize("settings", GPTS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_stops_at_the_ids_that_the_folder_names(settings, use_cache):
    model = make_model(**settings)
    whole = greedy(model)
    end = whole[0][1]
    cut = [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert len(cut[0]) <= 2
    model.special_ids = {"eos_token_id": end}
    assert greedy(model, use_cache=use_cache) == cut
    model.special_ids = {"eos_token_id": [end]}
    assert greedy(model, use_cache=use_cache) == cut
    assert greedy(model, eos=None, use_cache=use_cache) == whole
    model.generation_config = {"eos_token_id": None}  # which comes before config.json
    assert greedy(model, use_cache=use_cache) == whole
    assert greedy(model, eos=np.int64(end), use_cache=use_cache) == cut
    assert greedy(model, eos=[end], use_cache=use_cache) == cut
    assert greedy(model, eos=[], stop=end, use_cache=use_cache) == cut
    assert list(tg.stream(model, [1, 2, 3], 5, temperature=0, eos=end)) == cut[0]


def test_a_prompt_stops_nothing_and_ids_outside_the_vocabulary_are_never_drawn():
    model = make_model()
    whole = greedy(model)
    unused = next(i for i in range(13) if not any(i in row for row in whole))
    model.special_ids = {"eos_token_id": [unused, 50256]}
    assert greedy(model) == whole
    model.special_ids = {"eos_token_id": whole[0][0]}
    prompt = [whole[0][0], *([2, 3] if whole[0][0] != 2 else [1, 3])]
    new = tg.generate(model, prompt, 5, temperature=0, eos=None)[0, 3:].tolist()
    stopped = tg.generate(model, prompt, 5, temperature=0)[0, 3:].tolist()
    assert stopped == (new[: new.index(prompt[0]) + 1] if prompt[0] in new else new)
    assert len(stopped) > 0


def test_a_beam_search_ends_at_the_same_ids():
    model = make_model()
    model.special_ids = {"eos_token_id": 4}
    for beam in (2, 3):
        ours = tg.generate(model, [1, 2, 3], 7, beam=beam)
        np.testing.assert_array_equal(ours, tg.generate(model, [1, 2, 3], 7, beam=beam, eos=None, stop=4))


@pytest.mark.parametrize(
    ("eos", "error", "message"),
    [
        (13, ValueError, "the id 13, which is not in the vocabulary, 0 to 12"),
        ([1, -1], ValueError, "the id -1"),
        ("end", TypeError, "got 'end'"),
        (1.0, TypeError, 'eos must be "model", a token id, a list of token ids, or None, got 1.0'),
        ([True], TypeError, "got True"),
        (["model"], TypeError, "got 'model'"),
    ],
)
def test_an_end_that_is_not_a_token_is_refused(eos, error, message):
    with pytest.raises(error, match=message):
        tg.generate(make_model(), [1], 2, eos=eos)
    with pytest.raises(error, match=message):
        tg.stream(make_model(), [1], 2, eos=eos)


@pytest.mark.parametrize("settings", GPTS)
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.filterwarnings("default")
def test_generation_ends_where_that_of_transformers_ends(tmp_path, exact, settings, where):
    import torch

    model = make_model(**settings)
    folder = save(model, tmp_path)
    ends = [greedy(model)[0][2], greedy(model)[1][1]]
    edit_json(folder / where, eos_token_id=ends)
    theirs = exact.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = nn.GPT.from_pretrained(folder)
    for prompt in ([1, 2, 3], [5, 6, 7], [ends[0], 1]):
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0)[0].tolist()
        assert tg.generate(model, prompt, 7, temperature=0)[0].tolist() == expected
        assert len(expected) < len(prompt) + 7 or not {*expected[len(prompt) :]} & {*ends}


# --------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize("settings", GPTS)
def test_the_command_line_generates_from_each_format_and_stops_at_its_end(tmp_path, capsys, settings):
    model = make_model(**settings)
    whole = tg.generate(model, [1, 2, 3], 5, temperature=0)[0].tolist()
    model.special_ids["eos_token_id"] = end = whole[4]
    model.save_pretrained(tmp_path, tokenizer=CharTokenizer("abcdefghijklm"))
    words = ["generate", str(tmp_path), "--ids", "1", "2", "3", "-n", "5", "--temperature", "0", "--stats"]
    assert main(words) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert ids == [*whole[:3], *whole[3 : whole.index(end, 3) + 1]]
    assert main([*words, "--no-eos"]) == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == whole
    assert main(["generate", str(tmp_path), "--prompt", "bcd", "-n", "5", "--temperature", "0", "--no-eos"]) == 0
    assert capsys.readouterr().out == "".join("abcdefghijklm"[i] for i in whole) + "\n"
    (tmp_path / "characters.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')  # of a kind that we do not have
    assert main([*words, "--no-eos"]) == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == whole
    assert main(["generate", str(tmp_path), "--prompt", "bcd"]) == 2
    assert "tokenizer.json is not a byte pair encoding as GPT-2 has it" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ damage, sudden death


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_save_that_fails_leaves_the_old_model_and_one_that_ends_never_leaves_half_of_each(
    ends, linked, tmp_path, monkeypatch
):
    old, new = (make_model(activation=activation) for activation in ("gelu", "relu"))
    replace, outcomes = os.replace, []
    for n in range(7):
        folder = tmp_path / str(n)
        old.save_pretrained(folder)
        if linked:  # as in the cache of Hugging Face
            (folder / "config.json").rename(tmp_path / f"config-{n}")
            (folder / "config.json").symlink_to(tmp_path / f"config-{n}")
        calls = []

        def end(source, target, n=n, calls=calls):
            calls.append(target)
            if len(calls) == n + 1 or (ends and len(calls) > n):
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", end)
        try:
            new.save_pretrained(folder)
        except KeyboardInterrupt:
            assert len(calls) > n
        monkeypatch.setattr(os, "replace", replace)
        try:
            opened = nn.GPT.from_pretrained(folder)
        except CheckpointError:
            outcomes.append("refused")
        else:
            close(opened(IDS), (old if opened.config.activation == "gelu" else new)(IDS).data)
            outcomes.append(opened.config.activation)
    # The new weights are complete; two old files are set aside; three new ones take their places.
    assert outcomes == ["gelu", "gelu", *(["refused"] if ends else ["gelu"]) * 4, "relu"]


@pytest.mark.parametrize("key", ["n_layer", "vocab_size", "n_embd", "n_positions", "n_inner"])
def test_absurd_sizes_are_compared_with_the_weights_before_memory_is_allocated(key, tmp_path):
    make_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 6 * 10**9}))
    with pytest.raises(CheckpointError, match="but the saved one has 2 and"):
        nn.GPT.from_pretrained(tmp_path)
