"""What a run knows of its phases goes on with it."""

from __future__ import annotations

import pytest

from paceline.recipe.strategy_text import resolve_phases
from paceline.session.rule_switch import RuleSwitches
from paceline.sync.straggler_recovery import AwaitedRank


@pytest.mark.capability("I9", clause="the way back")
def test_a_run_that_goes_on_knows_who_was_slow_and_why() -> None:
    """Without the cause it would look for the recovery of a rank whose link was slow, which shows nothing."""
    asked = "every-step@straggler,local:2"
    known = {"sync": resolve_phases(asked, 8), "slow": 1, "cause": "communication"}
    first, again = (RuleSwitches(asked, lambda *_: None) for _ in range(2))
    first.load_state_dict(known)
    again.load_state_dict(first.state_dict())
    assert again.awaited_rank == AwaitedRank(rank=1, cause="communication", returns=0)
