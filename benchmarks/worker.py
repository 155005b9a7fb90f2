"""One side of a comparison: a process that imports one library and runs the works that it is told to.

    python benchmarks/worker.py ours|peer

Each line of standard input is a request in JSON, each line of output its answer. `{"work": name, "options": {...}}`
makes a work and answers with its results, to be compared. `{"repeat": n}` runs it n times and answers with the seconds,
the page faults and the peak memory. `performance.py` starts the workers and lets one run at a time, because the thread
pools of two libraries slow each other down.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
import warnings


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


if __name__ == "__main__":
    main()
