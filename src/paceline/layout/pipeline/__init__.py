"""Pipeline: consecutive layers on consecutive ranks. `stage` cuts, `schedule` orders, `placed` runs."""

from paceline.layout.pipeline.chain import chain_of
from paceline.layout.pipeline.flight import Flight
from paceline.layout.pipeline.placed import Pipeline
from paceline.layout.pipeline.schedule import Action, gpipe, one_f_one_b, validate
from paceline.layout.pipeline.stage import Cut, cut_model
from paceline.layout.pipeline.threads import StageThreads
from paceline.layout.pipeline.wire import StageWire

__all__ = [
    "Action",
    "Cut",
    "Flight",
    "Pipeline",
    "StageThreads",
    "StageWire",
    "chain_of",
    "cut_model",
    "gpipe",
    "one_f_one_b",
    "validate",
]
