"""`paceline evaluate` and `paceline predict`: use the weights of a run on samples.

On one process the command opens the run itself; with -n it launches that many, which share the
weights and of which the first one prints.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common_options import JobPlacement, TaskOf, Trust, WeightsOf, read_task_options
from paceline.cli.console import discard_warning, print_json, print_plain, print_warning
from paceline.errors import DataError, RecipeError, format_count

if TYPE_CHECKING:
    from paceline.session.saved_run import OpenedRun

_MAX_EXPONENT = 700.0  # the largest whose exponential is a float

Run = Annotated[Path, typer.Argument(help="A run folder, or a checkpoint inside one.", show_default=False)]
_SOURCE = (
    'Samples: "file.py:function", which returns them, or the name of a set of the task: held_out, data, test.'
)
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An argument of that function: --option path=new.csv. Repeatable."),
]
MaxSamples = Annotated[
    int | None,
    typer.Option("--max-samples", min=0, help="Number of samples of a set; 0: all. Default: as in the run."),
]
Processes = Annotated[
    int, typer.Option("-n", "--processes", min=1, help="Number of processes that share the weights.")
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help='How the processes share the weights: "shard=2 zero=3", "tensor=2". Default: as in training.',
    ),
]
To = Annotated[Path | None, typer.Option("--to", help="File for the predictions: *.jsonl or *.safetensors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option("--data", help=_SOURCE)] = None,
    option: Options = None,
    task: TaskOf = None,
    weights: WeightsOf = None,
    max_samples: MaxSamples = None,
    processes: Processes = 1,
    strategy: Layout = None,
    early_exit: Annotated[
        float | None,
        typer.Option(
            "--early-exit",
            min=0.0,
            help="Let a sequence leave a GPT after the first block that is this confident, 0 to 1, and count"
            " FLOPs.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Evaluate the weights of a run on its held-out samples or on other data; a policy in 100 episodes.

    The weights come from the newest valid checkpoint; RUN/checkpoints/best is the best one by evaluation.
    """
    args = _RunArgs(
        run=run,
        task=task,
        weights=weights,
        # The limit of the recipe is for evaluations during training; other data is read whole.
        max_samples=0 if max_samples is None and data is not None else max_samples,
        processes=processes,
        strategy=strategy,
        trust=trust,
    )
    with _open_run(args) as opened:
        if opened.session.recipe.rl.total_steps and data is None:
            _print_returns(opened, run, as_json=as_json)
            return
        source = None if data is None else _samples(opened, data, option)
        if early_exit is None:
            record = _evaluation_record(opened, source)
        else:
            record = _early_exit_record(opened, source, early_exit)
    if not opened.session.is_first:
        return
    if as_json:
        print_json({"run": str(run), "data": data or "held_out", **record})
        return
    for name, value in record.items():
        print_plain(f"{name}  {value:.6g}" if isinstance(value, float) else f"{name}  {value}")


def _evaluation_record(opened: OpenedRun, source: Any) -> dict[str, Any]:
    """Evaluate, and return what is printed; collective."""
    result = opened.evaluate(source)
    record = {"checkpoint": opened.checkpoint, "step": result.step, "samples": result.num_samples}
    record |= {"loss": result.loss, **result.metrics}
    if opened.task.vocabulary:  # the items of the loss are tokens
        record["perplexity"] = math.exp(min(result.loss, _MAX_EXPONENT))
    return record


def _early_exit_record(opened: OpenedRun, source: Any, confidence: float) -> dict[str, Any]:
    """Evaluate with early exits, and return what is printed."""
    result = opened.evaluate_early_exit(confidence, source)
    record: dict[str, Any] = {"checkpoint": opened.checkpoint, "samples": sum(result.exits)}
    record |= {"confidence": confidence, "loss": result.loss, "accuracy": result.accuracy}
    record |= {"flops": result.flops, "full flops": result.full_flops}
    return record | {f"exits after {k}": number for k, number in enumerate(result.exits) if k}


def _print_returns(opened: OpenedRun, run: Path, *, as_json: bool) -> None:
    """Play episodes with the policy of a run, and print its returns; collective."""
    from paceline.rl.played_episodes import play_opened

    played = play_opened(opened)
    if not opened.session.is_first:
        return
    if not as_json:
        print_plain(f"checkpoint  {played.checkpoint}")
        print_plain(f"greedy  {played.greedy}")
        print_plain(f"sampled  {played.sampled}")
        return
    returns = {
        kind: {"mean": found.mean, "margin": found.margin, "returns": list(found.values)}
        for kind, found in (("greedy", played.greedy), ("sampled", played.sampled))
    }
    print_json({"run": str(run), "checkpoint": played.checkpoint, "step": played.step, **returns})


def predict(
    run: Run,
    source: Annotated[str, typer.Argument(help=_SOURCE, show_default=False)],
    option: Options = None,
    task: TaskOf = None,
    weights: WeightsOf = None,
    max_samples: MaxSamples = 0,
    to: To = None,
    processes: Processes = 1,
    strategy: Layout = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Print the prediction of a run's model for each sample.

    Each line is the index of a sample and its prediction. The weights come from the newest valid checkpoint;
    RUN/checkpoints/best is the best one by evaluation.
    """
    _check_name(to)
    args = _RunArgs(
        run=run,
        task=task,
        weights=weights,
        max_samples=max_samples,
        processes=processes,
        strategy=strategy,
        trust=trust,
    )
    with _open_run(args) as opened:
        rows = list(opened.predict(_samples(opened, source, option)))
    if not opened.session.is_first:
        return
    _write(rows, to)
    if as_json:
        record = {"run": str(run), "checkpoint": opened.checkpoint, "data": source, "samples": len(rows)}
        _print_json(record, rows, to)
    else:
        _print_rows(rows, opened.checkpoint, to)


def _print_json(record: dict[str, Any], rows: list[Any], to: Path | None) -> None:
    more = {"file": str(to)} if to else {"predictions": [_plain(row) for row in rows]}
    print_json({**record, **more})


def _print_rows(rows: list[Any], checkpoint: str, to: Path | None) -> None:
    if to is not None:
        print_plain(f"{to}: {format_count(len(rows), 'prediction')} of {checkpoint}")
        return
    for index, row in enumerate(rows):
        print_plain(f"{index}  {json.dumps(_plain(row))}")


def _check_name(to: Path | None) -> None:
    """Refuse a file type that predictions cannot be written to."""
    if to is not None and to.suffix not in (".jsonl", ".safetensors"):
        raise RecipeError(
            f"cannot write predictions to '{to}'",
            next_step="use a file name that ends in .jsonl or .safetensors",
        )


@dataclass(frozen=True)
class _RunArgs:
    """The arguments that both commands share, as the user gave them."""

    run: Path
    task: str | None
    weights: Any
    max_samples: int | None
    processes: int
    strategy: str | None
    trust: bool


@contextmanager
def _open_run(args: _RunArgs) -> Iterator[OpenedRun]:
    """Open the run on this process, or launch several that do, and exit."""
    from paceline.cli.resume import find_recipe, require_own_run
    from paceline.job.cluster import Cluster
    from paceline.launch.worker_guard import guard

    recipe = find_recipe(args.run)
    require_own_run(args.run, args.trust)
    cluster = Cluster.of_worker()
    if cluster is None and args.processes > 1:
        sys.exit(_launch(args, recipe))
    # Not at the top: a process that only launches others needs no torch.
    from paceline.session.saved_run import open_run

    with (
        guard(cluster) if cluster else nullcontext(),
        open_run(
            args.run,
            args.task,
            cluster=cluster,
            warn=print_warning if cluster is None or cluster.global_rank == 0 else discard_warning,
            weights=args.weights,
            max_samples=args.max_samples,
            strategy=args.strategy,
        ) as opened,
    ):
        yield opened


def _launch(args: _RunArgs, recipe: Path) -> int:
    """Start the processes, of which the first one prints; returns the exit code."""
    from paceline.cli.relaunch import relaunch
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.recipe.support import resolve_inference_strategy

    trained = load_recipe(recipe)
    # Called for its errors: a strategy that does not fit fails before a process starts.
    resolve_inference_strategy(trained.strategy, args.strategy, args.processes)
    placement = JobPlacement(args.processes, 1, 0, None, "", trained.security.tls)
    return relaunch(placement, 0, stuck_seconds=trained.runtime.deadline_seconds).exit_code


def _samples(opened: OpenedRun, spec: str, options: list[str] | None) -> Any:
    """Return the samples that `spec` names: a set of the task, or the result of a function.

    Raises:
        DataError: the task has no such set.
    """
    from paceline.observe.process_info import cache_folder
    from paceline.session.saved_run import find_samples
    from paceline.tasks.task_registry import load_samples

    samples = find_samples(opened.task, spec)
    if samples is not None:
        return samples
    if ":" not in spec:
        raise DataError(
            f"the task has no set of samples '{spec}'",
            next_step='name one of its sets (data, held_out, test), or "file.py:function"',
        )
    return load_samples(
        spec, read_task_options(options), opened.session.recipe.seed, Path.cwd(), cache_folder()
    )


def _write(rows: list[Any], to: Path | None) -> None:
    if to is None:
        return
    if to.suffix == ".jsonl":
        lines = [json.dumps({"index": i, "prediction": _plain(row)}) + "\n" for i, row in enumerate(rows)]
        to.write_text("".join(lines), encoding="utf-8")
        return
    import torch
    from safetensors.torch import save_file

    names = rows[0] if rows and isinstance(rows[0], dict) else None
    columns = {name: [row[name] for row in rows] for name in names} if names else {"predictions": rows}
    save_file({name: torch.stack(list(map(torch.as_tensor, c))) for name, c in columns.items()}, to)


def _plain(row: Any) -> Any:
    """Return a prediction as a value that JSON can hold."""
    if isinstance(row, dict):
        return {name: _plain(value) for name, value in row.items()}
    to_list = getattr(row, "tolist", None)
    return to_list() if callable(to_list) else row
