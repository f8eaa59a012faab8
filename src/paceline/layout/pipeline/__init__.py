"""Pipeline: consecutive layers on consecutive ranks. `stage` cuts, `schedule` orders, `placed` runs."""

from paceline.layout.pipeline.chain import chain_of
from paceline.layout.pipeline.flight import Flight
from paceline.layout.pipeline.ordered import OrderedStageReducer
from paceline.layout.pipeline.placed import Pipeline
from paceline.layout.pipeline.reducer import StageReducer
from paceline.layout.pipeline.schedule import Action, gpipe, pipedream, validate
from paceline.layout.pipeline.stage import Cut, cut_model
from paceline.layout.pipeline.threads import StageThreads
from paceline.layout.pipeline.wire import StageWire

__all__ = [
    "Action",
    "Cut",
    "Flight",
    "OrderedStageReducer",
    "Pipeline",
    "StageReducer",
    "StageThreads",
    "StageWire",
    "chain_of",
    "cut_model",
    "gpipe",
    "pipedream",
    "validate",
]
