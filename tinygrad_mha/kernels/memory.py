"""Memory of the process: what one training step frees, the next one takes again."""

from __future__ import annotations

import ctypes
import functools
import sys

__all__ = ["keep_freed_memory"]

# Options of mallopt in glibc's malloc.h, and their values here: bytes, and the number of heaps.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
KEPT, LARGEST_KEPT = 256 << 20, 32 << 20  # glibc accepts no larger MMAP_THRESHOLD


@functools.cache
def keep_freed_memory() -> None:
    """Let the process keep up to 256 MB that it frees, instead of returning it to the system at once.

    A training step allocates arrays of the same sizes as the step before. By default glibc maps every array of more
    than some 100 KB anew, and the system fills its pages with zeros: a fifth of the time of a step. Threads share one
    heap, because that of a thread is at most 64 MB and is returned whenever it is empty. This applies to the whole
    process, from the first call on. Without glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(ARENA_MAX, 1)
