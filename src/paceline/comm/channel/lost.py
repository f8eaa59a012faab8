"""The errors that name a peer of a channel which is lost."""

from __future__ import annotations

from paceline.errors import CommunicationError, DeadlineError

LOOK_ELSEWHERE = "look at the first rank that ended: it is the cause"


def lost(rank: int, what: str) -> CommunicationError:
    """With its rank in `peer`."""
    error = CommunicationError(what, next_step=LOOK_ELSEWHERE)
    error.peer = rank
    return error


def gone(rank: int, why: str = "") -> CommunicationError:
    """It has left, or cannot be reached."""
    return lost(rank, f"rank {rank} is gone: {why}" if why else f"rank {rank} is gone")


def late(rank: int) -> DeadlineError:
    """It takes nothing, although something waits for it."""
    error = DeadlineError(
        f"rank {rank} does not read what it is sent",
        next_step="look at what that rank does, or raise runtime.deadline_seconds",
    )
    error.peer = rank
    return error


def no_message(rank: int, why: str) -> CommunicationError:
    """It says what it must not."""
    error = CommunicationError(
        f"rank {rank} sent what is no message: {why}",
        next_step="run the same version of Paceline on every node; else look at the network",
    )
    error.peer = rank
    return error
