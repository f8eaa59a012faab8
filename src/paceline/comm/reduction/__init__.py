"""From gradients of this rank to sums of what it updates."""

from paceline.comm.reduction.blocks import scatterer_name
from paceline.comm.reduction.gradient_unit import GradientUnit
from paceline.comm.reduction.gradients import Gradients, GradientSink, Reduction
from paceline.comm.reduction.local import LocalReducer, TreeReducer
from paceline.comm.reduction.local_clip import LocalClip
from paceline.comm.reduction.meeting import Meeting
from paceline.comm.reduction.norm import AnyOrderNorm, CanonicalNorm, joint_norm, of_own_part
from paceline.comm.reduction.owed import Owed, all_lost
from paceline.comm.reduction.pace import Pace, behind_bytes
from paceline.comm.reduction.part_buffer import PartBuffer
from paceline.comm.reduction.reducer import InAnyOrder, Reducer, Sums
from paceline.comm.reduction.scatterer import Scatterer
from paceline.comm.reduction.several import Reducers
from paceline.comm.reduction.tree import cover
from paceline.comm.reduction.tree_sums import ByMessages, Dealt, InMemory
from paceline.comm.reduction.turns import Turns
from paceline.comm.reduction.ways import Ways

__all__ = [
    "AnyOrderNorm",
    "ByMessages",
    "CanonicalNorm",
    "Dealt",
    "GradientSink",
    "GradientUnit",
    "Gradients",
    "InAnyOrder",
    "InMemory",
    "LocalClip",
    "LocalReducer",
    "Meeting",
    "Owed",
    "Pace",
    "PartBuffer",
    "Reducer",
    "Reducers",
    "Reduction",
    "Scatterer",
    "Sums",
    "TreeReducer",
    "Turns",
    "Ways",
    "all_lost",
    "behind_bytes",
    "cover",
    "joint_norm",
    "of_own_part",
    "scatterer_name",
]
