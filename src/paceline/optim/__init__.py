"""Optimizers by name, schedules as pure functions, and the base of a user's own optimizer."""

from paceline.optim.adopt import require_elementwise
from paceline.optim.build import build_optimizer, fused_is_supported, why_not_fused
from paceline.optim.by_group import ByGroup
from paceline.optim.fit import require_one_gradient
from paceline.optim.schedule import Schedule, build_schedule
from paceline.optim.user import UserOptimizer

__all__ = [
    "ByGroup",
    "Schedule",
    "UserOptimizer",
    "build_optimizer",
    "build_schedule",
    "fused_is_supported",
    "require_elementwise",
    "require_one_gradient",
    "why_not_fused",
]
