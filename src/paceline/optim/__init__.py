"""Optimizers by name, schedules as pure functions, and the bases of a user's own optimizer."""

from paceline.optim.adafactor import Adafactor
from paceline.optim.adam_to_sgd import AdamToSGD
from paceline.optim.build_optimizer import (
    build_optimizer,
    fused_is_supported,
    names_of_kinds,
    reason_not_fused,
)
from paceline.optim.compatibility import require_elementwise, require_one_gradient
from paceline.optim.kfac import KFac
from paceline.optim.lamb_lars import Lamb, Lars
from paceline.optim.lr_schedule import LearningRateSchedule, build_schedule
from paceline.optim.muon import Muon
from paceline.optim.newton_cg import NewtonCG
from paceline.optim.reduce_on_plateau import PLATEAU_KEY, PlateauRates, ReduceOnPlateau
from paceline.optim.slot_norms import SlotGroup, SlotOptimizer, slot_norms
from paceline.optim.user_optimizer import ByGroup, UserOptimizer

__all__ = [
    "PLATEAU_KEY",
    "Adafactor",
    "AdamToSGD",
    "ByGroup",
    "KFac",
    "Lamb",
    "Lars",
    "LearningRateSchedule",
    "Muon",
    "NewtonCG",
    "PlateauRates",
    "ReduceOnPlateau",
    "SlotGroup",
    "SlotOptimizer",
    "UserOptimizer",
    "build_optimizer",
    "build_schedule",
    "fused_is_supported",
    "names_of_kinds",
    "reason_not_fused",
    "require_elementwise",
    "require_one_gradient",
    "slot_norms",
]
