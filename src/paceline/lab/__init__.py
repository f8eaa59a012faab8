"""A cluster on one machine: hosts from namespaces, links from veth pairs, faults from signals and link
changes.

Invariant: what runs in it is real (processes, sockets, kernels' queues), nothing of it is reachable from
outside, and nothing is left of it. It imports no torch.
"""

from paceline.lab.fault_plan import FaultPlan, FaultSpec
from paceline.lab.lab_outcome import LabOutcome
from paceline.lab.lab_registry import clean
from paceline.lab.namespaces import find_obstacle
from paceline.lab.topology import Links
from paceline.lab.virtual_cluster import Lab

__all__ = ["FaultPlan", "FaultSpec", "Lab", "LabOutcome", "Links", "clean", "find_obstacle"]
