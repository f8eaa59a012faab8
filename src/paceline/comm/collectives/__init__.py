"""Sums, gathers and broadcasts of one group, whatever the path and the form of what travels."""

from paceline.comm.collectives.coded import CodedCollective
from paceline.comm.collectives.collective import Collective, Exchanging, Feedback, in_parts

__all__ = ["CodedCollective", "Collective", "Exchanging", "Feedback", "in_parts"]
