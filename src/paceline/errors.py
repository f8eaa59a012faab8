"""The errors that a user can see: what happened, where, and what to do next.

Invariant: the message of an error can be understood without its traceback, and its class decides the exit
code of the process. This module imports nothing, so that every package can raise them.
"""

from __future__ import annotations


class PacelineError(Exception):
    """An error with a next step.

    Args:
        what: one sentence that says what happened, with the values that matter.
        where: file and line, recipe key, or rank and step; empty if it is not known.
        next_step: what the user can do now; empty if there is no advice.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.next_step), vars(self))


def format_count(count: float, noun: str) -> str:
    """Return a number with its noun, as messages have it: "1 process", "2 processes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:g} {noun}{ending}" if isinstance(count, float) else f"{count} {noun}{ending}"


def _rebuild(kind: type[PacelineError], what: str, where: str, next_step: str) -> PacelineError:
    return kind(what, where=where, next_step=next_step)


class RecipeError(PacelineError):
    """The recipe cannot be read: an unknown key, a wrong type, an impossible value."""

    exit_code = 2


class StrategyError(RecipeError):
    """The strategy cannot be parsed, or is not supported; names the nearest one that is."""


class TaskError(PacelineError):
    """The task cannot be found or built, or breaks its contract (model, data, loss)."""

    exit_code = 2


class DataError(PacelineError):
    """The data is missing, empty or cannot be read."""

    exit_code = 2


class DeviceError(PacelineError):
    """The requested device does not exist, or does not suit the strategy."""

    exit_code = 2


class RequestError(PacelineError):
    """A request to generate text is not valid, or the model cannot answer it.

    Args:
        what, where, next_step: see `PacelineError`.
        parameter: name of the parameter that is wrong; empty: it is not about one.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", next_step: str = "", parameter: str = "") -> None:
        super().__init__(what, where=where, next_step=next_step)
        self.parameter = parameter


class QueueFullError(RequestError):
    """More requests wait for a slot than may; it can be sent again later."""


class MissingExtraError(PacelineError):
    """An optional dependency is not installed; the next step is the command that installs it."""

    exit_code = 2


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, or is not safe to load."""

    exit_code = 3


class RunFolderError(PacelineError):
    """The folder of a run cannot be created or written: the disk is full, or access is denied."""

    exit_code = 3


class CommunicationError(PacelineError):
    """A collective failed, usually because another rank is gone; names the rank, the operation and the step.

    Attributes:
        peer: the rank that a channel has lost; None: the error is not about a peer of a channel.
    """

    exit_code = 4
    peer: int | None = None


class DeadlineError(CommunicationError):
    """A wait took longer than the deadline of the run."""


class MemoryLimitError(PacelineError):
    """The host or a device is out of memory, or the host is out of shared memory or open files."""

    exit_code = 7


class SetupStoppedError(PacelineError):
    """The run was stopped before its first step, so there is nothing to save."""

    exit_code = 143


class LabError(PacelineError):
    """A lab cannot be created or changed: a tool, a permission or a kernel feature is missing."""

    exit_code = 6


class NumericError(PacelineError):
    """A loss or a gradient is not finite; names the step and the tensor."""

    exit_code = 5


class DivergenceError(NumericError):
    """Ranks that should hold bitwise equal values do not; names the tensor, the ranks and the step."""


class WorkerError(PacelineError):
    """A worker raised an exception or died; contains the traceback of the rank that failed first."""

    exit_code = 1
