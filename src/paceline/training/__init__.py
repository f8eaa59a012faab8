"""Run a training job on this rank: build the session, fit, evaluate, save."""

from paceline.training.arrange import Pieces
from paceline.training.build import build_session
from paceline.training.callback import Callback
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.from_run import OpenRun, open_run
from paceline.training.generation import generate
from paceline.training.job import own_loop, train
from paceline.training.joining import join
from paceline.training.loop import Result, fit
from paceline.training.own import OwnLoop
from paceline.training.session import Session

__all__ = [
    "Callback",
    "Evaluation",
    "OpenRun",
    "OwnLoop",
    "Pieces",
    "Result",
    "Session",
    "build_session",
    "evaluate",
    "fit",
    "generate",
    "join",
    "open_run",
    "own_loop",
    "train",
]
