"""Memory and time that a job will need, computed before it is started."""

from paceline.plan.memory_budget import BudgetVerdict, check_budget, nearest_that_fits
from paceline.plan.memory_plan import MemoryByKind, MemoryPlan, RankMemory
from paceline.plan.memory_planner import plan_memory
from paceline.plan.recompute_choice import RecomputeChoice, choose_recompute
from paceline.plan.zero_memory import model_state_bytes

__all__ = [
    "BudgetVerdict",
    "MemoryByKind",
    "MemoryPlan",
    "RankMemory",
    "RecomputeChoice",
    "check_budget",
    "choose_recompute",
    "model_state_bytes",
    "nearest_that_fits",
    "plan_memory",
]
