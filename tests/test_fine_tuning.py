"""Training a model that is given: a trained GPT, one with modules of a person's own, any module with a loss."""

from __future__ import annotations

import json
import os
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import nn, ops
from tinygrad_mha.cli import main
from tinygrad_mha.data import CharTokenizer
from tinygrad_mha.files import CheckpointError, load_arrays
from tinygrad_mha.files.run_folder import find_latest
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.nn.positions import Rotary
from tinygrad_mha.training import Run, TrainConfig, load_trained, preset, report, train

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 23
TOKENIZER = CharTokenizer.of(TEXT)
OPTIONS = {"steps": 7, "batch_size": 3, "accumulate": 2, "learning_rate": 1e-2, "min_lr": 1e-3, "warmup": 2, "seed": 3}
OPTIONS |= {"eval_interval": 3, "eval_batches": 2, "sample_interval": 4, "sample_tokens": 5, "checkpoint_interval": 2}
SIZES = {"vocab_size": TOKENIZER.vocab_size, "block_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 6}


def make_gpt(seed=5, **options):
    return GPT(GPTConfig(**{**SIZES, "dropout": 0.25, **options}), seed=seed)


def make_frozen_gpt():
    """In float64, with a frozen embedding, and a head that was untied by hand."""
    model = make_gpt().astype(np.float64)
    model.lm_head.weight = tg.Tensor(model.wte.weight.numpy() * 0.5, requires_grad=True)
    model.wte.weight.requires_grad = False
    model.h[0].ln_1.bias.requires_grad = False
    return model


class OwnAttention(nn.Module):
    """An attention of a person's own: every head of a stock one is multiplied by a learned number."""

    def __init__(self, config, rng):
        self.heads = nn.MultiHeadAttention(config.n_embd, config.n_head, dropout=config.dropout, rng=rng)
        self.scale = tg.Tensor(rng.standard_normal(config.n_embd), requires_grad=True)

    def forward(self, x, cache=None):
        return self.heads(x, causal=True, cache=cache) * self.scale


def make_gpt_with_own_attention():
    return GPT(make_gpt().config, seed=5, attention=OwnAttention)


class Bigram(nn.Module):
    """The smallest language model: a table of logits, with noise from an old generator in training."""

    def __init__(self, seed=0):
        self.config = SimpleNamespace(vocab_size=TOKENIZER.vocab_size, block_size=9)
        self.rng = np.random.Generator(np.random.MT19937(seed))
        self.table = nn.Embedding(TOKENIZER.vocab_size, TOKENIZER.vocab_size, rng=seed)

    def forward(self, idx, last_only=False):
        logits = self.table(idx)
        if self.training:
            logits = logits * (1 + 0.1 * self.rng.standard_normal())
        return logits[..., -1:, :] if last_only else logits

    def loss(self, idx, targets):
        return ops.cross_entropy(self(idx), targets)


MAKERS = [make_gpt, make_frozen_gpt, make_gpt_with_own_attention, Bigram]


def tune(folder=None, model=None, config=None, **options):
    known = {} if config is not None else OPTIONS
    return train(config, TEXT, folder, **{"show": "quiet", "tokenizer": TOKENIZER, "model": model, **known, **options})


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No plots, no waiting for the disk, and Ctrl-C as in a terminal."""
    monkeypatch.setattr(report, "can_plot", lambda: False)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------- a model is trained


def test_a_given_model_is_trained_in_place_from_its_own_weights():
    model = make_gpt(dropout=0.0)
    trained = tune(model=model, steps=20).log.rows
    again = tune(model=model, steps=1).log.rows
    assert trained[0]["validation_loss"] == pytest.approx(np.log(TOKENIZER.vocab_size), abs=0.1)
    assert again[0]["validation_loss"] == trained[-1]["validation_loss"] < trained[0]["validation_loss"] - 0.2


def test_the_first_update_is_that_of_the_given_weights():
    """Dropout is on though the model was in eval mode, and gradients from before are not added."""
    model, twin = make_gpt().eval(), make_gpt()
    model.loss([1, 2], [2, 3]).backward()
    tune(model=model, steps=1, sample_interval=0, eval_interval=9)
    run = Run(TrainConfig(**OPTIONS), TEXT, model=twin)
    run.update()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert np.array_equal(p.numpy(), q.numpy()), name


def test_the_configuration_of_the_run_is_that_of_the_model():
    run = tune(model=make_gpt(n_embd=8, position="rotary", bias=False), steps=0)
    assert (run.config.n_layer, run.config.n_embd, run.config.position, run.config.block_size) == (2, 8, "rotary", 11)
    assert run.config.make_model_config(TOKENIZER.vocab_size) == run.model.config


def test_windows_may_be_shorter_than_the_context_of_the_model(tmp_path):
    run = tune(tmp_path, make_gpt(), block_size=5)
    assert next(run.batches)[0].shape == (3, 5)
    assert run.model.config.block_size == 11
    model, _ = load_trained(tmp_path)
    assert model.config.block_size == 11
    assert tune(tmp_path, resume=True, steps=9).config.block_size == 5


@pytest.mark.parametrize("config", ["tiny", preset("tiny"), TrainConfig(), None])
def test_model_options_that_nobody_gave_are_those_of_the_model(config):
    run = tune(model=make_gpt(), config=config, steps=0, eval_batches=1, sample_interval=0)
    assert (run.config.n_layer, run.config.block_size) == (2, 11)


def test_fine_tuning_has_a_low_learning_rate_unless_another_is_given():
    quick = {"steps": 0, "eval_batches": 1, "sample_interval": 0}
    run = train(None, TEXT, model=make_gpt(), tokenizer=TOKENIZER, show="quiet", **quick)
    assert run.config.learning_rate == 1e-4


def test_dtype_ties_and_frozen_tensors_stay(tmp_path):
    model = make_frozen_gpt()
    before = model.state_dict()
    run = tune(tmp_path, model)
    assert {str(p.dtype) for p in run.model.parameters()} == {"float64"}
    changed = {name for name, array in model.state_dict().items() if (array != before[name]).any()}
    assert before.keys() - changed == {"wte.weight", "h.0.ln_1.bias"}
    tied = tune(tmp_path / "tied", make_gpt()).model
    assert tied.lm_head.weight is tied.wte.weight
    opened, _ = load_trained(tmp_path)
    assert [name for name, _ in opened.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(np.array_equal(array, model.state_dict()[name]) for name, array in opened.state_dict().items())
    assert opened.wte.weight.dtype == np.float64


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("make", MAKERS)
def test_a_run_of_a_given_model_resumes_bit_for_bit(make, tmp_path):
    def interrupt(event):
        if event["event"] == "step" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole, half = tmp_path / "whole", tmp_path / "half"
    expected = tune(whole, make())
    assert tune(half, make(), show=interrupt).step == 3
    again = tune(half, make(), resume=True)
    assert contents(half) == contents(whole)
    assert again.log.rows == expected.log.rows


@pytest.mark.parametrize("make", MAKERS)
def test_a_run_that_died_resumes_with_the_model_in_any_state(make, tmp_path):
    class Death(BaseException):
        pass

    def die(event):
        if event["event"] == "step" and event["step"] == 5:
            raise Death

    tune(tmp_path / "whole", make())
    model = make()
    with pytest.raises(Death):
        tune(tmp_path / "died", model, show=die)
    assert find_latest(tmp_path / "died").name == "step-4"
    tune(tmp_path / "died", model, resume=True)
    assert contents(tmp_path / "died") == contents(tmp_path / "whole")


@pytest.mark.parametrize("config", ["finetune", "tiny", preset("tiny"), TrainConfig(warmup=1), None])
@pytest.mark.parametrize("again", [True, False], ids=["passed", "rebuilt"])
def test_the_same_call_resumes_a_run(config, again, tmp_path):
    options = {"config": config, "block_size": 5, "eval_batches": 1, "sample_interval": 0}
    tune(tmp_path, make_gpt(), steps=1, **options)
    run = tune(tmp_path, make_gpt() if again else None, steps=2, resume=True, **options)
    assert (run.step, run.config.block_size, run.config.n_layer) == (2, 5, 2)


@pytest.mark.parametrize("make", [make_gpt, make_frozen_gpt])
def test_a_gpt_is_rebuilt_when_its_run_is_resumed(make, tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    constant = {"min_lr": 1e-2, "warmup": 0}
    tune(whole, make(), **constant)
    tune(half, make(), steps=3, **constant)
    train(None, TEXT, half, resume=True, steps=7, show="quiet")
    for name in ("step-7/model.safetensors", "step-7/optimizer.safetensors", "log.csv"):
        assert contents(half)[name] == contents(whole)[name], name


@pytest.mark.parametrize("make", [make_gpt_with_own_attention, Bigram])
def test_a_model_of_your_own_must_be_passed_again(make, tmp_path):
    run = tune(tmp_path, make())
    name = "GPT" if make is not Bigram else "Bigram"
    with pytest.raises(CheckpointError, match=rf"a {name} with modules of your own.*pass it again as model="):
        tune(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"pass it again as model=, .*load_trained\(folder, model=\.\.\.\)"):
        load_trained(tmp_path)
    opened, tokenizer = load_trained(tmp_path, model=make())
    assert tokenizer.characters == TOKENIZER.characters
    assert not opened.training
    assert all(
        np.array_equal(p.numpy(), q.numpy()) for p, q in zip(opened.parameters(), run.model.parameters(), strict=True)
    )


def test_a_gpt_with_a_position_object_of_your_own_is_passed_again(tmp_path):
    class Halved(Rotary):
        pass

    tune(tmp_path, make_gpt(n_embd=8, position=Halved()), steps=2)
    with pytest.raises(CheckpointError, match=r"cannot be rebuilt \(.*halved.*pass it again"):
        tune(tmp_path, resume=True)
    run = tune(tmp_path, make_gpt(n_embd=8, position=Halved()), resume=True, steps=3)
    assert run.step == 3


def test_another_model_than_that_of_the_run_is_refused_and_unchanged(tmp_path):
    tune(tmp_path, make_gpt())
    for other, difference in [
        (make_gpt(n_head=3), "n_head is 2, not 3"),
        (make_gpt().astype(np.float64), r"dtypes is \['float32'\], not \['float64'\]"),
        (Bigram(), "class is 'GPT', not 'Bigram'"),
        (make_gpt(activation="relu"), "activation is 'gelu_tanh', not 'relu'"),
    ]:
        before = other.state_dict()
        with pytest.raises(CheckpointError, match=rf"another model than the given one: .*{difference}"):
            tune(tmp_path, other, resume=True)
        with pytest.raises(CheckpointError, match=difference):
            load_trained(tmp_path, other)
        assert all(np.array_equal(array, before[name]) for name, array in other.state_dict().items())


def test_other_frozen_tensors_than_those_of_the_run_are_refused(tmp_path):
    tune(tmp_path, make_gpt())
    model = make_gpt()
    model.wpe.weight.requires_grad = False
    before = model.state_dict()
    with pytest.raises(CheckpointError, match=r"does not belong to this run: .* unexpected wpe\.weight\. Pass a model"):
        tune(tmp_path, model, resume=True)
    assert all(np.array_equal(array, before[name]) for name, array in model.state_dict().items())


def test_another_attention_than_that_of_the_run_is_refused_with_its_class_and_names(tmp_path):
    tune(tmp_path, make_gpt_with_own_attention(), steps=1)
    model = make_gpt()
    before = model.state_dict()
    message = r"GPT with attention CausalSelfAttention: missing h\.0\.attn\..*; unexpected h\.0\.attn\."
    with pytest.raises(CheckpointError, match=message):
        tune(tmp_path, model, resume=True, steps=2)
    assert all(np.array_equal(array, before[name]) for name, array in model.state_dict().items())


def test_from_pretrained_of_a_run_names_load_trained(tmp_path):
    tune(tmp_path, make_gpt(), steps=1)
    for folder in (tmp_path, find_latest(tmp_path)):
        with pytest.raises(CheckpointError, match=r"is a training run, .*tg\.training\.load_trained"):
            GPT.from_pretrained(folder)


# ------------------------------------------------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layer": 3, "n_embd": 8}, "contradicts the model, in which n_layer is 2, not 3; n_embd is 6, not 8"),
        ({"dropout": 0.0}, "dropout is 0.25, not 0.0"),
        ({"config": TrainConfig(activation="relu")}, "activation is 'gelu_tanh', not 'relu'"),
        ({"block_size": 12}, "block_size is 11, not 12"),
        (
            {"tokenizer": CharTokenizer(TOKENIZER.characters + "!")},
            "the vocabulary has 30 tokens",
        ),
        ({"tokenizer": CharTokenizer.of("another text")}, "the vocabulary has 9 tokens, that of the model 29: pass"),
        (
            {"tokenizer": CharTokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 29))))},
            "the character .* is not in the vocabulary of 29 .* Remove such characters, or use a tokenizer that",
        ),
        ({"model": "gpt2"}, "a model to train is a Module with .*; got str"),
        ({"model": nn.Linear(3, 5)}, "a model to train is a Module with .*; got Linear"),
    ],
)
def test_a_contradiction_is_one_error_before_any_work(options, message, tmp_path):
    model = make_gpt()
    before = model.state_dict()
    with pytest.raises((ValueError, TypeError), match=message):
        tune(tmp_path / "run", **{"model": model, **options})
    assert not (tmp_path / "run").exists()
    assert all(np.array_equal(array, before[name]) for name, array in model.state_dict().items())


def test_a_model_of_another_vocabulary_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"29 tokens, that of the model 65: pass the tokenizer of the model"):
        tune(tmp_path / "run", make_gpt(vocab_size=65))
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_single_tensor_is_refused_before_any_work(tmp_path, monkeypatch):
    for wrong in (lambda *_: (1.0, 2.0), lambda *_: tg.Tensor([1.0, 2.0]), lambda *_: 1.0, lambda x: x):
        monkeypatch.setattr(Bigram, "loss", staticmethod(wrong))
        with pytest.raises(TypeError, match=r"a model to train is a Module with .*; Bigram"):
            tune(tmp_path / "run", Bigram())
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_sampled_is_trained_without_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(Bigram, "forward", lambda self, idx: self.table(idx))
    with pytest.raises(TypeError, match=r"or set sample_interval=0; Bigram raised: .*last_only"):
        tune(tmp_path / "run", Bigram())
    assert tune(tmp_path / "run", Bigram(), sample_interval=0).step == 7


def test_a_model_without_parameters_to_train_is_refused():
    model = make_gpt()
    for p in model.parameters():
        p.requires_grad = False
    with pytest.raises(ValueError, match="needs parameters, got none"):
        tune(model=model)


# ------------------------------------------------------------------------------------------------- Hugging Face folders


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer, an end of text and a generation_config.json."""
    model = make_gpt(dropout=0.0)
    tune(model=model, steps=20)
    model.special_ids = {"bos_token_id": 0, "eos_token_id": 2}
    model.generation_config = {"eos_token_id": 2, "temperature": 0.5}
    model.save_pretrained(tmp_path / "hf", tokenizer=TOKENIZER)
    return tmp_path / "hf"


def test_a_folder_that_is_opened_trained_and_saved_is_complete(folder, tmp_path):
    tune(tmp_path / "run", GPT.from_pretrained(folder))
    model, tokenizer = load_trained(tmp_path / "run")
    model.save_pretrained(tmp_path / "saved", tokenizer=tokenizer)
    for name in ("config.json", "generation_config.json", "characters.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((folder / name).read_text())
    again = GPT.from_pretrained(tmp_path / "saved")
    assert again.end_ids == model.end_ids == (2,)
    assert all(np.array_equal(array, model.state_dict()[name]) for name, array in again.state_dict().items())


# ----------------------------------------------------------------------------------------------------- the command line

SET = ["--set", "batch_size=3", "eval_batches=2", "learning_rate=0.001", "min_lr=0.001", "warmup=0"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def fine_tune(init, text, out, *options):
    return main(["train", "--init", *map(str, [init, "--text", text, "--out", out, *options]), "--quiet", *SET])


def test_init_begins_with_a_folder_or_a_run_and_generate_opens_the_result(folder, text, tmp_path, capsys):
    assert fine_tune(folder, text, tmp_path / "a", "--steps", 4) == 0
    assert fine_tune(tmp_path / "a", text, tmp_path / "b", "--steps", 3) == 0
    said = re.findall(r"validation loss ([\d.]+) \(at first ([\d.]+)\)", capsys.readouterr().out)
    (a_last, a_first), (b_last, b_first) = [map(float, pair) for pair in said]
    assert b_last < b_first == a_last < a_first < np.log(TOKENIZER.vocab_size) - 0.2
    b, _ = load_trained(tmp_path / "b")
    assert b.end_ids == (2,)
    assert main(["generate", str(tmp_path / "b"), "--prompt", "the ", "-n", "5", "--seed", "0"]) == 0
    assert capsys.readouterr().out.startswith("the ")


def test_init_with_resume_starts_the_run_and_then_continues_it(folder, text, tmp_path):
    for steps in (2, 5):
        assert fine_tune(folder, text, tmp_path / "half", "--steps", steps, "--resume") == 0
    assert fine_tune(folder, text, tmp_path / "whole", "--steps", 5) == 0
    names = ("step-5/model.safetensors", "step-5/optimizer.safetensors", "log.csv")
    for name in names:
        assert contents(tmp_path / "half")[name] == contents(tmp_path / "whole")[name], name


def test_set_may_be_repeated(text, tmp_path, capsys):
    call = ["train", "--text", str(text), "--out", str(tmp_path / "run"), "--set", "n_layr=1", *SET]
    assert main(call) == 2
    assert "no option 'n_layr'" in capsys.readouterr().err


def test_init_refuses_what_contradicts_the_folder_before_any_work(folder, text, tmp_path, capsys):
    out = tmp_path / "out"

    def refused(*options, init=folder):
        assert fine_tune(init, text, out, *options) == 2
        assert not out.exists()
        return capsys.readouterr().err

    assert "n_layer is 2, not 7" in refused("--set", "n_layer=7", "batch_size=3")
    assert "no such folder" in refused(init=tmp_path / "missing")
    text.write_text(TEXT + "é" * 30 + TEXT)
    assert "the character 'é'" in refused()
    text.write_text(TEXT)
    CharTokenizer.of("abcdefghijklmnopqrstuvwxyz .\n!?").save(folder)
    assert "31 tokens, that of the model 29" in refused()
    (folder / "characters.json").unlink()
    assert f"no tokenizer in {folder}: expected characters.json, or tokenizer.json" in refused()


def test_fine_tuning_a_published_model_begins_at_its_published_loss(reference, tmp_path, capsys):
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((reference / "hf-gpt2/nanogpt-shakespeare-char" / name).read_bytes())
    text = reference / "corpora/tinyshakespeare.txt"
    CharTokenizer.of(text.read_text()).save(folder)
    call = ["train", "--init", str(folder), "--text", str(text), "--out", str(tmp_path / "run")]
    call += ["--steps", "10", "--json"]
    assert main([*call, "--set", "eval_batches=20", "eval_interval=5", "sample_interval=0"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    losses = [event["validation_loss"] for event in events if "validation_loss" in event]
    assert losses[0] == pytest.approx(1.8976, abs=0.05)  # 15 360 of 111 488 predictions
    assert sorted(losses, reverse=True) == losses
    assert load_arrays(find_latest(tmp_path / "run") / "model.safetensors").keys() == {
        name for name, _ in GPT.from_pretrained(folder).named_parameters()
    }
