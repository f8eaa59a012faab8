"""A session goes on under another rule, in the same processes: what hangs on the rule is made again.

As after a change of members (`renewal`), model, optimizer and data stay where they are, and reduction, guard,
update step and rule are new. What they go on from is the state as a checkpoint would hold it, which goes from
rank to rank in memory, some tensors at a time.

Invariant: a run that switches is the run that starts under the second rule from that checkpoint. What both
rules keep (inner optimizers of replicas, outer momentum) goes on; what the second does not know ends; what it
alone has begins. What coding has lost is handed over in full: gradients' to whoever has the next gradients
(`Owed`), movements' to the parameters (`sync.moved`). Every sample is used once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.layout.handover import Handover
from paceline.state import TrainState
from paceline.task import Task
from paceline.training.layouts import Grounds
from paceline.training.session import Session

Arrange = Callable[[Grounds, Task, TrainState], dict[str, Any]]


def enter(session: Session, arrange: Arrange, step: int, *, carries: bool = True) -> None:
    """Have a session run under the rule of a step; collective, between two rounds. Changes the session.

    Args:
        arrange: makes what hangs on the rule.
        carries: the state goes on; false: another one is about to be restored.
    """
    grounds, strategy = session.grounds, session.strategy
    rule = session.turns.phase(step).rule
    if grounds is None:
        return
    chooses = carries or bool(grounds.setting.choices) == bool(session.turns.choices)
    if rule == strategy.sync and chooses:
        return
    session.settle()
    handover = Handover(session.state, session.mesh, session.net) if carries else None
    _let_go(session)
    recipe = grounds.setting.recipe.under(session.whole_strategy.under(rule))
    setting = replace(grounds.setting, recipe=recipe, closers=[], presence=[])
    setting = replace(setting, choices=session.turns.choices, awaited=session.turns.awaited)
    session.grounds = replace(grounds, setting=setting)
    state = session.state
    for name, value in arrange(session.grounds, session.task, state).items():
        setattr(session, name, value)
    for put in session.puts:
        put()
    if handover is not None:
        session.make_ready(handover.scalars)
        state.read_from(handover, handover.scalars)()
        session.notes.add("switch", {"step": step, "sync": rule})


def _let_go(session: Session) -> None:
    """Of what the rule keeps beside the session, and of gradients, which may keep a bucket in memory."""
    session.release()
    session.state.keepers.clear()
    session.state.alone = False
    holding = session.placed.holding
    for parameter in (*holding.computes.values(), *holding.updates.values()):
        parameter.grad = None
