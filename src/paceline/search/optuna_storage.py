"""Optuna's trials: from an existing storage (`search = "optuna:FILE"`), and to one (`--export optuna`).

A storage is a journal file or an SQLite database. It is read before the first proposal, and never written to:
results go to the log of the study, from which an export makes a journal file of its own.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import DataError, MissingExtraError, RecipeError
from paceline.search.space import Dimension, Params, StudyPlan
from paceline.search.study_log import Trial, finite

EXPORT = "optuna.journal"
_SQLITE = b"SQLite format 3"
_PLAIN = (bool, int, float, str, type(None))


def import_optuna() -> Any:
    """Import Optuna, without its log of each trial.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError(
            "this search needs Optuna, which is not installed",
            next_step='pip install "paceline[tune]", or search = "random"',
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def build_distributions(optuna: Any, dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """Return Optuna's distributions by key."""
    return {dimension.key: _distribution(optuna, dimension) for dimension in dimensions}


def to_library_values(dimensions: Sequence[Dimension], params: Params) -> dict[str, Any]:
    """Return the values of a trial as Optuna has them: choices by index, since it takes no lists."""
    return {
        d.key: d.choices.index(params[d.key]) if d.kind == "choice" else params[d.key] for d in dimensions
    }


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.kind == "choice":
        return kinds.CategoricalDistribution(tuple(range(len(dimension.choices))))
    is_log = dimension.kind == "log"
    if dimension.whole:
        return kinds.IntDistribution(dimension.low, dimension.high, log=is_log, step=dimension.step or 1)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=is_log, step=dimension.step or None)


def read_trials(name: str, plan: StudyPlan) -> list[Any]:
    """Return the trials of a storage that lie in the space, as ones of a study that minimizes scores.

    Args:
        name: path of the file, or "PATH#STUDY" if it holds several studies.
    Raises:
        RecipeError: there is no such file or study, it has another direction, or no trial has these keys.
        MissingExtraError: Optuna is not installed, or SQLAlchemy for a database.
    """
    optuna, (file, _, study) = import_optuna(), name.partition("#")
    record = _load_study(optuna, Path(file), study)
    direction = record.direction.name.lower()
    if direction != plan.objective.direction:
        raise RecipeError(
            f"the storage's study is to {direction}, and the objective of this one to"
            f" {plan.objective.direction}",
            where="study.search",
            next_step='set direction = "minimize" or "maximize" in [study], if the objective is the same',
        )
    sign = 1.0 if direction == "minimize" else -1.0
    distributions = build_distributions(optuna, plan.space.dimensions)
    trials = [
        _imported(optuna, plan, distributions, trial, sign) for trial in record.get_trials(deepcopy=False)
    ]
    inside = [trial for trial in trials if trial is not None]
    if not inside:
        names = sorted({key for trial in record.get_trials(deepcopy=False) for key in trial.params})
        raise RecipeError(
            f"no trial of the storage lies in this space; its parameters are {', '.join(names) or 'none'}",
            where="study.search",
            next_step="name parameters as recipe keys, for example optimizer.lr, in both",
        )
    return inside


def _load_study(optuna: Any, path: Path, name: str) -> Any:
    if not path.is_file():
        raise RecipeError(f"there is no storage of Optuna at '{path}'", where="study.search")
    try:
        with path.open("rb") as file:
            is_database = file.read(len(_SQLITE)) == _SQLITE
        storage = f"sqlite:///{path}" if is_database else _journal(optuna, path)
        names = optuna.get_all_study_names(storage)
    except ImportError as error:
        raise MissingExtraError(
            f"an SQLite storage needs SQLAlchemy: {error}", next_step="pip install sqlalchemy alembic"
        ) from error
    except (ValueError, KeyError) as error:
        raise DataError(f"this is no storage of Optuna: {error}", where=str(path)) from error
    if name not in names and (name or len(names) != 1):
        raise RecipeError(
            f"the storage holds {', '.join(names) or 'no study'}",
            where="study.search",
            next_step=f'name one: search = "optuna:{path}#{names[0] if names else "NAME"}"',
        )
    return optuna.load_study(study_name=name or names[0], storage=storage)


def _journal(optuna: Any, path: Path) -> Any:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


def _imported(optuna: Any, plan: StudyPlan, distributions: Any, trial: Any, sign: float) -> Any:
    """Return a trial with scores for values; None if it has not ended, or lies outside of the space."""
    states = optuna.trial.TrialState
    params = {d.key: _inside(d, trial.params.get(d.key)) for d in plan.space.dimensions}
    if None in params.values() or trial.state not in (states.COMPLETE, states.PRUNED):
        return None
    values = {step: sign * value for step, value in trial.intermediate_values.items()}
    if trial.state == states.PRUNED and not values:
        return None
    return optuna.trial.create_trial(
        state=trial.state,
        params=params,
        distributions=distributions,
        value=sign * trial.value if trial.state == states.COMPLETE else None,
        intermediate_values=values,
    )


def _inside(dimension: Dimension, value: Any) -> Any:
    """Return a value as the samplers have it; None if it is not one of the dimension."""
    if dimension.kind == "choice":
        plain = [_plain(choice) for choice in dimension.choices]
        return plain.index(value) if value in plain else None
    is_number = type(value) in (int, float) and dimension.low <= value <= dimension.high
    return value if is_number and (not dimension.whole or value == int(value)) else None


def _plain(choice: Any) -> Any:
    return choice if type(choice) in _PLAIN else json.dumps(choice)


def export_trials(folder: Path, plan: StudyPlan, trials: Sequence[Trial]) -> Path:
    """Write the trials of a study to a new journal file in its folder; returns its path.

    Choices have the values of the recipe. A stopped trial is a pruned one with the metric at its rungs. One
    that failed or was refused is a failed one with the attribute "reason".

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    optuna, path = import_optuna(), folder / EXPORT
    for old in (path, path.with_name(path.name + ".lock")):
        old.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of experimental options
        study = optuna.create_study(
            storage=_journal(optuna, path), study_name=folder.name, direction=plan.objective.direction
        )
        study.add_trials([_exported(optuna, plan, trial) for trial in trials if trial.has_ended])
    return path


def _exported(optuna: Any, plan: StudyPlan, trial: Trial) -> Any:
    states = optuna.trial.TrialState
    dimensions = plan.space.dimensions
    distributions = build_distributions(optuna, dimensions)
    params: Params = dict(trial.params)
    for d in dimensions:
        if d.kind == "choice":
            plain = tuple(_plain(choice) for choice in d.choices)
            distributions[d.key] = optuna.distributions.CategoricalDistribution(plain)
            params[d.key] = _plain(trial.params[d.key])
    rungs = {index: value for index, value in enumerate(trial.rungs) if math.isfinite(value)}
    value = finite(trial.value)
    state = (
        states.PRUNED if trial.status == "stopped" else states.COMPLETE if value is not None else states.FAIL
    )
    return optuna.trial.create_trial(
        state=state,
        params=params,
        distributions=distributions,
        value=value if state == states.COMPLETE else None,
        intermediate_values=rungs,
        user_attrs={"trial": trial.name, "status": trial.status, "reason": trial.reason},
    )
