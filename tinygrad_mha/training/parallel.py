"""The gradients of one step: accumulated over batches, shared among threads, and among the ranks of an MPI launch.

Every rank draws the same batches and takes its rows of them, and divides these among its threads. So the ranks need one
Allreduce per step, and a run is the same, up to rounding, however many share the work.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np

from tinygrad_mha import kernels
from tinygrad_mha.arguments import check_count
from tinygrad_mha.decoding.cost import count_multiply_adds
from tinygrad_mha.modes import no_grad, record
from tinygrad_mha.nn import Module
from tinygrad_mha.training.config import TrainConfig, list_differences

__all__ = ["LEAST_WORK", "Workers", "accumulate", "find_ranks", "join_ranks"]

T = TypeVar("T")
Batch = tuple[np.ndarray, np.ndarray]

IGNORED = -100  # targets that losses do not count, as `ignore_index` of `ops.cross_entropy`

# The multiply-adds of a step below which threads lose more time to the interpreter, which they share, than they save.
LEAST_WORK = 500_000_000

# The variables in which launchers tell a process how many there are: MPICH and its descendants, Open MPI, Slurm.
LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def accumulate(
    model: Any, batches: Sequence[Batch], ignore_index: int = IGNORED, n_targets: int | None = None
) -> float:
    """Compute the mean loss over all targets of all batches, accumulate its gradient in `.grad`, and return it.

    Each batch is weighted by its number of targets that are not `ignore_index`, so six batches of ten give the result
    of one of sixty. A value other than -100 is passed on: `model.loss(idx, targets, ignore_index=...)`. A model whose
    loss leaves out targets of its own, as a translator does, has a method `count_targets(targets)`. With `n_targets`,
    the number of targets of more batches than these, the result is their part of that mean.
    """
    options = {} if ignore_index == IGNORED else {"ignore_index": ignore_index}
    counts = count_targets(model, batches, ignore_index)
    total, value = max(sum(counts) if n_targets is None else n_targets, 1), 0.0
    for (idx, targets), count in zip(batches, counts, strict=True):
        loss = model.loss(idx, targets, **options) * (count / total)
        loss.backward(leaves_only=True)
        value += loss.item()
    return value


def count_targets(model: Any, batches: Sequence[Batch], ignore_index: int = IGNORED) -> list[int]:
    """The number of targets of each batch that the loss of the model counts."""
    count = getattr(model, "count_targets", None) or (
        lambda targets: np.count_nonzero(np.asarray(targets) != ignore_index)
    )
    return [int(count(targets)) for _, targets in batches]


class Workers:
    """The threads of this process, and the ranks of an MPI launch, that share the rows of each batch.

    Each thread computes with a copy of the model, which has the same parameters in the same memory but gradients and
    random generators of its own.

    Args:
        model: the model to train, in train mode. On several ranks it gets the weights and generators of rank 0.
        config: the configuration of the run.
        ids: the text to train on, (n,). Ranks must agree on configuration, text and parameters.
        workers: the number of threads per rank, one if None. Steps of fewer than LEAST_WORK multiply-adds per rank are
            computed in one thread.

    Attributes:
        comm: the communicator of the ranks; `comm.rank` and `comm.size` are 0 and 1 without an MPI launch.
        threads: the number of threads.
        limit_blas: a function that returns a context manager. Inside, BLAS uses one thread if `Workers` use several:
            for the whole run, because the threads of BLAS wait for more work by spinning on the cores of the workers.
        summary: the kernels, workers and ranks in one line.

    Raises:
        ValueError: `workers` is no positive integer, there are more workers than rows, or the ranks differ.
        TypeError: the model cannot be copied.
        ImportError: threadpoolctl or mpi4py is missing.
    """

    def __init__(self, model: Module, config: TrainConfig, ids: np.ndarray, workers: int | None = None) -> None:
        self.comm = find_ranks()
        self.threads = 1 if workers is None else check_count(workers, "workers")
        size, rows = self.comm.size, config.batch_size
        if size * self.threads > rows:
            raise ValueError(
                f"{size} x {self.threads} ranks x workers are more than the {rows} rows of a batch: use fewer, or a "
                f"larger batch_size"
            )
        note = ""
        if self.threads > 1:
            work = 3 * count_row(model, ids[: config.block_size + 1]) * (rows // size) * config.accumulate
            if work < LEAST_WORK:
                note = (
                    f" (not {self.threads}: a step has {work:,} multiply-adds, and threads pay from {LEAST_WORK:,} on)"
                )
                self.threads = 1
        self.summary = f"kernels: {kernels.active}, workers: {self.threads}{note}, ranks: {size}"
        self.limit_blas = import_blas_limit() if size * self.threads > 1 else nullcontext
        if size > 1:
            self._agree_on(model, config, ids)
        self.copies = [model, *(share_parameters(model) for _ in range(self.threads - 1))]
        self.parameters = list(zip(*(m.parameters() for m in self.copies), strict=True))
        self.generators = list(zip(*(m.generators().values() for m in self.copies), strict=True))
        self.pool = ThreadPoolExecutor(self.threads)
        self.stops = self.stopped = False

    def _agree_on(self, model: Module, config: TrainConfig, ids: np.ndarray) -> None:
        """Check that the ranks train the same, and copy the weights and generators of rank 0 to all."""
        shapes = [(name, p.shape, str(p.dtype)) for name, p in model.named_parameters()]
        facts = config.to_dict() | {"the text": zlib.crc32(ids.tobytes()), "the parameters": shapes}
        first, *others = self.comm.allgather(facts)
        for rank, other in enumerate(others, 1):
            if wrong := list_differences(first, other):
                raise ValueError(f"rank 0 and rank {rank} train different things: on rank 0, {wrong}")
        model.load_state_dict(self.comm.bcast(model.state_dict()))
        for rng in model.generators().values():
            rng.bit_generator.state = self.comm.bcast(rng.bit_generator.state)

    def accumulate(self, batches: Sequence[Batch]) -> float:
        """`accumulate`, with the rows of each batch shared: the same loss and gradients on every rank, up to rounding.

        A parameter that no part of the loss depends on keeps its `.grad` of None.
        """
        n = self.comm.size * self.threads
        if n == 1:
            return accumulate(self.copies[0], batches)
        n_targets, first = sum(count_targets(self.copies[0], batches)), self.comm.rank * self.threads

        def compute(thread: int) -> float:
            part = [take_part(batch, first + thread, n) for batch in batches]
            return accumulate(self.copies[thread], part, n_targets=n_targets)

        with self._seed_parts(first, n):
            # Each thread in a context like the caller's, with its error states and observers.
            futures = [self.pool.submit(copy_context().run, compute, thread) for thread in range(1, self.threads)]
            try:
                loss = compute(0)
            finally:
                wait(futures)
        loss += sum(future.result() for future in futures)
        for p, *others in self.parameters:  # in one order, so that a run is reproducible
            for other in others:
                if other.grad is not None:
                    p.grad = other.grad if p.grad is None else np.add(p.grad, other.grad, out=p.grad)
                    other.grad = None
        return loss if self.comm.size == 1 else self._reduce(loss)

    @contextmanager
    def _seed_parts(self, first: int, n: int) -> Iterator[None]:
        """Let each of `n` parts draw from generators of its own, which those of the model seed.

        The model's own draw the same on every rank, and only they belong to the state of the run.
        """
        states = []
        for own, *others in self.generators:
            seeds = own.integers(2**63, size=n)[first:]
            states.append(own.bit_generator.state)
            for rng, seed in zip([own, *others], seeds, strict=False):
                rng.bit_generator.state = type(rng.bit_generator)(int(seed)).state
        try:
            yield
        finally:
            for (own, *_), state in zip(self.generators, states, strict=True):
                own.bit_generator.state = state

    def _reduce(self, loss: float) -> float:
        """Add up loss and gradients of all ranks, in one message."""
        parameters = [p for p, *_ in self.parameters]
        known = [p.grad is not None for p in parameters]
        gradients = [np.zeros(p.size, p.dtype) if p.grad is None else p.grad.reshape(-1) for p in parameters]
        dtype = np.result_type(np.float32, *gradients)
        ours = np.concatenate([[loss, self.stops, *known], *gradients], dtype=dtype)
        total = np.empty_like(ours)
        self.comm.Allreduce(ours, total)
        starts = np.cumsum([2 + len(known), *(p.size for p in parameters)])
        (loss, stops, *known), *gradients = np.split(total, starts[:-1])
        self.stopped = stops > 0
        for p, counts, gradient in zip(parameters, known, gradients, strict=True):
            p.grad = gradient.reshape(p.shape).astype(p.dtype, copy=False) if counts else None
        return float(loss)

    def agree_to_stop(self, stop: bool) -> bool:
        """Whether all ranks stop now: on one rank, `stop`; on several, whether it was set on one before this step."""
        self.stops = stop
        return stop if self.comm.size == 1 else self.stopped

    def map(self, function: Callable[[Batch], T], batches: Iterable[Batch]) -> list[T]:
        """[function(batch) for batch in batches], shared among the ranks. One batch is held at a time."""
        rank, size = self.comm.rank, self.comm.size
        ours = [function(batch) for batch in itertools.islice(batches, rank, None, size)]
        results = self.comm.allgather(ours)
        return [results[i % size][i // size] for i in range(sum(map(len, results)))]


def take_part(batch: Batch, part: int, n: int) -> Batch:
    """The rows of one of `n` parts, which differ in length by one row at most."""
    rows = slice(len(batch[0]) * part // n, len(batch[0]) * (part + 1) // n)
    return batch[0][rows], batch[1][rows]


def share_parameters(model: Module) -> Any:
    """A copy of a model whose tensors use the memory of the model's own."""
    memo: dict[int, Any] = {}
    for tensor in model._tensors().values():
        twin = memo[id(tensor)] = tensor.detach()
        twin.requires_grad = tensor.requires_grad
    try:
        return copy.deepcopy(model, memo)
    except TypeError as error:
        raise TypeError(f"each worker needs a copy of the model, but {error}: use workers=1") from error


def count_row(model: Any, ids: np.ndarray) -> int:
    """The multiply-adds of the loss of one row."""
    with model.evaluating(), no_grad(), record():
        return count_multiply_adds(model.loss(ids[None, :-1], ids[None, 1:]))


def import_blas_limit() -> Callable[[], AbstractContextManager[Any]]:
    """A function that returns a context manager: BLAS uses one thread inside, and what it used before afterwards."""
    try:
        from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
    except ImportError as error:
        text = 'several workers or ranks need threadpoolctl: pip install "tinygrad_mha[fast]"'
        raise ImportError(text) from error
    controller = ThreadpoolController()
    return lambda: controller.limit(limits=1, user_api="blas")


# --------------------------------------------------------------------------------------------------------------------
# Ranks


class Alone:
    """The communicator of a process without an MPI launch."""

    rank, size = 0, 1

    def bcast(self, value: T) -> T:
        return value

    def allgather(self, value: T) -> list[T]:
        return [value]


def find_ranks() -> Any:
    """The communicator of all processes of an MPI launch, `mpi4py.MPI.COMM_WORLD`, or an `Alone`.

    Raises:
        ImportError: a launcher started several processes, but mpi4py or its MPI library cannot be loaded.
        RuntimeError: that library is not the launcher's.
    """
    size = max(int(os.environ.get(name, 1)) for name in LAUNCHED)
    if size == 1:
        return Alone()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = f'{size} processes were launched, which need mpi4py to train together: pip install "tinygrad_mha[mpi]"'
        raise ImportError(f"{text} ({error})") from error
    if MPI.COMM_WORLD.size != size:
        library = MPI.Get_library_version().partition("\n")[0]
        raise RuntimeError(
            f"{size} processes were launched, but the MPI library of mpi4py ({library}) finds {MPI.COMM_WORLD.size}: "
            f"start them with the mpiexec of that library"
        )
    return MPI.COMM_WORLD


def end_all(comm: Any) -> None:
    """End all ranks, when the launcher has passed on what this one has written."""
    sys.stderr.flush()
    time.sleep(0.2)
    comm.Abort(1)


@contextmanager
def join_ranks() -> Iterator[Any]:
    """Yield the communicator of `find_ranks`. If this rank fails inside, the end of its process ends the others.

    So the error is reported as usual, and no rank waits for one that is gone.
    """
    comm = find_ranks()
    try:
        yield comm
    except BaseException:
        if comm.size > 1:
            atexit.register(end_all, comm)
            if comm.rank > 0:
                time.sleep(1)  # rank 0 has reported an error of all ranks by then, and ended this process
        raise
