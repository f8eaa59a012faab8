"""What happened, as records: phases of a step, and the sinks that write or show them."""

from paceline.observe.phases import PHASES, Phases
from paceline.observe.stats import Stats

__all__ = ["PHASES", "Phases", "Stats"]
