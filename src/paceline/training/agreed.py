"""What the ranks of a session do together between two rounds, where the job goes on without one that is lost.

Invariant: it is done on all that are left, or they do it again (`commit`); who goes on has done it.
Under a rule that needs all ranks it is done once, and an error ends the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from paceline.comm.text import gather_texts, share_text
from paceline.commit import Commit
from paceline.errors import CommunicationError

if TYPE_CHECKING:
    from paceline.training.session import Session

T = TypeVar("T")


def agreed(session: Session, attempt: Callable[[], T]) -> T:
    """Do something together; collective. Where a worker of a server is lost in it, it is done again.

    Args:
        session: its mesh is that of those who are left afterwards.
        attempt: collective over that mesh, which may be another one when it is called again.
    Raises:
        CommunicationError: it failed, and nobody is lost, or somebody is without whom nothing goes on.
    """
    if not any(rule.left for rule in session.presence):
        return attempt()
    session.commit = session.commit or Commit(session.cluster.connected, session.net.deadline_seconds)
    left = _left(session)
    while True:
        found, failure = _attempt(session, attempt, left)
        done, still = session.commit.vote(left, done=failure is None)
        for rule in session.presence:
            rule.left = still
        if done:
            return cast("T", found)
        if still == left or not set(range(session.strategy.servers)) <= set(still):
            raise failure or CommunicationError(
                "another rank could not do its part between two rounds",
                next_step="look at the first rank that ended: it is the cause",
            )
        left = still


def regroup(session: Session) -> None:
    """A round is over: go on with those that the rule has not lost; collective where it has lost some."""
    if _left(session) != session.mesh.world.ranks:
        agreed(session, lambda: None)


def gather_from_all(session: Session, make: Callable[[], str]) -> list[str]:
    """A text of every rank, made when it is known who is left, by place in the mesh; see `agreed`."""
    return agreed(session, lambda: gather_texts(make(), session.mesh.world, session.net))


def share_with_all(session: Session, text: str) -> str:
    """The text of rank 0 on every rank; see `agreed`."""
    device = session.placed.holding.device
    return agreed(session, lambda: share_text(text, session.mesh.world, session.net, device))


def total(session: Session, value: float) -> float:
    """The sum of a number of every rank; see `agreed`."""

    def attempt() -> float:
        mine = torch.tensor(value, dtype=torch.float64, device=session.placed.holding.device)
        return float(session.net.all_reduce(mine, session.mesh.world).wait())

    return agreed(session, attempt)


def _attempt(
    session: Session, attempt: Callable[[], T], left: tuple[int, ...]
) -> tuple[T | None, CommunicationError | None]:
    """Do it among those that are left; or why it failed, which it then does on all of them."""
    try:
        session.mesh = session.mesh.among_left(left)
        return attempt(), None
    except CommunicationError as error:
        session.cluster.abort()
        return None, error


def _left(session: Session) -> tuple[int, ...]:
    """The ranks of the mesh that the rule has not lost."""
    found = session.mesh.world.ranks
    for rule in session.presence:
        found = tuple(rank for rank in found if rank in (rule.left or found))
    return found
