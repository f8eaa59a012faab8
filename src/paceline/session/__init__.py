"""Run a training job on this rank: build the session, fit, evaluate, save."""

from paceline.parallel.session_context import Components
from paceline.session.build import build_session
from paceline.session.callback import Callback
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.fit_loop import Result, fit
from paceline.session.own_loop_steps import OwnLoop
from paceline.session.saved_run import OpenedRun, open_run
from paceline.session.session import Session
from paceline.session.start_rank import join
from paceline.session.train_rank import own_loop, train

__all__ = [
    "Callback",
    "Components",
    "Evaluation",
    "OpenedRun",
    "OwnLoop",
    "Result",
    "Session",
    "build_session",
    "evaluate",
    "fit",
    "join",
    "open_run",
    "own_loop",
    "train",
]
