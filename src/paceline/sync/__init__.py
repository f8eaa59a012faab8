"""When replicas agree, and how the agreed gradient becomes an update."""

from paceline.sync.every_step import EveryStep, gradient_scale
from paceline.sync.inner import InnerState
from paceline.sync.local import LocalRounds
from paceline.sync.outer import Outer
from paceline.sync.rule import Rule, step_stats
from paceline.sync.update import Part, Update, UpdateStep, Updating, update_parts

__all__ = [
    "EveryStep",
    "InnerState",
    "LocalRounds",
    "Outer",
    "Part",
    "Rule",
    "Update",
    "UpdateStep",
    "Updating",
    "gradient_scale",
    "step_stats",
    "update_parts",
]
