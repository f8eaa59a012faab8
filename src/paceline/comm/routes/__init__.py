"""The routes of collectives: one file for each, and one line in `recipe/registry/route_specs.py`."""

from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.host_links import connect_ranks_of_host, connect_single_host_group
from paceline.comm.routes.host_messages import HostMessenger
from paceline.comm.routes.message_route import MessageCollective
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.shared_memory import SharedMemoryCollective

__all__ = [
    "HierarchicalCollective",
    "HostMessenger",
    "MessageCollective",
    "NativeCollective",
    "SharedMemoryCollective",
    "connect_ranks_of_host",
    "connect_single_host_group",
]
