"""What a job will need, said before it is started."""

from paceline.plan.budget import nearest_that_fits, refusal
from paceline.plan.forms import whole_bytes
from paceline.plan.memory import plan_memory
from paceline.plan.parts import MemoryPlan, Parts, RankMemory

__all__ = ["MemoryPlan", "Parts", "RankMemory", "nearest_that_fits", "plan_memory", "refusal", "whole_bytes"]
