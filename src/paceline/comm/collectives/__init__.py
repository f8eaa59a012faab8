"""Sums, gathers and broadcasts of one group, for any route and any codec."""

from paceline.comm.collectives.coded_collective import CodedCollective
from paceline.comm.collectives.collective_protocol import (
    AllToAllCollective,
    CodingCollective,
    Collective,
    ErrorFeedbackStore,
    pad_to_rows,
)
from paceline.comm.collectives.power_sgd import PowerSGDCollective

__all__ = [
    "AllToAllCollective",
    "CodedCollective",
    "CodingCollective",
    "Collective",
    "ErrorFeedbackStore",
    "PowerSGDCollective",
    "pad_to_rows",
]
