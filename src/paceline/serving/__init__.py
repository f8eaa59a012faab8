"""Generation of text: sampling, a cache of keys and values, and an engine for many requests at a time."""

from paceline.serving.engine import Engine, GenerationRequest, SlotForward, Ticket, TokenEvent
from paceline.serving.kv_cache import build_engine
from paceline.serving.sampling import SamplingOptions

__all__ = [
    "Engine",
    "GenerationRequest",
    "SamplingOptions",
    "SlotForward",
    "Ticket",
    "TokenEvent",
    "build_engine",
]
