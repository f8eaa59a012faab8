"""Pipeline: consecutive layers on consecutive ranks. `stage` cuts, `placed` runs, in the order of a table."""

from paceline.layout.pipeline.chain import chain_of
from paceline.layout.pipeline.flight import Flight
from paceline.layout.pipeline.host_wire import HostWire
from paceline.layout.pipeline.placed import Pipeline
from paceline.layout.pipeline.stage import Cut, cut_evenly, cut_model
from paceline.layout.pipeline.threads import StageThreads
from paceline.layout.pipeline.wire import Neighbours, StageWire
from paceline.layout.pipeline.wire_by_host import WireByHost

__all__ = [
    "Cut",
    "Flight",
    "HostWire",
    "Neighbours",
    "Pipeline",
    "StageThreads",
    "StageWire",
    "WireByHost",
    "chain_of",
    "cut_evenly",
    "cut_model",
]
