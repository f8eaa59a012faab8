"""Run a training job on this rank: build the session, fit, evaluate, save."""

from paceline.train.build import Pieces, build_session
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.fit import Result, fit
from paceline.train.job import join, train
from paceline.train.session import Session

__all__ = ["Evaluation", "Pieces", "Result", "Session", "build_session", "evaluate", "fit", "join", "train"]
