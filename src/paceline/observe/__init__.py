"""Records of a run: the phases of a step, the schema of all events, and the sinks that write them."""

from paceline.observe.sinks import JsonLinesSink, Sink, SinkSite, TextLogSink
from paceline.observe.step_stats import LOCAL_PHASES, PHASES, PhaseTimer, StepPhase, StepStats

__all__ = [
    "LOCAL_PHASES",
    "PHASES",
    "JsonLinesSink",
    "PhaseTimer",
    "Sink",
    "SinkSite",
    "StepPhase",
    "StepStats",
    "TextLogSink",
]
