"""The paths on which collectives go."""

from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.host_meeting import meet_on_host
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.routes.tree import TreeCollective

__all__ = [
    "HierarchicalCollective",
    "NativeCollective",
    "SharedMemoryCollective",
    "TreeCollective",
    "meet_on_host",
]
