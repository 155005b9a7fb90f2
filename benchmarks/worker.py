"""One side of a comparison: a process that imports one library and runs the works that it is told to.

    python benchmarks/worker.py ours|peer

Each line of standard input is a request in JSON, each line of output its answer. `{"work": name, "options": {...}}`
makes a work and answers with its results, to be compared. `{"repeat": n}` runs it n times and answers with the seconds,
the page faults and the peak memory. `{"profile": seconds}` runs it for so long and answers with the share of the
time in each file of the package. `performance.py` starts the workers and lets one run at a time, because the thread
pools of two libraries slow each other down.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def main() -> None:
    warnings.filterwarnings("ignore")
    works = importlib.import_module(f"works_{sys.argv[1]}")
    import_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    step = None
    for line in sys.stdin:
        request = json.loads(line)
        if "work" in request:
            step = None  # frees the work before
            step, results = works.WORKS[request["work"]](**request["options"])
            answer = {"results": results, "versions": works.VERSIONS, "import_mb": import_mb}
        elif "profile" in request:
            answer = {"shares": profile_step(step, request["profile"])}
        else:
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = time.perf_counter()
            for _ in range(request["repeat"]):
                step()
            seconds = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_SELF)
            faults = after.ru_minflt - before.ru_minflt
            answer = {"seconds": seconds, "faults": faults, "peak_mb": after.ru_maxrss / 1024}
        print(json.dumps(answer), file=answers, flush=True)


def profile_step(step: Callable[[], Any], seconds: float) -> dict[str, float]:
    """The share of the time in each file of the package, the largest first.

    A clock interrupts the main thread every millisecond and looks at where it is. What NumPy computes counts for the
    file that calls it. A profiler that follows each call would slow small functions down.
    """
    samples: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        while frame is not None and "/tinygrad_mha/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            samples[frame.f_code.co_filename.rpartition("/tinygrad_mha/")[2]] += 1

    signal.signal(signal.SIGALRM, sample)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {name: count / samples.total() for name, count in samples.most_common()}


if __name__ == "__main__":
    main()
