"""The words of `log.sinks`: the destinations of the steps and events of a run, one line of registration each.

Other packages add a sink as an entry point of the group `paceline.sink`. A spec holds names of modules and
imports none of them: a run loads a sink when it builds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.recipe.registry.word_spec import WordArgument, WordSpec


@dataclass(frozen=True, kw_only=True)
class SinkSpec(WordSpec):
    """A sink. `build(site, argument) -> Sink | None`, with a `paceline.observe.sinks.SinkSite`.

    Args:
        handles_errors: its methods never raise, so the run calls it without a guard.
    """

    choice = "sink"
    handles_errors: bool = False


SINK_SPECS = (
    SinkSpec(
        word="jsonl",
        summary="metrics.jsonl, for programs; reports and `paceline runs` read it",
        build="paceline.observe.sinks:build_json_lines",
        handles_errors=True,
    ),
    SinkSpec(
        word="text",
        summary="log.txt, for people",
        build="paceline.observe.sinks:build_text_log",
        handles_errors=True,
    ),
    SinkSpec(
        word="terminal",
        summary="the progress of the run, on the terminal",
        build="paceline.observe.progress:build_progress",
        handles_errors=True,
    ),
    SinkSpec(
        word="csv",
        summary="metrics.csv, one row per step and evaluation",
        build="paceline.observe.csv_sink:build_csv",
        handles_errors=True,
    ),
    SinkSpec(
        word="tensorboard",
        summary="event files of TensorBoard, in tensorboard/",
        build="paceline.session.tracker_sinks:build_tensorboard",
        handles_errors=True,
    ),
    SinkSpec(
        word="wandb",
        summary="a run of Weights & Biases, in wandb/, offline unless WANDB_MODE is set",
        argument=WordArgument("my-project", "the name of a project", str),
        argument_may_be_missing=True,
        build="paceline.session.tracker_sinks:build_wandb",
        handles_errors=True,
    ),
    SinkSpec(
        word="mlflow",
        summary="a run of MLflow, in mlflow/ or at MLFLOW_TRACKING_URI",
        argument=WordArgument("my-experiment", "the name of an experiment", str),
        argument_may_be_missing=True,
        build="paceline.session.tracker_sinks:build_mlflow",
        handles_errors=True,
    ),
)


def complete_sinks(words: Sequence[str]) -> tuple[str, ...]:
    """Return the sinks with "jsonl", which reports and `paceline runs` read, in front if it is missing."""
    has_jsonl = any(word.partition(":")[0] == "jsonl" for word in words)
    return tuple(words) if has_jsonl else ("jsonl", *words)


def check_sinks(words: Sequence[str]) -> str:
    """Return what is wrong with a list of sinks as a whole; empty if nothing is."""
    names = [word.partition(":")[0] for word in words]
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f'expected each sink once, found "{twice}" twice'
