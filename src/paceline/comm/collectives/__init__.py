"""Sums, gathers and broadcasts of one group, whatever the path and the form of what travels."""

from paceline.comm.collectives.coded import CodedCollective
from paceline.comm.collectives.collective import (
    Coded,
    Collective,
    Exchanging,
    Feedback,
    HeldBytes,
    in_parts,
)
from paceline.comm.collectives.low_rank import LowRankCollective

__all__ = [
    "Coded",
    "CodedCollective",
    "Collective",
    "Exchanging",
    "Feedback",
    "HeldBytes",
    "LowRankCollective",
    "in_parts",
]
