"""A batch shared among threads and MPI ranks trains as one process does."""

import dataclasses
import importlib.util
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_training import SMALL, TEXT, contents, small

import tinygrad_mha as tg
from tinygrad_mha.files.run_folder import find_latest
from tinygrad_mha.nn import GPT, Dropout, Module
from tinygrad_mha.training import accumulate, parallel, report
from tinygrad_mha.training.parallel import Workers, find_ranks

pytest.importorskip("threadpoolctl")

FIVE = dataclasses.replace(SMALL, batch_size=5, dropout=0.0)  # rows that neither 2 nor 3 divides
IDS = np.random.default_rng(0).integers(11, size=50)


@pytest.fixture(autouse=True)
def _no_step_is_too_small(monkeypatch):
    monkeypatch.setattr(parallel, "LEAST_WORK", 0)
    monkeypatch.setattr(report, "can_plot", lambda: False)


def train_in_float64(folder=None, config=FIVE, **options):
    model = GPT(config.make_model_config(len(set(TEXT))), seed=1).astype(np.float64)
    return small(folder, config=config, model=model, **options)


def assert_equal_losses(rows, expected):
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose([row[name] for name in other], list(other.values()), rtol=1e-12)


@pytest.fixture(scope="module")
def alone():
    return train_in_float64().log.rows


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_any_number_of_workers_gives_the_losses_of_one(workers, alone):
    run = train_in_float64(workers=workers)
    assert run.workers.threads == workers
    assert_equal_losses(run.log.rows, alone)


def test_one_worker_is_the_default_bit_for_bit():
    assert small(workers=1).log.rows == small().log.rows


class Parts(Module):
    """A loss with a parameter that only some rows use, one that none does, and dropout."""

    def __init__(self, p=0.0):
        self.used, self.sometimes, self.never = (tg.Tensor(np.full(11, x), requires_grad=True) for x in (0.5, 2.0, 3.0))
        self.dropout = Dropout(p, rng=3)
        self.draws = []

    def loss(self, idx, targets):
        counted = targets != -100
        losses = self.dropout(self.used[idx]) ** 2 * counted
        if (idx == 7).any():
            losses = losses + self.sometimes[idx] * ((idx == 7) & counted)
        self.draws.append(losses.numpy())
        return losses.sum() / max(np.count_nonzero(counted), 1)


@pytest.mark.parametrize("workers", [2, 3])
def test_parts_weigh_by_their_counted_targets_and_leave_parameters_that_no_loss_uses(workers, rng):
    idx, targets = rng.integers(7, size=(2, 5, 3)), rng.integers(11, size=(2, 5, 3))
    idx[1, 4] = 7
    targets[0, :2] = targets[0, 3, 1:] = targets[1, 4, 0] = -100
    batches = list(zip(idx, targets, strict=True))
    model, expected = Parts(), Parts()
    value = Workers(model, FIVE, IDS, workers).accumulate(batches)
    assert value == pytest.approx(accumulate(expected, batches), rel=1e-13)
    for ours, theirs in ((model.used, expected.used), (model.sometimes, expected.sometimes)):
        np.testing.assert_allclose(ours.grad, theirs.grad, rtol=1e-13)
    assert model.never.grad is None
    model.zero_grad()
    Workers(model, FIVE, IDS, workers).accumulate(batches[:1])
    assert model.sometimes.grad is None


def test_each_part_draws_its_own_dropout_and_the_generator_of_the_model_does_not_depend_on_the_parts():
    batch = [(np.zeros((5, 11), int), np.zeros((5, 11), int))]
    model, twin = Parts(0.5), Parts(0.5)
    workers = Workers(model, FIVE, IDS, 3)
    for copy in workers.copies:
        copy.draws = []
    for _ in range(2):
        workers.accumulate(batch)
    draws = [draw for copy in workers.copies for draw in copy.draws]
    assert [len(draw) for draw in draws] == [1, 1, 2, 2, 2, 2]
    rows = [row.tobytes() for draw in draws for row in draw]
    assert len(set(rows)) == 10
    twin.dropout.rng.integers(2**63, size=3)
    twin.dropout.rng.integers(2**63, size=3)
    assert model.dropout.rng.bit_generator.state == twin.dropout.rng.bit_generator.state


def test_a_run_with_workers_resumes_bit_for_bit_and_with_another_number_too(tmp_path):
    def stop(event):
        if event.get("event") == "step" and event["step"] == 4:
            raise KeyboardInterrupt

    small(tmp_path / "whole", workers=3)
    for name in ("parts", "other"):
        with pytest.raises(KeyboardInterrupt):
            small(tmp_path / name, workers=3, show=stop)
    small(tmp_path / "parts", workers=3, resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert small(tmp_path / "other", workers=2, resume=True).step == 11


@pytest.mark.parametrize("workers", [1, 2])
def test_blas_has_one_thread_while_several_workers_train_and_as_many_as_before_afterwards(workers):
    import threadpoolctl

    def count():
        return [int(pool["num_threads"]) for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    counts = []

    def observe(event):
        counts.append(count())
        if event["step"] == 2:
            raise ZeroDivisionError("mine")

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = count()
        with pytest.raises(ZeroDivisionError, match="mine"):
            small(workers=workers, show=observe)
        assert count() == before
    assert counts[1:] == [[1] if workers > 1 else before] * (len(counts) - 1)


def test_an_error_in_a_thread_is_raised_when_all_have_ended():
    class Failing(Parts):
        fails = False

        def loss(self, idx, targets):
            if self.fails:
                raise ZeroDivisionError("mine")
            return super().loss(idx, targets)

    workers = Workers(Failing(), FIVE, IDS, 2)
    workers.copies[1].fails = True
    with pytest.raises(ZeroDivisionError, match="mine"):
        workers.accumulate([(np.zeros((5, 3), int), np.zeros((5, 3), int))])


def test_steps_too_small_for_threads_are_computed_in_one_and_the_run_says_so(monkeypatch):
    monkeypatch.setattr(parallel, "LEAST_WORK", 10**9)
    events = []
    run = small(workers=3, show=events.append)
    assert run.workers.threads == 1
    note = "and threads pay from 1,000,000,000 on), ranks: 1"
    assert events[0]["computing"].startswith("kernels: ")
    assert "workers: 1 (not 3: a step has " in events[0]["computing"]
    assert note in events[0]["computing"]
    assert run.log.rows == small().log.rows


def test_the_size_of_a_step_is_counted_not_timed():
    model = GPT(dataclasses.replace(FIVE, n_embd=8).make_model_config(11), seed=0)
    rows = parallel.count_row(model, IDS[:8])
    assert rows == 7 * (4 * 8 * 8 + 8 * 8 * 8 + 2 * 7 * 8 + 8 * 11)


@pytest.mark.parametrize("workers", [0, -1, 2.5, True, "2"])
def test_workers_that_are_no_positive_count_are_refused(workers):
    with pytest.raises(ValueError, match="workers must be an integer of at least 1"):
        small(workers=workers)


def test_more_workers_than_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"1 x 4 ranks x workers are more than the 3 rows of a batch: use fewer"):
        small(tmp_path / "run", workers=4)
    assert not (tmp_path / "run").exists()


def test_workers_without_threadpoolctl_are_refused_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(ImportError, match=r'pip install "tinygrad_mha\[fast\]"'):
        small(workers=2)


def test_a_model_that_cannot_be_copied_is_refused():
    model = Parts()
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"each worker needs a copy of the model, but cannot pickle .*: use workers=1"):
        Workers(model, FIVE, IDS, 2)


# ---------------------------------------------------------------------------------------------------------------- ranks

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason='MPI is not installed: pip install "tinygrad_mha[mpi]"',
)

RANK = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_parallel import FIVE, SMALL, TEXT, dataclasses, parallel, report, small, train_in_float64
parallel.LEAST_WORK, report.can_plot = 0, lambda: False
rank, folder = parallel.find_ranks().rank, Path(sys.argv[2])
"""


def launch(ranks, script, folder):
    """Start a script in `ranks` processes."""
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-c", RANK + textwrap.dedent(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(Path(__file__).parent), str(folder)], start_new_session=True, **pipes)


def finish(process):
    """The exit code and the outputs of a launch."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@mpi
def test_ranks_give_the_losses_of_one_process_and_resume_with_another_number(tmp_path, alone):
    script = """
        def stop(event):
            if event["event"] == "step" and event["step"] == {last}:
                os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run = train_in_float64(folder, resume=True, workers={workers}, show=stop)
        assert run.folder == (None if rank else folder)
        print(run.workers.summary)
    """
    code, out, err = finish(launch(3, script.format(last=2, workers=1), tmp_path))
    assert (code, err) == (0, "")
    assert "ranks: 3" in out
    assert find_latest(tmp_path).name == "step-4"  # one rank was interrupted; all stop after the next step
    code, out, err = finish(launch(2, script.format(last=6, workers=2), tmp_path))
    assert (code, err) == (0, "")
    assert "workers: 2, ranks: 2" in out
    assert find_latest(tmp_path).name == "step-8"
    assert_equal_losses(train_in_float64(tmp_path, resume=True).log.rows, alone)


@mpi
def test_the_command_trains_on_two_ranks_and_shows_one(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    settings = [f"{name}={value}" for name, value in FIVE.to_dict().items() if name in ("n_embd", "batch_size")]
    train = [sys.executable, "-m", "tinygrad_mha", "train", "--text", tmp_path / "text", "--out", tmp_path / "run"]
    options = ["--steps", "3", "--set", *settings, "n_layer=1", "n_head=2", "block_size=7", "sample_interval=0"]
    command = [MPIEXEC, "-n", "2", *train, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("finished at step 3") == 1
    assert result.stdout.count("workers: 1, ranks: 2") == 1
    assert result.stderr.count("workers: 1, ranks: 2") == 1
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert again.stderr.count("contains a run already, at step-3: continue it with --resume") == 1


@mpi
def test_a_rank_that_fails_stops_all_with_its_message_and_the_checkpoint_stays_whole(tmp_path):
    script = """
        from tinygrad_mha.nn import GPT
        loss, calls = GPT.loss, []
        def failing(self, *batch):
            calls.append(self.training)
            if rank == 1 and calls.count(True) > 2 * 7:
                raise ZeroDivisionError("of rank 1")
            return loss(self, *batch)
        GPT.loss = failing
        small(folder, config=FIVE)
    """
    code, _, err = finish(launch(2, script, tmp_path))
    assert code not in (0, None)
    assert err.count("ZeroDivisionError: of rank 1") == 1
    assert find_latest(tmp_path).name == "step-6"
    assert small(tmp_path, resume=True, config=FIVE).step == 11


@mpi
def test_a_rank_that_is_killed_stops_all(tmp_path):
    script = """
        def die(event):
            if event["event"] == "step" and event["step"] == 7:
                os.kill(os.getpid(), signal.SIGKILL)
        small(folder, config=FIVE, show=die)
    """
    code, _, _ = finish(launch(2, script, tmp_path))
    assert code not in (0, None)
    assert find_latest(tmp_path).name == "step-6"


@mpi
def test_an_error_of_all_ranks_is_reported_once(tmp_path):
    code, _, err = finish(launch(3, "small(folder, workers=2)", tmp_path / "run"))
    assert code not in (0, None)
    assert err.count("3 x 2 ranks x workers are more than the 3 rows of a batch") == 1
    assert not (tmp_path / "run").exists()


@mpi
def test_ranks_that_train_different_things_are_refused_and_weights_are_those_of_rank_0(tmp_path):
    code, _, err = finish(launch(2, "small(folder, learning_rate=0.01 + rank)", tmp_path))
    assert code not in (0, None)
    assert err.count("rank 0 and rank 1 train different things: on rank 0, learning_rate is 0.01, not 1.01") == 1
    script = """
        from tinygrad_mha.nn import GPT
        model = GPT(SMALL.make_model_config(len(set(TEXT))), seed=rank)
        before = model.state_dict()
        run = small(None, model=model, steps=0)
        kept = all((model.state_dict()[name] == before[name]).all() for name in before)
        assert kept == (rank == 0), rank
    """
    code, _, err = finish(launch(2, script, tmp_path))
    assert (code, err) == (0, "")


@mpi
def test_ctrl_c_at_the_launcher_stops_all_ranks_with_a_checkpoint(tmp_path):
    script = """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def tell(event):
            print(event["event"], event["step"], flush=True)
            time.sleep(0.02)
        run = small(folder, config=FIVE, steps=1000, show=tell)
        sys.exit(130 if run.interrupted else 0)
    """
    process = launch(2, script, tmp_path)
    while process.stdout.readline() != "step 2\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert f"checkpoint {find_latest(tmp_path).name.removeprefix('step-')}" in out
    assert find_latest(tmp_path).name != "step-0"


def test_a_launch_without_mpi4py_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r'4 processes were launched, .* pip install "tinygrad_mha\[mpi\]"'):
        small(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@mpi
def test_the_library_that_finds_another_number_of_ranks_is_named_in_one_line(monkeypatch):
    pytest.importorskip("mpi4py.MPI")
    library = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1), Get_library_version=lambda: "Own 4\nmore")
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setattr("mpi4py.MPI", library)
    with pytest.raises(
        RuntimeError, match=r"3 processes were launched, but the MPI library of mpi4py \(Own 4\) finds 1"
    ):
        find_ranks()


def test_the_launcher_of_another_mpi_library_is_refused(tmp_path):
    script = "import os; os.environ['PMI_SIZE'] = '4'; import tinygrad_mha.training.parallel as p; p.find_ranks()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "4 processes were launched, but the MPI library of mpi4py" in result.stderr
    assert "finds 1: start them with the mpiexec of that library" in result.stderr
