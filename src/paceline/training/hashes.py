"""Hashes of the state while it is trained: written to the sinks, and compared over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import DivergenceError
from paceline.layout.digest import find_divergence, whole_sha256
from paceline.observe import Sink
from paceline.training.agreed import agreed
from paceline.training.intervals import reached
from paceline.training.session import Session


def hash_at_interval(session: Session, before: int, sinks: Sequence[Sink]) -> bool:
    """Every `hash_every` steps: hash, compare, tell; collective.

    Args:
        before: the step at which the last round began.
    Returns:
        Whether it was time.
    Raises:
        DivergenceError: ranks that should be equal are not, and the recipe says stop.
    """
    is_due = reached(session.recipe.hash_every, before, session.state.step)
    if is_due:
        tell_hash(session, sinks)
    return is_due


def tell_hash(session: Session, sinks: Sequence[Sink]) -> str:
    """Hash the whole state, in hex, after comparing what ranks hold in common; collective."""
    state = session.state
    found = agreed(session, lambda: find_divergence(state, session.mesh, session.net))
    sha256 = agreed(session, lambda: whole_sha256(state, session.mesh, session.net))
    for sink in sinks:
        sink.event("hash", {"step": state.step - 1, "sha256": sha256, "equal": found is None})
    if found is None:
        return sha256
    for sink in sinks:
        sink.event("divergence", {"step": found.step, "tensor": found.tensor, "ranks": list(found.ranks)})
    if session.recipe.on_divergence == "stop":
        raise DivergenceError(
            f"ranks that should hold equal bits do not: {found}",
            next_step="go on from the last checkpoint; if it happens again on the same host, test its memory,"
            " otherwise look for something in the model that differs between ranks",
        )
    return sha256
