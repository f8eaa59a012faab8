"""What happened, as records: phases of a step, their schema, and the sinks that write or show them."""

from paceline.observe.progress import ProgressSink
from paceline.observe.sinks import JsonLinesSink, Sink, TextLogSink
from paceline.observe.step_stats import LOCAL_PHASES, PHASES, PhaseTimer, StepPhase, StepStats

__all__ = [
    "LOCAL_PHASES",
    "PHASES",
    "JsonLinesSink",
    "PhaseTimer",
    "ProgressSink",
    "Sink",
    "StepPhase",
    "StepStats",
    "TextLogSink",
]
