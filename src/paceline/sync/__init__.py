"""Sync rules: when the ranks of a run agree on gradients or parameters, and how they update from them.

Each rule lies in the file of its algorithm, with its constructor; parameter servers are in `sync/server`.
"""

from paceline.sync.diloco import DiLoCo
from paceline.sync.every_step import EveryStep, gradient_scale
from paceline.sync.local_rounds import ReplicaOptimizerState
from paceline.sync.outer_optimizer import OuterOptimizer
from paceline.sync.sync_rule import SyncRule, step_stats
from paceline.sync.update import PendingUpdate, UpdatePart, UpdateResult, UpdateStep, update_parts

__all__ = [
    "DiLoCo",
    "EveryStep",
    "OuterOptimizer",
    "PendingUpdate",
    "ReplicaOptimizerState",
    "SyncRule",
    "UpdatePart",
    "UpdateResult",
    "UpdateStep",
    "gradient_scale",
    "step_stats",
    "update_parts",
]
