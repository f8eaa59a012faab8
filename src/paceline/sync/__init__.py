"""When replicas agree, and how the agreed gradient becomes an update."""

from paceline.sync.every_step import EveryStep, gradient_scale
from paceline.sync.local import InnerMoments, LocalRounds, Outer
from paceline.sync.rule import Rule, step_stats
from paceline.sync.tail import Gathered, Tail, Update, UpdateTail, global_norm

__all__ = [
    "EveryStep",
    "Gathered",
    "InnerMoments",
    "LocalRounds",
    "Outer",
    "Rule",
    "Tail",
    "Update",
    "UpdateTail",
    "global_norm",
    "gradient_scale",
    "step_stats",
]
