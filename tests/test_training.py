import csv
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tinygrad_mha as tg
from tinygrad_mha import kernels
from tinygrad_mha.data import BYTE_SYMBOLS, BPETokenizer
from tinygrad_mha.files import CheckpointError, load_arrays, replacing
from tinygrad_mha.files.run_folder import CsvLog, find_latest
from tinygrad_mha.nn import GPT, GPTConfig
from tinygrad_mha.nn.positions import Rotary
from tinygrad_mha.training import (
    DivergedError,
    Run,
    TrainConfig,
    accumulate,
    load_trained,
    loop,
    preset,
    report,
    run_state,
    save_checkpoint,
    train,
)
from tinygrad_mha.training.resume import seal_state

posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 23
SMALL = TrainConfig(
    n_layer=1,
    n_head=2,
    n_embd=6,
    block_size=7,
    dropout=0.25,
    batch_size=3,
    accumulate=2,
    steps=11,
    learning_rate=1e-2,
    min_lr=1e-3,
    warmup=2,
    eval_interval=4,
    eval_batches=2,
    sample_interval=5,
    sample_tokens=9,
    checkpoint_interval=3,
)


def small(folder=None, **options):
    return train(options.pop("config", SMALL), options.pop("text", TEXT), folder, **{"show": "quiet", **options})


def contents(folder):
    """The contents of all files of a run that must not depend on interruptions."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
    files.pop("loss.png", None)
    return files


CAN_PLOT = report.can_plot


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Write no plots and do not wait for the disk: what a killed process has written is not lost without fsync."""
    report.can_plot, sync, os.fsync = lambda: False, os.fsync, lambda handle: None
    yield
    report.can_plot, os.fsync = CAN_PLOT, sync


@pytest.fixture
def interruptible():
    """Handle Ctrl-C as in a terminal; it is ignored if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    small(folder)
    return folder


# -------------------------------------------------------------------------------------------------------- configuration


def test_the_cpu_preset_is_the_cpu_configuration_of_nanogpt():
    config = preset("cpu")
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, config.batch_size) == (4, 4, 128, 64, 12)
    assert (config.learning_rate, config.min_lr, config.warmup, config.steps) == (1e-3, 1e-4, 100, 2000)
    assert (config.betas, config.weight_decay, config.clip, config.dropout) == ((0.9, 0.99), 0.1, 1.0, 0.0)
    assert config.lr(0) == pytest.approx(1e-3 / 101)
    assert config.lr(100) == 1e-3
    assert config.lr(2000) == 1e-4


def test_a_run_shorter_than_its_warmup_never_reaches_the_full_learning_rate():
    config = preset("cpu", steps=50)
    assert config.lr(49) == pytest.approx(1e-3 * 50 / 101)


def test_a_decay_that_ends_before_the_warmup_does_follows_it():
    config = preset("cpu", steps=500, decay_steps=50)  # a warmup of 100 steps
    assert config.lr(99) == pytest.approx(1e-3 * 100 / 101)
    assert config.lr(100) == config.min_lr


def test_an_unknown_option_is_refused_and_the_nearest_one_suggested():
    with pytest.raises(ValueError, match=r"no option 'learning_rat'; did you mean 'learning_rate'\?"):
        TrainConfig(learning_rat=1e-3)
    with pytest.raises(ValueError, match="no option 'zzz'; it has block_size, n_layer"):
        preset("tiny", zzz=1)
    with pytest.raises(ValueError, match="no option 'step'; did you mean 'steps'"):
        train("tiny", TEXT, step=3)


def test_an_unknown_preset_is_refused_and_the_known_ones_listed():
    with pytest.raises(ValueError, match="no preset 'large', expected one of tiny, cpu, finetune"):
        train("large", TEXT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"steps": -1},
        {"n_layer": 2.0},
        {"eval_interval": True},
        {"min_lr": 1.0},
        {"clip": -1.0},
        {"clip": math.inf},
        {"seed": -1},
        {"learning_rate": math.nan},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(SMALL, **wrong)


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="n_head"):
        train(SMALL, TEXT, n_head=4)


def test_a_configuration_round_trips_through_json():
    assert TrainConfig(**json.loads(json.dumps(SMALL.to_dict()))) == SMALL


def test_a_position_object_round_trips_too():
    config = TrainConfig(position=Rotary(base=500.0))
    assert TrainConfig(**json.loads(json.dumps(config.to_dict()))) == config == eval(repr(config))


def test_the_repr_of_a_configuration_evaluates_to_it():
    for config in (SMALL, preset("tiny", position="rotary", n_kv_head=2), preset("cpu")):
        assert eval(repr(config)) == config


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GPTConfig) if field.name != "vocab_size"])
def test_every_option_of_the_model_is_an_option_of_training(name):
    """It has the same name when a configuration is made, read, printed, saved and changed, and reaches the model."""
    value = getattr(SMALL, name)
    assert SMALL.model_options[name] == value == SMALL.to_dict()[name]
    assert f"{name}={value!r}" in repr(SMALL)
    assert getattr(SMALL.make_model_config(11), name) == value
    changed = {"block_size": 9, "n_layer": 3, "n_head": 3, "n_embd": 12, "n_inner": 5, "dropout": 0.5, "bias": True}
    changed |= {"norm": "rms", "norm_first": False, "activation": "relu", "position": "alibi", "tie_weights": False}
    changed |= {"n_kv_head": 1, "eps": 1e-3, "rope_base": 500.0, "window": 3, "score": "sinks"}
    for config in (
        dataclasses.replace(SMALL, **{name: changed[name]}),
        TrainConfig(**{**SMALL.to_dict(), name: changed[name]}),
        preset("tiny", **{"n_embd": 24, "n_head": 2, name: changed[name]}),
    ):
        assert getattr(config, name) == getattr(config.make_model_config(11), name) == changed[name]


def test_numbers_of_numpy_are_accepted_and_round_trip_through_json():
    given = {"steps": np.int64(7), "n_layer": np.int32(3), "seed": np.uint8(5), "learning_rate": np.float32(0.5)}
    config = TrainConfig(**given, betas=np.array([0.5, 0.75]))
    assert (config.steps, config.n_layer, config.seed, config.learning_rate, config.betas) == (
        7,
        3,
        5,
        0.5,
        (0.5, 0.75),
    )
    assert TrainConfig(**json.loads(json.dumps(config.to_dict()))) == config


# ------------------------------------------------------------------------------------------------------------- one step


def test_accumulation_weights_all_counted_targets_equally(rng):
    model = GPT(GPTConfig(vocab_size=11, block_size=20, n_layer=1, n_head=2, n_embd=6), seed=0).astype(np.float64)
    idx, targets = rng.integers(11, size=(2, 2, 5, 20))
    targets[0, :, 1:] = -100
    targets[0, 0, 0] = -100
    whole = model.loss(np.concatenate(idx), np.concatenate(targets))
    whole.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    value = accumulate(model, list(zip(idx, targets, strict=True)))
    assert value == pytest.approx(whole.item(), rel=1e-12)
    for p, g in zip(model.parameters(), expected, strict=True):
        assert np.allclose(p.grad, g, rtol=0, atol=1e-10)


def test_accumulation_is_not_the_mean_of_the_means_of_batches():
    class Fixed:
        def loss(self, idx, targets):
            return tg.Tensor(float(idx[0]), requires_grad=True, dtype=np.float64)

    few, many = np.full(100, -100), np.zeros(100, int)
    few[:10] = 0
    assert accumulate(Fixed(), [(np.array([1.0]), few), (np.array([3.0]), many)]) == pytest.approx(2.81818182, abs=1e-8)


@pytest.mark.parametrize("ignored", [-100, 7])
def test_batches_with_ignored_targets_accumulate_to_one_large_batch(ignored, rng):
    model = GPT(GPTConfig(vocab_size=11, block_size=5, n_layer=1, n_head=2, n_embd=6), seed=0).astype(np.float64)
    idx, targets = rng.integers(0, 7, (2, 5)), rng.integers(0, 7, (2, 5))
    targets[1, 2:] = ignored
    whole = model.loss(idx, targets, ignore_index=ignored)
    whole.backward()
    expected = [p.grad.copy() for p in model.parameters()]
    model.zero_grad()
    parts = [(idx[i : i + 1], targets[i : i + 1]) for i in range(2)]
    assert accumulate(model, parts, ignore_index=ignored) == pytest.approx(whole.item(), rel=1e-13)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(p.grad, gradient, rtol=1e-11, atol=1e-14)


def test_batches_of_a_translator_accumulate_to_one_large_batch():
    model = tg.nn.Transformer(11, 7, d_model=6, n_head=2, n_layer=1, d_ff=5, max_len=7, seed=0).astype(np.float64)
    src = np.array([[3, 4, 5, 6], [3, 5, 0, 0], [7, 0, 0, 0]])
    tgt = np.array([[1, 3, 4, 5, 6, 2], [1, 3, 2, 0, 0, 0], [1, 2, 0, 0, 0, 0]])
    whole = model.loss(src, tgt)
    parts = [(src[:1], tgt[:1]), (src[1:].tolist(), tgt[1:].tolist())]
    assert [model.count_targets(targets) for _, targets in parts] == [5, 3]
    assert accumulate(model, parts) == pytest.approx(whole.item(), rel=1e-13)


def test_one_batch_of_sixty_trains_as_six_of_ten():
    large = small(steps=3, dropout=0.0, batch_size=60, accumulate=1)
    parts = small(steps=3, dropout=0.0, batch_size=10, accumulate=6)
    for a, b in zip(large.log.rows, parts.log.rows, strict=True):
        for name in ("loss", "grad_norm"):
            assert a.get(name) == (pytest.approx(b[name], rel=2e-6) if name in b else None)
    for (_, p), (_, q) in zip(large.model.named_parameters(), parts.model.named_parameters(), strict=True):
        assert np.allclose(p.numpy(), q.numpy(), rtol=0, atol=1e-5)


def test_one_update_changes_every_parameter():
    run = Run(SMALL, TEXT)
    before = run.model.state_dict()
    run.update()
    for name, p in run.model.named_parameters():
        assert (p.numpy() != before[name]).mean() > 0.9, name
        assert p.grad is None


def test_an_update_follows_the_schedule_and_clips():
    run = Run(dataclasses.replace(SMALL, clip=1e-3, dropout=0.0), TEXT)
    before = run.model.state_dict()
    row = run.update()
    assert row["learning_rate"] == pytest.approx(1e-2 / 3)
    assert row["grad_norm"] > 1e-3
    # Adam's first step is lr * m / (|m| + eps'): with a clipped gradient eps shows, so steps are shorter than lr.
    moved = max(np.abs(p.numpy() - before[name]).max() for name, p in run.model.named_parameters() if p.ndim == 1)
    assert 0 < moved <= row["learning_rate"] * 1.0001
    first = run.optimizer.state[0]["m"]
    norm = math.sqrt(sum(float((state["m"] ** 2).sum()) for state in run.optimizer.state))
    assert first.dtype == np.float32
    assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_a_clip_of_0_leaves_gradients_as_they_are():
    run = Run(dataclasses.replace(SMALL, clip=0.0, dropout=0.0), TEXT)
    row = run.update()
    norm = math.sqrt(sum(float((state["m"] ** 2).sum()) for state in run.optimizer.state))
    assert norm == pytest.approx(0.1 * row["grad_norm"], rel=1e-3)


def test_the_betas_of_the_configuration_are_those_of_the_optimizer():
    run = Run(dataclasses.replace(SMALL, betas=(0.7, 0.8), clip=0.0, dropout=0.0), TEXT)
    row = run.update()
    first, second = ([state[name] for state in run.optimizer.state] for name in "mv")
    assert math.sqrt(sum(float((m**2).sum()) for m in first)) == pytest.approx(0.3 * row["grad_norm"], rel=1e-3)
    assert sum(float(v.sum()) for v in second) == pytest.approx(0.2 * row["grad_norm"] ** 2, rel=1e-3)


def test_the_validation_loss_falls_from_that_of_a_uniform_guess():
    run = small(
        dropout=0.0, n_embd=16, accumulate=1, batch_size=16, steps=150, warmup=5, learning_rate=2e-2, eval_interval=150
    )
    first, last = run.log.rows[0], run.log.rows[-1]
    assert first["validation_loss"] == pytest.approx(math.log(run.tokenizer.vocab_size), abs=0.1)
    assert last["validation_loss"] < 0.5


# -------------------------------------------------------------------------------------------------------------- the log


def test_the_log_has_one_row_per_step_and_one_for_the_end(uninterrupted):
    with open(uninterrupted / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(SMALL.steps + 1))
    assert [int(row["step"]) for row in rows if row["validation_loss"]] == [0, 4, 8, 11]
    assert [float(row["learning_rate"]) for row in rows[:-1]] == [SMALL.lr(i) for i in range(SMALL.steps)]
    assert rows[-1]["loss"] == ""
    assert all(float(row["loss"]) > 0 < float(row["grad_norm"]) for row in rows[:-1])


def test_the_log_in_memory_is_the_log_in_the_file(uninterrupted):
    rows = small().log.rows
    with open(uninterrupted / "log.csv", newline="") as file:
        read = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert read == rows


def test_samples_are_kept_with_their_step(uninterrupted):
    with open(uninterrupted / "samples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 5, 10, 11]
    assert {len(row["text"]) for row in rows} == {1 + SMALL.sample_tokens}
    assert all(row["text"][0] == TEXT[0] for row in rows)
    assert set("".join(row["text"] for row in rows)) <= set(TEXT)


def test_samples_of_two_steps_are_drawn_from_different_seeds():
    run = Run(dataclasses.replace(SMALL, sample_tokens=29), TEXT)
    first, again = run.sample(), run.sample()
    run.step = 1  # the weights are the same
    assert first == again != run.sample()


def weights(run):
    return {name: p.numpy().tobytes() for name, p in run.model.named_parameters()}


def test_evaluation_and_samples_do_not_change_the_weights():
    plain = small(eval_interval=100, sample_interval=0)
    watched = small(eval_interval=1, eval_batches=3, sample_interval=1, show=lambda event: np.random.rand())
    assert weights(plain) == weights(watched)


def test_evaluation_is_without_dropout_and_repeatable():
    run = Run(SMALL, TEXT)
    run.update()
    first = run.evaluate()
    assert run.evaluate() == first
    assert run.model.training
    run.model.eval()
    batches = run._make_batches("validation", run.validation_ids, run_state.EVALUATION)
    assert first == pytest.approx(np.mean([run.model.loss(*next(batches)).item() for _ in range(2)]), rel=1e-12)


def test_evaluation_holds_one_batch_at_a_time(monkeypatch):
    run, drawn, used = Run(SMALL, TEXT), [], []
    draw, loss = run_state.Batches.__next__, GPT.loss
    monkeypatch.setattr(run_state.Batches, "__next__", lambda self: drawn.append(1) or draw(self))
    monkeypatch.setattr(GPT, "loss", lambda self, *batch: used.append(len(drawn)) or loss(self, *batch))
    run.evaluate()
    assert used == [1, 2]


def test_dropout_and_data_have_their_own_generators():
    with_dropout, without = Run(SMALL, TEXT), Run(dataclasses.replace(SMALL, dropout=0.0), TEXT)
    with_dropout.update()
    without.update()
    assert np.array_equal(next(with_dropout.batches)[0], next(without.batches)[0])


def test_equal_seeds_give_equal_runs_and_zero_is_a_seed():
    zero, again, one = small(seed=0), small(seed=0), small(seed=1)
    assert weights(zero) == weights(again)
    assert zero.log.rows == again.log.rows
    assert weights(zero) != weights(one)


def test_a_run_without_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small()
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------- exact resume


def test_a_finished_run_keeps_one_whole_checkpoint(uninterrupted):
    files = set(contents(uninterrupted))
    whole = {"state.json", "model.safetensors", "optimizer.safetensors", "characters.json"}
    assert files == {"LATEST", "log.csv", "samples.csv"} | {f"step-11/{name}" for name in whole}
    assert find_latest(uninterrupted) == uninterrupted / "step-11"


def test_a_checkpoint_is_json_and_safetensors_and_nothing_else(uninterrupted):
    for path in find_latest(uninterrupted).iterdir():
        if path.suffix == ".safetensors":
            assert all(a.dtype == np.float32 for a in load_arrays(path).values())
        else:
            json.loads(path.read_text())


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stop", range(1, 11))
def test_a_run_interrupted_after_any_step_resumes_bit_for_bit(tmp_path, uninterrupted, stop):
    def interrupt(event):
        if event["event"] == "step" and event["step"] == stop - 1:
            os.kill(os.getpid(), signal.SIGINT)

    run = small(tmp_path, show=interrupt)
    assert run.interrupted
    assert run.step == stop
    assert find_latest(tmp_path).name == f"step-{stop}"
    again = small(tmp_path, resume=True)
    assert not again.interrupted
    assert contents(tmp_path) == contents(uninterrupted)
    with open(uninterrupted / "log.csv", newline="") as file:
        assert again.log.rows == [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_resuming_a_finished_run_changes_nothing(tmp_path, uninterrupted):
    small(tmp_path)
    small(tmp_path, resume=True)
    assert contents(tmp_path) == contents(uninterrupted)


def test_resuming_an_empty_folder_starts_a_run(tmp_path, uninterrupted):
    small(tmp_path / "new", resume=True)
    assert contents(tmp_path / "new") == contents(uninterrupted)


def test_a_resumed_run_needs_neither_configuration_nor_text(tmp_path, uninterrupted):
    path = tmp_path / "text"
    path.write_text(TEXT)
    small(tmp_path / "run", text=path, steps=3)
    run = train(folder=tmp_path / "run", resume=True, steps=5, show="quiet")
    assert run.config == dataclasses.replace(SMALL, steps=5)
    assert [row["step"] for row in run.log.rows] == [0, 1, 2, 3, 4, 5]


def test_a_resumed_run_may_have_more_steps(tmp_path):
    small(tmp_path, steps=3, warmup=3)
    longer = small(tmp_path, resume=True, steps=6, warmup=3)
    assert [row["step"] for row in longer.log.rows] == list(range(7))
    assert "loss" in longer.log.rows[3]


def test_more_steps_lengthen_the_schedule_which_is_said_unless_it_is_kept(tmp_path, capsys):
    for name in ("longer", "kept"):
        small(tmp_path / name, steps=6)
    longer = small(tmp_path / "longer", resume=True, steps=11, show="bar")
    assert longer.log.rows[6]["learning_rate"] == SMALL.lr(6) > SMALL.min_lr
    assert longer.note == (
        "the learning rate is 0.00628 at step 6, where it was 0.001 with 6 steps: "
        "pass decay_steps=6 to keep the schedule"
    )
    assert f"note: {longer.note}" in capsys.readouterr().err
    kept = small(tmp_path / "kept", resume=True, steps=11, decay_steps=6, show="bar")
    assert [row.get("learning_rate") for row in kept.log.rows[6:]] == [SMALL.min_lr] * 5 + [None]
    assert kept.note == ""
    assert "note:" not in capsys.readouterr().err


@pytest.mark.parametrize("before", ["another", None], ids=["other kernels", "a checkpoint that does not name them"])
def test_other_kernels_than_before_are_named_once(tmp_path, before):
    small(tmp_path, steps=2)
    path = find_latest(tmp_path) / "state.json"
    state = json.loads(path.read_text())
    assert state.pop("kernels") == kernels.active
    path.write_text(json.dumps(seal_state(state | ({"kernels": before} if before else {}))))
    notes = [small(tmp_path, resume=True, steps=steps, decay_steps=2).note for steps in (3, 4)]
    assert ("the kernels were another before step 2" in notes[0]) == (before is not None)
    assert notes[1] == ""


def test_a_run_with_a_byte_pair_tokenizer_resumes_with_it(tmp_path):
    pytest.importorskip("tokenizers")
    merges = [("t", "h"), ("th", "e")]
    vocab = {token: i for i, token in enumerate([*BYTE_SYMBOLS, "th", "the"])}
    small(tmp_path, tokenizer=BPETokenizer(vocab, merges), steps=2)
    run = small(tmp_path, resume=True, steps=4)
    assert run.tokenizer.vocab_size == 258
    assert 257 in run.train_ids
    model, tokenizer = load_trained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert model.config.vocab_size == 258


@pytest.mark.usefixtures("interruptible")
def test_a_second_interruption_stops_at_once(tmp_path):
    def interrupt_twice(event):
        if event["event"] == "step" and event["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, show=interrupt_twice)
    assert signal.getsignal(signal.SIGINT) is handler
    assert find_latest(tmp_path).name == "step-3"


def test_an_ignored_interruption_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = small(steps=2, show=lambda event: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not run.interrupted
    assert run.step == 2


@pytest.mark.usefixtures("interruptible")
def test_a_run_puts_the_handlers_of_signals_back():
    before = [signal.getsignal(number) for number in loop.STOPS]
    small(steps=1)
    assert [signal.getsignal(number) for number in loop.STOPS] == before


def test_training_in_another_thread_leaves_signals_alone():
    runs = []
    thread = threading.Thread(target=lambda: runs.append(small(steps=1)))
    thread.start()
    thread.join()
    assert runs[0].step == 1


def die(name, tmp_path):
    """One entry of benchmarks/sudden_death.py, in a process of its own: it forks, and may not take threads along."""
    script, counts = Path(__file__).parent.parent / "benchmarks/sudden_death.py", tmp_path / "counts.json"
    command = [sys.executable, str(script), "--only", name, "--json", str(counts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(counts.read_text())[name]


@posix
def test_a_run_killed_at_any_file_operation_resumes_bit_for_bit(tmp_path):
    assert die("operations", tmp_path)["kills"] > 50


@posix
def test_a_run_that_dies_or_fails_in_the_middle_of_a_file_resumes_bit_for_bit(tmp_path):
    assert die("sizes", tmp_path)["limits"] > 10


@posix
def test_a_run_goes_on_while_the_clock_runs_backwards_or_stands_still(tmp_path):
    assert die("clock", tmp_path)["clocks"] == 2


@posix
def test_a_folder_that_becomes_read_only_is_an_error_that_names_it(tmp_path):
    assert die("protection", tmp_path)["moments"] == 7


@posix
def test_a_process_killed_at_random_moments_resumes_bit_for_bit(tmp_path):
    options = {"steps": 60, "eval_interval": 20, "sample_interval": 20, "checkpoint_interval": 2}
    small(tmp_path / "whole", **options)
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from test_training import report, small
        report.can_plot = lambda: False
        small(Path(sys.argv[2]), resume=True, show="json", **{options})
    """)
    draw, kills = random.Random(1), 0
    while True:
        command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "killed")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            lines = [process.stdout.readline() for _ in range(draw.randrange(60))]
            time.sleep(draw.uniform(0, 0.01))
            process.kill()
            lines += process.stdout.readlines()
        if any(b'"end"' in line for line in lines):
            break
        kills += 1
    assert kills > 1
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_failing_rename_keeps_the_old_checkpoint_and_raises(tmp_path, monkeypatch, fails_at):
    run = Run(SMALL, TEXT, folder=tmp_path)
    loop.create_folder(run)
    run.update()
    before = {name: data for name, data in contents(tmp_path).items() if name.startswith(("LATEST", "step-0/"))}
    left, replace = [fails_at], os.replace

    def failing(*args):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "no space left")
        return replace(*args)

    monkeypatch.setattr(os, "replace", failing)
    if fails_at > 6:  # one for each of four files, one for the folder, one for LATEST
        save_checkpoint(run)
        assert find_latest(tmp_path).name == "step-1"
    else:
        with pytest.raises(OSError, match="no space left"):
            save_checkpoint(run)
        after = contents(tmp_path)
        assert {name: after[name] for name in before} == before
        assert find_latest(tmp_path).name == "step-0"
        assert not [name for name in after if ".tmp" in name]
    monkeypatch.undo()
    small(tmp_path, resume=True)
    assert find_latest(tmp_path).name == "step-11"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "characters.json"])
@pytest.mark.parametrize("length", [0, 7, 0.5, -1, None])
def test_a_truncated_or_missing_file_of_a_checkpoint_is_refused_by_name(tmp_path, name, length):
    small(tmp_path, steps=1)
    path = find_latest(tmp_path) / name
    whole = path.read_bytes()
    if length is None:
        path.unlink()
    else:
        path.write_bytes(whole[: int(length * len(whole)) if isinstance(length, float) else length])
    before = contents(tmp_path)
    with pytest.raises(
        (CheckpointError, OSError, ValueError), match="characters|tokenizer" if "char" in name else name
    ):
        small(tmp_path, resume=True, steps=2)
    if name != "optimizer.safetensors":
        with pytest.raises((CheckpointError, OSError, ValueError)):
            load_trained(tmp_path)
    assert contents(tmp_path) == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    small(tmp_path / "a", steps=1)
    small(tmp_path / "b", steps=1, n_embd=10)
    (find_latest(tmp_path / "a") / "model.safetensors").write_bytes(
        (find_latest(tmp_path / "b") / "model.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: its SHA-256"):
        small(tmp_path / "a", resume=True)


def test_a_changed_number_in_the_state_is_refused(tmp_path):
    small(tmp_path, steps=1)
    path = find_latest(tmp_path) / "state.json"
    path.write_text(path.read_text().replace('"has_uint32": 0', '"has_uint32": 1', 1))
    with pytest.raises(CheckpointError, match=r"state.json is damaged: the SHA-256 of its content is"):
        small(tmp_path, resume=True)


@pytest.mark.parametrize("damage", [None, {}, {"bit_generator": "MT19937"}, {"state": {"state": -1, "inc": 2**200}}])
def test_damaged_generator_numbers_are_refused_and_change_nothing(tmp_path, damage):
    run = small(tmp_path, steps=1)
    before = weights(run), run.batches.state_dict()
    with pytest.raises(ValueError, match="is not the state of a generator of the kind PCG64"):
        run.batches.load_state_dict({"generator": damage and run.batches.state_dict()["generator"] | damage})
    assert (weights(run), run.batches.state_dict()) == before


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    small(tmp_path / "a", steps=1)
    small(tmp_path / "b", steps=1, n_embd=10)
    (find_latest(tmp_path / "a") / "optimizer.safetensors").write_bytes(
        (find_latest(tmp_path / "b") / "optimizer.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is damaged: its SHA-256"):
        small(tmp_path / "a", resume=True)


def test_another_configuration_is_refused_with_all_differences(tmp_path):
    small(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match=r"n_embd is 6, not 10; learning_rate is 0.01, not 0.02"):
        small(tmp_path, resume=True, n_embd=10, learning_rate=0.02)
    with pytest.raises(CheckpointError, match=r"n_layer is 1, not 2"):
        small(tmp_path, resume=True, config=TrainConfig(n_layer=2))
    with pytest.raises(CheckpointError, match=r"batch_size is 3, not 16"):
        small(tmp_path, config="tiny", resume=True)


def test_another_text_is_refused(tmp_path):
    small(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match=r"another text: 1035 characters.*now 1034"):
        small(tmp_path, text=TEXT[:-1], resume=True)
    with pytest.raises(ValueError, match="pass it again"):
        train(folder=tmp_path, resume=True, show="quiet")


def test_fewer_steps_than_taken_are_refused(tmp_path):
    small(tmp_path, steps=3)
    with pytest.raises(ValueError, match=r"steps must be at least 3, .* got 2"):
        small(tmp_path, resume=True, steps=2)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    small(tmp_path, steps=1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="contains a run already, at step-1: resume it, or choose another folder"):
        small(tmp_path)
    assert contents(tmp_path) == before


def test_a_run_without_its_latest_file_resumes_from_its_last_checkpoint(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    (tmp_path / "run" / "LATEST").unlink()
    with pytest.raises(ValueError, match="contains a run already, at step-11"):
        small(tmp_path / "run")
    assert small(tmp_path / "run", resume=True).step == 11


@posix
def test_a_second_run_in_one_folder_is_refused_until_the_first_ends(tmp_path):
    def begin_another(event):
        if event["event"] == "start":
            with pytest.raises(BlockingIOError, match="another process is training in this folder"):
                small(tmp_path, resume=True)

    small(tmp_path, steps=1, show=begin_another)
    assert small(tmp_path, resume=True, steps=2).step == 2


@posix
def test_a_second_run_that_is_refused_leaves_the_folder_that_both_created(tmp_path, monkeypatch):
    folder, exists = tmp_path / "run", Path.exists

    def begin_another(event):
        if event["event"] == "start":  # the first has written nothing yet
            monkeypatch.setattr(Path, "exists", lambda path: path != folder and exists(path))
            with pytest.raises(BlockingIOError):
                small(folder)
            monkeypatch.undo()

    assert small(folder, steps=1, show=begin_another).step == 1


@pytest.mark.parametrize("name", ["step-7/notes.txt", "log.csv", "samples.csv", "loss.png"])
def test_a_run_that_would_overwrite_files_of_others_is_refused(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name.split('/')[0]}, which a run would overwrite"):
        small(tmp_path)
    assert contents(tmp_path) in ({name: b"mine"}, {})


def test_a_folder_with_the_name_of_a_log_is_refused(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(FileExistsError, match=r"log\.csv, which a run would overwrite"):
        small(tmp_path)


def test_notes_in_a_checkpoint_are_never_removed(tmp_path):
    small(tmp_path, steps=3)
    (tmp_path / "step-3" / "notes.txt").write_text("mine")
    small(tmp_path, steps=6, resume=True)
    assert (tmp_path / "step-3" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("name", "words"), [("state.json", "is a checkpoint"), ("config.json", "Hugging Face folder")])
def test_resuming_a_folder_that_is_no_run_says_what_it_is(tmp_path, name, words):
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=words):
        small(tmp_path, resume=True)


def test_the_checkpoint_before_is_kept_until_the_run_is_finished(tmp_path):
    kept = []
    small(
        tmp_path, steps=6, show=lambda e: e["event"] == "checkpoint" and kept.append(len(list(tmp_path.glob("step-*"))))
    )
    assert kept == [2, 1]


@pytest.mark.parametrize("text", ["a\rb", "\r\n\r", '"\r"', "x" * 200_000, "", ",\n"])
def test_every_sample_survives_a_resume(tmp_path, text):
    log = CsvLog(tmp_path / "samples.csv", {"step": int, "text": str})
    log.rewind(0)
    log.add({"step": 1, "text": text})
    again = CsvLog(tmp_path / "samples.csv", {"step": int, "text": str})
    again.rewind(2)
    assert again.rows == [{"step": 1, "text": text}]


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_asked_to_end_saves_first(tmp_path, number):
    def ask(event):
        if event["event"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    run = small(tmp_path, show=ask)
    assert run.interrupted
    assert find_latest(tmp_path).name == f"step-{run.step}"
    assert signal.getsignal(number) == before


@posix
def test_links_are_followed_and_pipes_are_written_into(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("old")
    with replacing(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    with replacing("/dev/null") as temporary:
        temporary.write_text("gone")
    assert Path("/dev/null").is_char_device()


def test_unrelated_files_in_the_folder_are_kept(tmp_path):
    for name in ("step-by-step.txt", "step-3.txt", "notes.tmp"):
        (tmp_path / name).write_text("mine")
    small(tmp_path, steps=1)
    assert {"step-by-step.txt", "step-3.txt", "notes.tmp"} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("content", ["", "step-7\n", "../step-1", "step-1/../.."])
def test_a_latest_file_without_its_checkpoint_is_refused(tmp_path, content):
    small(tmp_path, steps=1)
    (tmp_path / "LATEST").write_text(content)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        small(tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"cannot write the run to this folder.*file"):
            small(folder)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot write the run"):
        small(tmp_path / "run")


def test_a_damaged_log_is_refused_and_a_missing_one_is_created(tmp_path):
    small(tmp_path, steps=3)
    log = tmp_path / "log.csv"
    whole = log.read_text()
    log.write_text(whole.replace("1,0.00666", "1,oops"))
    with pytest.raises(CheckpointError, match=r"log.csv has a row that cannot be read"):
        small(tmp_path, resume=True)
    log.unlink()
    small(tmp_path, resume=True)
    assert log.read_text().splitlines()[0] == whole.splitlines()[0]


@pytest.mark.parametrize(("characters", "part"), [(3, "training"), (40, "validation"), (70, "validation")])
def test_a_text_that_is_too_short_is_refused_with_the_part(characters, part):
    with pytest.raises(ValueError, match=rf"the {part} part .*too short"):
        small(text=TEXT[:characters])


def test_a_nan_loss_raises_with_its_step_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    loss = GPT.loss
    seen = []

    def poisoned(self, idx, targets):
        seen.append(self.training)
        value = loss(self, idx, targets)
        return value * math.nan if seen.count(True) > 2 * 7 else value

    monkeypatch.setattr(GPT, "loss", poisoned)
    with pytest.raises(DivergedError, match=r"at step 7: the loss is nan .*last good checkpoint is .*step-6"):
        small(tmp_path)
    monkeypatch.undo()
    model, _ = load_trained(tmp_path)
    assert all(np.isfinite(p.numpy()).all() for p in model.parameters())
    with open(tmp_path / "log.csv") as file:
        assert len(file.readlines()) == 1 + 7


def test_a_diverging_run_raises_without_warnings():
    with pytest.raises(DivergedError, match=r"diverged at step \d+: .* Try a lower learning rate"):
        small(learning_rate=1e30, min_lr=0.0, warmup=0, weight_decay=0.0, sample_interval=0, eval_interval=100)


def test_infinite_weights_are_not_saved(tmp_path):
    run = Run(SMALL, TEXT, folder=tmp_path)
    loop.create_folder(run)
    run.update()
    run.model.parameters()[0].data[0, 0] = math.inf
    with pytest.raises(DivergedError, match=r"a weight is inf or nan"):
        save_checkpoint(run)
    assert find_latest(tmp_path).name == "step-0"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc gives the file of a handle")
def test_all_of_a_checkpoint_is_on_the_disk_before_latest_names_it(tmp_path, monkeypatch):
    run = Run(SMALL, TEXT, folder=tmp_path)
    loop.create_folder(run)
    run.update()
    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"-> {Path(new).name}"), replace(old, new)))
    save_checkpoint(run)
    before = done[: done.index("-> LATEST")]
    synced = [name for name in before if not name.startswith("->")]
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "characters.json"):
        assert before.index(f"-> {name}") > 0
        assert any(name in other for other in synced)
    assert before.index("step-1.tmp") == before.index("-> step-1") - 1
    assert {"log.csv", "samples.csv", tmp_path.name} <= set(synced)


def test_a_run_without_a_folder_cannot_be_saved():
    with pytest.raises(ValueError, match="no folder"):
        save_checkpoint(Run(SMALL, TEXT))


# ---------------------------------------------------------------------------------------------------------- using a run


def test_a_trained_model_is_loaded_with_its_tokenizer(tmp_path):
    run = small(tmp_path)
    model, tokenizer = load_trained(tmp_path)
    assert tokenizer.characters == run.tokenizer.characters
    assert not model.training
    ids = tokenizer.encode("the lazy")[None, :7]
    with tg.no_grad():
        assert np.array_equal(model(ids).numpy(), run.model.eval()(ids).numpy())
    again, _ = load_trained(find_latest(tmp_path))
    assert np.array_equal(again.parameters()[0].numpy(), model.parameters()[0].numpy())


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
        load_trained(tmp_path)


# -------------------------------------------------------------------------------------------------------------- reports


def test_json_prints_one_object_per_event(capsys):
    run = small(show="json")
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(12))
    assert [event["step"] for event in events if event["event"] == "sample"] == [0, 5, 10, 11]
    assert events[0] == {"event": "start", "step": 0, "computing": run.workers.summary, "note": ""}
    assert events[2]["tokens_per_second"] > 0
    steps = [event for event in events if event["event"] == "step"]
    assert [{k: event[k] for k in row} for row, event in zip(run.log.rows, steps, strict=True)] == run.log.rows
    assert events[-1] == {"event": "end", "step": 11, "interrupted": False}


def test_events_name_each_checkpoint(tmp_path):
    events = []
    small(tmp_path, show=events.append)
    saved = [event for event in events if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [3, 6, 9, 11]
    assert saved[-1]["path"] == str(tmp_path / "step-11")


def test_tokens_per_second_count_the_tokens_of_all_accumulated_batches(monkeypatch):
    clock = iter(range(0, 10**6, 2))  # every update takes 2 seconds
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(clock)))
    events = []
    small(steps=1, show=events.append)
    speeds = [event["tokens_per_second"] for event in events if "tokens_per_second" in event]
    assert speeds == [SMALL.batch_size * SMALL.accumulate * SMALL.block_size / 2]


def test_quiet_prints_nothing(capsys, tmp_path):
    small(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_losses_speed_and_samples(capsys):
    run = small(show="bar")
    out, err = capsys.readouterr()
    assert out == ""
    assert f"validation {run.log.rows[-1]['validation_loss']:.4f}" in err
    assert f"loss {run.log.rows[-2]['loss']:.4f}" in err
    assert "tokens/s" in err
    assert "11/11" in err
    assert run.samples.rows[1]["text"] in err


def test_an_unknown_show_is_refused(tmp_path):
    with pytest.raises(ValueError, match='"bar", "json", "quiet" or a function'):
        small(tmp_path / "run", show="loud")
    assert not (tmp_path / "run").exists()


def test_the_loss_plot_is_written_if_matplotlib_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "can_plot", CAN_PLOT)
    small(tmp_path / "with", steps=2)
    assert (tmp_path / "with" / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(report, "can_plot", lambda: False)
    small(tmp_path / "without", steps=2)
    assert not (tmp_path / "without" / "loss.png").exists()


def test_the_documented_example_is_true():
    run = train("tiny", text="hello world. " * 99, steps=3, eval_batches=1, sample_interval=0, show="quiet")
    assert [row["step"] for row in run.log.rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "block_size", "vocab_size"])
def test_absurd_sizes_in_a_state_are_compared_with_the_weights_before_memory_is_allocated(key, tmp_path):
    run = train("tiny", "hello world. " * 99, tmp_path, steps=1, eval_batches=1, sample_interval=0, show="quiet")
    path = tmp_path / f"step-{run.step}" / "state.json"
    state = json.loads(path.read_text())
    state["model"]["identity"][key] = 4 * 10**9
    path.write_text(json.dumps(seal_state(state)))
    with pytest.raises(CheckpointError, match="but the saved one has 2 and"):
        load_trained(tmp_path)
