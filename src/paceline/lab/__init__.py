"""A virtual cluster on one machine: hosts are namespaces, links are veth pairs, faults are signals and link
changes.

Invariant: processes, sockets and the queues of the kernel are real, nothing can be reached from outside, and
nothing is left behind. Imports no torch.
"""

from paceline.lab.fault_plan import FaultPlan, FaultSpec
from paceline.lab.lab_outcome import LabOutcome
from paceline.lab.lab_registry import clean
from paceline.lab.namespaces import find_obstacle
from paceline.lab.topology import Links
from paceline.lab.virtual_cluster import Lab

__all__ = ["FaultPlan", "FaultSpec", "Lab", "LabOutcome", "Links", "clean", "find_obstacle"]
