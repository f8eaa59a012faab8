"""What a job will need, said before it is started."""

from paceline.plan.budget import Verdict, judge, nearest_that_fits
from paceline.plan.forms import whole_bytes
from paceline.plan.memory import plan_memory
from paceline.plan.parts import MemoryPlan, Parts, RankMemory
from paceline.plan.recompute_choice import RecomputeChoice, choose_recompute

__all__ = [
    "MemoryPlan",
    "Parts",
    "RankMemory",
    "RecomputeChoice",
    "Verdict",
    "choose_recompute",
    "judge",
    "nearest_that_fits",
    "plan_memory",
    "whole_bytes",
]
