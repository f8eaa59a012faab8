"""What happened, as records: phases of a step, their schema, and the sinks that write or show them."""

from paceline.observe.phases import OWN, PHASES, Phase, Phases
from paceline.observe.progress import Progress
from paceline.observe.sinks import JsonLines, Sink
from paceline.observe.stats import Stats
from paceline.observe.text_log import TextLog

__all__ = ["OWN", "PHASES", "JsonLines", "Phase", "Phases", "Progress", "Sink", "Stats", "TextLog"]
