"""`paceline evaluate` and `paceline predict`: what the weights of a run say of samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from paceline.cli.common_options import JobPlacement
from paceline.cli.console import error_output, output
from paceline.errors import DataError, RecipeError

if TYPE_CHECKING:
    from paceline.session.saved_run import OpenedRun

Run = Annotated[Path, typer.Argument(help="A run folder, or a checkpoint inside one.", show_default=False)]
_SOURCE = 'Samples: "file.py:function" that returns them, or the name of a set of the task: held_out, data.'
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An argument of that function: --option path=new.csv. May be repeated."),
]
TaskOf = Annotated[
    str | None,
    typer.Option("--task", help='"file.py:function", where the run is of a function of a script.'),
]
WeightsOf = Annotated[
    Literal["average", "last"] | None,
    typer.Option(help="Of a run with an average: which. Default: the average.", show_default=False),
]
MaxSamples = Annotated[
    int | None, typer.Option("--max-samples", min=0, help="Samples of a set; 0: all. Default: the run's.")
]
Processes = Annotated[
    int, typer.Option("-n", "--processes", min=1, help="Processes that hold the weights together.")
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--strategy", help='How they hold them: "shard=2 zero=3", "tensor=2". Default: as in the training.'
    ),
]
To = Annotated[
    Path | None, typer.Option("--to", help="A file for the predictions: *.jsonl or *.safetensors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run the code that another user's run folder names.")]


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option("--data", help=_SOURCE)] = None,
    option: Options = None,
    task: TaskOf = None,
    weights: WeightsOf = None,
    max_samples: MaxSamples = None,
    processes: Processes = 1,
    strategy: Layout = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Evaluate a run's weights on its held-out samples, or on others.

    The weights are those of the newest valid checkpoint; RUN/checkpoints/best names the best by evaluation.
    """
    most = 0 if max_samples is None and data is not None else max_samples
    with _open_run(_RunArgs(run, task, weights, most, processes, strategy, trust)) as found:
        result = found.evaluate(None if data is None else _samples(found, data, option))
    if not found.session.is_first:
        return
    record = {"checkpoint": found.checkpoint, "step": result.step, "samples": result.num_samples}
    record |= {"loss": result.loss, **result.metrics}
    if as_json:
        output().print_json(json.dumps({"run": str(run), "data": data or "held_out", **record}))
        return
    for name, value in record.items():
        _print_line(f"{name}  {value:.6g}" if isinstance(value, float) else f"{name}  {value}")


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
    """Print what a run's model says of each sample.

    A line each: its index and the prediction. The weights are those of the newest valid checkpoint;
    RUN/checkpoints/best names the best by evaluation.
    """
    _check_name(to)
    with _open_run(_RunArgs(run, task, weights, max_samples, processes, strategy, trust)) as found:
        rows = list(found.predict(_samples(found, source, option)))
    if not found.session.is_first:
        return
    _write(rows, to)
    if as_json:
        record = {"run": str(run), "checkpoint": found.checkpoint, "data": source, "samples": len(rows)}
        _print_json(record, rows, to)
    else:
        _print_rows(rows, found.checkpoint, to)


def _print_json(record: dict[str, Any], rows: list[Any], to: Path | None) -> None:
    more = {"file": str(to)} if to else {"predictions": [_plain(row) for row in rows]}
    output().print_json(json.dumps({**record, **more}))


def _print_rows(rows: list[Any], checkpoint: str, to: Path | None) -> None:
    if to is not None:
        _print_line(f"{to}: {len(rows)} predictions of {checkpoint}")
        return
    for index, row in enumerate(rows):
        _print_line(f"{index}  {json.dumps(_plain(row))}")


def _check_name(to: Path | None) -> None:
    """Raises: RecipeError: nobody knows how to write such a file."""
    if to is not None and to.suffix not in (".jsonl", ".safetensors"):
        raise RecipeError(
            f"cannot write predictions to '{to}'", next_step="name a *.jsonl or a *.safetensors"
        )


class _RunArgs(NamedTuple):
    """The words that both commands share; see their help."""

    run: Path
    task: str | None
    weights: Any
    max_samples: int | None
    processes: int
    strategy: str | None
    trust: bool


@contextmanager
def _open_run(asked: _RunArgs) -> Iterator[OpenedRun]:
    """The run; on the process that a user started only if it is the only one."""
    from paceline.cli.relaunch import worker_cluster
    from paceline.cli.resume import find_recipe, require_own_run
    from paceline.launch.worker_guard import guard

    recipe = find_recipe(asked.run)
    require_own_run(asked.run, asked.trust)
    cluster = worker_cluster()
    if cluster is None and asked.processes > 1:
        sys.exit(_launch(asked, recipe))
    from paceline.session.saved_run import open_run

    more = {"weights": asked.weights, "max_samples": asked.max_samples, "strategy": asked.strategy}
    with guard(cluster) if cluster else nullcontext():
        warn = _warn if cluster is None or cluster.global_rank == 0 else _discard
        with open_run(asked.run, asked.task, cluster=cluster, warn=warn, **more) as found:
            yield found


def _launch(asked: _RunArgs, recipe: Path) -> int:
    """Start the processes, whose first one prints; returns the exit code."""
    from paceline.cli.relaunch import relaunch
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.recipe.support import resolve_inference_strategy

    trained = load_recipe(recipe)
    resolve_inference_strategy(trained.strategy, asked.strategy, asked.processes)
    placement = JobPlacement(asked.processes, 1, 0, None, "", trained.security.tls)
    return relaunch(placement, 0, stuck_seconds=trained.runtime.deadline_seconds).exit_code


def _discard(text: str) -> None:
    """The first process has said it."""


def _samples(found: OpenedRun, spec: str, options: list[str] | None) -> Any:
    """What a name stands for.

    Raises:
        DataError: there are no samples of this name.
    """
    from paceline.session.joining import CACHE_DIR
    from paceline.session.saved_run import find_samples
    from paceline.tasks.task_registry import load_samples

    own = find_samples(found.task, spec)
    if own is not None:
        return own
    if ":" not in spec:
        raise DataError(
            f"the task has no samples called '{spec}'",
            next_step='name one of its sets (data, held_out), or "file.py:function"',
        )
    return load_samples(spec, _arguments(options), found.session.recipe.seed, Path.cwd(), CACHE_DIR)


def _arguments(options: list[str] | None) -> dict[str, Any]:
    """Raises: RecipeError: one is no KEY=VALUE."""
    from paceline.recipe.recipe_loading import apply_override

    values: dict[str, Any] = {}
    for text in options or ():
        _, problem = apply_override(values, f"options.{text}")
        if problem is not None:
            raise RecipeError(f"--option {text}: {problem.message}", next_step="--option KEY=VALUE")
    found: dict[str, Any] = values.get("options", {})
    return found


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
    """A prediction as JSON has it."""
    if isinstance(row, dict):
        return {name: _plain(value) for name, value in row.items()}
    to_list = getattr(row, "tolist", None)
    return to_list() if callable(to_list) else row


def _warn(text: str) -> None:
    """On standard error: standard output may be JSON."""
    error_output().print(text, markup=False, highlight=False, soft_wrap=True)


def _print_line(text: str) -> None:
    output().print(text, markup=False, highlight=False, soft_wrap=True)
