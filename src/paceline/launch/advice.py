"""What to do about memory that is used up, and lost loader workers: torch says neither with a next step.

Pure, and without torch: errors are told by their names and texts.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

from paceline.errors import DataError, MemoryLimitError, PacelineError

_LESS = (
    "fewer processes on this host, more batch.accumulation (smaller micro-batches), a smaller model, "
    'or memory.recompute = "blocks"; --resume RUN goes on from the last checkpoint'
)
_SHARED = (
    "give /dev/shm more room (mount -o remount,size=2g /dev/shm; docker run --shm-size 2g), "
    "or set loader.workers = 0; --resume RUN goes on from the last checkpoint"
)
_LOADER = (
    "if the kernel's log (dmesg) says that it was out of memory: fewer loader.workers; "
    "set loader.workers = 0 to see it happen in the training process"
)
_FILES = "raise what ulimit -n says, or use fewer processes on this host; --resume RUN goes on"
_HOST_TEXTS = (
    *("can't allocate memory", "Cannot allocate memory", "not enough memory"),
    *("can't start new thread", "failed to map segment"),
)
_SHARED_TEXTS = ("</torch_", "unable to allocate shared memory", "out of shared memory")
_NAMES = {"MemoryError", "OutOfMemoryError"}
_SPEAKERS = {"RuntimeError", "OSError", "ImportError", "PacelineError"}
_AFTER_SIGNAL = {
    signal.SIGKILL: f"next:  if the kernel's log (dmesg) says that it was out of memory: {_LESS}",
    signal.SIGBUS: f"next:  {_SHARED}",
}


def advise_after_signal(number: int) -> str:
    """A line for a worker that a signal ended; empty if there is nothing to advise."""
    return {int(key): text for key, text in _AFTER_SIGNAL.items()}.get(number, "")


def explain(error: BaseException) -> PacelineError | None:
    """The error in words of its own, if they are known; None: it says what there is to say."""
    return explain_memory(error) or _explain_loader(error) or _explain_files(error)


def _explain_loader(error: BaseException) -> DataError | None:
    """PyTorch raises this wherever the main thread is, as soon as a loader worker has died."""
    for one in _chain(error):
        said = str(one).partition("\n")[0]
        if type(one) is RuntimeError and said.startswith("DataLoader worker"):
            return DataError(f"the loader failed: {said}", next_step=_LOADER)
    return None


def _explain_files(error: BaseException) -> MemoryLimitError | None:
    if any("Too many open files" in str(one) for one in _chain(error)):  # as the system says it
        first = str(error).partition("\n")[0]
        return MemoryLimitError(f"too many files are open: {first}", next_step=_FILES)
    return None


def explain_memory(error: BaseException) -> MemoryLimitError | None:
    """The error in words of its own, if it, or one that caused it, says that memory is used up."""
    first = str(error).partition("\n")[0]
    for one in _chain(error):
        names = {kind.__name__ for kind in type(one).__mro__}
        says = str(one) if names & _SPEAKERS else ""
        if any(words in says for words in _SHARED_TEXTS):
            return MemoryLimitError(f"the shared memory of this host is used up: {first}", next_step=_SHARED)
        named = names & _NAMES or getattr(one, "errno", None) == errno.ENOMEM
        if named or any(words in says for words in _HOST_TEXTS):
            return MemoryLimitError(f"the memory is used up: {first}", next_step=_LESS)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__
