"""The paths on which collectives go: a file for each, and a line in `recipe/wire_words.py`."""

from paceline.comm.routes.by_messages import MessageCollective
from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.host_mail import HostMail
from paceline.comm.routes.host_meeting import meet_on_host, meet_those_here
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.shared_memory import SharedMemoryCollective

__all__ = [
    "HierarchicalCollective",
    "HostMail",
    "MessageCollective",
    "NativeCollective",
    "SharedMemoryCollective",
    "meet_on_host",
    "meet_those_here",
]
