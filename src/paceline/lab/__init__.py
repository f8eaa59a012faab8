"""A cluster on one machine: hosts from namespaces, links from veth pairs, faults from signals and link
changes.

Invariant: what runs in it is real (processes, sockets, kernels' queues), nothing of it is reachable from
outside, and nothing is left of it. It imports no torch.
"""

from paceline.lab.clean import clean
from paceline.lab.faults import Fault, FaultPlan
from paceline.lab.lab import Lab
from paceline.lab.namespaces import why_not
from paceline.lab.summary import Outcome
from paceline.lab.topology import Links

__all__ = ["Fault", "FaultPlan", "Lab", "Links", "Outcome", "clean", "why_not"]
