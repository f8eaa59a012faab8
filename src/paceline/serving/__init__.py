"""Generation of text: sampling, a cache of keys and values, and an engine for many requests at a time."""

from paceline.serving.engine import Engine, GenerationRequest, SlotForward, Ticket, TokenEvent
from paceline.serving.generation import generate
from paceline.serving.sampling import SamplingOptions
from paceline.serving.slot_forward import build_engine

__all__ = [
    "Engine",
    "GenerationRequest",
    "SamplingOptions",
    "SlotForward",
    "Ticket",
    "TokenEvent",
    "build_engine",
    "generate",
]
