"""The allocator of this process: whether large blocks go back to the system when they are freed.

By default glibc returns them, and whether the next step gets them back without page faults depends on what
else lies on the heap: for one and the same loop, none to 17,000 faults a step were seen, 0 to 25 ms. That is
luck, and any side may have it. So the comparisons keep freed memory; `benchmarks.heap` measures its worth.
Where memory is measured, not time, all of it goes back.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST = 2**31 - 1
_SMALL = 2**16


def keep_freed_memory() -> None:
    """Keep freed blocks on the heap from now on; there is no way back in this process.

    Raises:
        RuntimeError: the C library is not glibc, or refuses.
    """
    _set(_LARGEST)


def return_freed_memory() -> None:
    """Give every block of 64 KiB or more back when it is freed, from now on, and what is free already.

    Raises:
        RuntimeError: the C library is not glibc, or refuses.
    """
    _set(_SMALL)
    ctypes.CDLL(None).malloc_trim(0)


def _set(most_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_MMAP_THRESHOLD, most_bytes) and mallopt(_TRIM_THRESHOLD, most_bytes)):
        raise RuntimeError("the C library has no mallopt that sets what freed memory stays")
