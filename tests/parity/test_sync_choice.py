"""`sync=auto` in sessions: ranks agree after some steps, none of which is lost, and the answer is kept."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import Collective, Handle
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.parallel.state_transfer import StateSnapshot
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.session.build import build_session
from paceline.sync import sync_choice
from paceline.testing import run_ranks
from paceline.testing.parity import make_task, whole_trajectory
from tests.parity.virtual_clock import Clock, own_clock

STEPS, KNOWN = 16, sync_choice.WARMUP_STEPS + sync_choice.TIMED_STEPS
AUTO = "auto:every-step,local:2,diloco:4"


class SlowLink:
    """A sum takes its time once it is waited for."""

    def __init__(self, clock: Clock, inner: Collective) -> None:
        self._clock, self._inner = clock, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        def arrive(sums: Tensor) -> Tensor:
            self._clock.spend(0.1)
            return sums

        return self._inner.all_reduce(x, key).then(arrive)


def session_of(cluster: Cluster, sync: str, said: list[str], components: Components | None = None) -> Session:
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [16], "dropout": 0.1},
        steps=STEPS,
        batch={"size": 22, "shards": 4},
        optimizer={"name": "adamw", "lr": 2e-3},
        strategy=Strategy.parse(f"replicas=2 sync={sync}"),
    )
    device = torch.device("cpu")
    return build_session(recipe, make_task(recipe), cluster, device, components=components, warn=said.append)


def goes_on(session: Session, snapshot: StateSnapshot) -> Any:
    session.restore_shared(snapshot)
    rule = session.strategy.sync
    return rule, whole_trajectory([stats.loss for stats in session.rounds()], session)


def chosen(cluster: Cluster) -> dict[str, Any]:
    """The choice on a slow link; the same run as asked for; and the former, resumed late."""
    said: list[str] = []
    sync_choice.time = clock = own_clock()
    session = session_of(cluster, AUTO, said, Components(collective=partial(SlowLink, clock)))
    losses, late = [], None
    for stats in session.rounds():
        losses.append(stats.loss)
        if session.state.step == KNOWN + 4:
            late = copy.deepcopy(session.snapshot())
    ended, notes = whole_trajectory(losses, session), dict(session.events.take())
    asked = session_of(cluster, f"every-step@{KNOWN},{notes['sync']['sync']}", [])
    named = whole_trajectory([stats.loss for stats in asked.rounds()], asked)
    assert late is not None
    rule, resumed = goes_on(session_of(cluster, AUTO, []), late)
    lines = [text for text in said if text.startswith("sync: ")]
    return {**notes, "lines": lines, "rule": rule, "off": [ended.distance(named), ended.distance(resumed)]}


@pytest.mark.capability("I11", clause="measured in the first steps, agreed, kept")
def test_the_rule_is_chosen_once_alike_on_all_ranks_and_is_the_run_that_was_asked_to_switch() -> None:
    found = run_ranks(chosen, 2)
    for rank in found:
        sync = rank["sync"]
        assert sync == found[0]["sync"] and sync["step"] == KNOWN
        assert sync["sync"] == "diloco:4" == rank["rule"] == rank["switch"]["sync"]
        assert rank["off"] == [0.0, 0.0]
        assert sync["exchange_seconds"] > 0.1 and sync["step_seconds"]["every-step"] > 0.1
        (line,) = rank["lines"]
        assert (
            line
            == f"sync: diloco:4 ({sync['reason']}). Set sync=RULE in the strategy to choose another rule."
        )


def choosing(place: int) -> Any:
    """Whatever is measured, the rule in this place is chosen."""
    return patch.object(
        *(sync_choice, "choose_sync"),
        lambda allowed, measured: sync_choice.SyncChoice(allowed[place], "it is asked for"),
    )


def goes_asynchronous(cluster: Cluster) -> dict[str, Any]:
    """As `chosen`, where the last of the rules is chosen; with no clock of lateness it has one answer."""
    session = session_of(cluster, "auto:every-step,gossip:0", [])
    with choosing(-1):
        ended = whole_trajectory([stats.loss for stats in session.rounds()], session)
    notes = dict(session.events.take())
    asked = session_of(cluster, f"every-step@{KNOWN},gossip:0", [])
    named = whole_trajectory([stats.loss for stats in asked.rounds()], asked)
    return {"rule": session.strategy.sync, "off": ended.distance(named), **notes["sync"]}


@pytest.mark.capability("I11", clause="measured in the first steps, agreed, kept")
def test_an_asynchronous_rule_that_was_allowed_goes_on_from_every_step() -> None:
    for rank in run_ranks(goes_asynchronous, 2):
        assert (rank["rule"], rank["off"], rank["step"]) == ("gossip:0", 0.0, KNOWN)
        assert rank["message_seconds"] > 0 and rank["step_seconds"]["gossip:0"] > rank["compute_seconds"]


def stays(cluster: Cluster) -> list[Any]:
    found = []
    for sync in (AUTO, "every-step"):
        session = session_of(cluster, sync, [])
        with choosing(0):
            losses = [stats.loss for stats in session.rounds()]
        names = [name for name, _ in session.events.take() if name in ("sync", "switch")]
        again = session_of(cluster, sync, [])
        again.restore_shared(session.snapshot())
        found += [(losses, names, type(again.rule).__name__)]
    return found


@pytest.mark.capability("I11", clause="measured in the first steps, agreed, kept")
def test_where_nothing_pays_the_run_is_every_step_and_is_not_measured_again() -> None:
    """An exchange that is timed leaves nothing behind: the losses are those of a run without one."""
    for measured, plain in run_ranks(stays, 2):
        assert measured[0] == plain[0]
        assert measured[1] == ["sync"] and plain[1] == []
        assert measured[2] == plain[2] == "EveryStep"


def all_reduces(cluster: Cluster, sync: str) -> float:
    session = session_of(cluster, sync, [])
    for _ in session.rounds():
        if session.state.step == KNOWN:
            break
    return sum(row.calls for (op, _), row in session.net.ledger.rows.items() if op == "all_reduce")


def test_an_exchange_is_timed_with_the_tally_that_goes_beside_it() -> None:
    """On a link with latency it is half of what there is to wait for."""
    plain, measured = (run_ranks(all_reduces, 2, sync)[0] for sync in ("every-step", AUTO))
    agreed = 1  # on what was found
    assert measured - plain == sync_choice._NUM_EXCHANGES * (1 + 1) + agreed  # one bucket, one tally
