"""The words of `log.sinks`: the destinations of the steps and events of a run, one line of registration each.

Sinks that write by a library are readers: they run in a process beside rank 0, which follows `metrics.jsonl`.
Other packages add a sink as an entry point of the group `paceline.sink`. A spec holds names of modules and
imports none of them: the process that writes a sink loads it.
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
        is_reader: it is built and called in a process of its own, `paceline.watch.sink_process`, and never in
            the job; it receives the records of this start of the run.
        library: what it needs, and the extra that installs it; looked for before the first step.
    """

    choice = "sink"
    handles_errors: bool = False
    is_reader: bool = False
    library: str = ""


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
        build="paceline.watch.tracker_writers:open_csv",
        is_reader=True,
    ),
    SinkSpec(
        word="tensorboard",
        summary="event files of TensorBoard, in tensorboard/",
        build="paceline.watch.tracker_writers:open_tensorboard",
        is_reader=True,
        library="tensorboard",
    ),
    SinkSpec(
        word="wandb",
        summary="a run of Weights & Biases, in wandb/, offline unless WANDB_MODE is set",
        argument=WordArgument("my-project", "the name of a project", str),
        argument_may_be_missing=True,
        build="paceline.watch.tracker_writers:open_wandb",
        is_reader=True,
        library="wandb",
    ),
    SinkSpec(
        word="trackio",
        summary="a run of Trackio, in trackio/, local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set",
        argument=WordArgument("my-project", "the name of a project", str),
        argument_may_be_missing=True,
        build="paceline.watch.tracker_writers:open_trackio",
        is_reader=True,
        library="trackio",
    ),
    SinkSpec(
        word="mlflow",
        summary="a run of MLflow, in mlflow/ or at MLFLOW_TRACKING_URI",
        argument=WordArgument("my-experiment", "the name of an experiment", str),
        argument_may_be_missing=True,
        build="paceline.watch.tracker_writers:open_mlflow",
        is_reader=True,
        library="mlflow",
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
