"""`paceline`: train, verify, and look before you do. Each command lives in a module of its own.

Invariant: only the command that is called is imported, so that help and short commands cost little more than
typer itself. What each says of itself stands here too; a test holds it against the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from paceline._version import VERSION
from paceline.errors import MemoryLimitError, PacelineError

_REST = {"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False}
_ANY = {**_REST, "ignore_unknown_options": True}


class CommandEntry(NamedTuple):
    """A command before it is loaded.

    Args:
        words: how it is called.
        home: "module:function" in `paceline.cli`.
        settings: of click's context.
    """

    words: str
    home: str
    about: str
    settings: dict[str, Any] | None = None


COMMANDS = (
    CommandEntry("train", "train:train", "Train a recipe, and say what came out."),
    CommandEntry(
        "verify",
        "verify:verify",
        "Run the strategy and the single-process oracle side by side, and compare every tensor of every"
        " step.",
    ),
    CommandEntry(
        "export",
        "export:export",
        "Write parameters and buffers of the newest valid checkpoint, or of the one that is named.",
    ),
    CommandEntry(
        "evaluate",
        "evaluate_predict:evaluate",
        "Evaluate a run's weights on its held-out samples, or on others.",
    ),
    CommandEntry("predict", "evaluate_predict:predict", "Print what a run's model says of each sample."),
    CommandEntry(
        "sweep",
        "sweep:sweep",
        "Train RECIPE for every combination of the axes; a table, a plot and results.json say what came out.",
    ),
    CommandEntry(
        "compare",
        "compare_strategies:compare_strategies",
        "Train RECIPE under every strategy of FILE, over seeds; tables and a page hold what was measured.",
    ),
    CommandEntry(
        "run", "run_script:run", "Run SCRIPT with its arguments on every process, as torchrun would.", _ANY
    ),
    CommandEntry("runs", "runs:runs", "List runs, the oldest first."),
    CommandEntry(
        "report",
        "runs:report",
        "Write one page about a run, or about several side by side, and say in words what is on it.",
    ),
    CommandEntry(
        "strategies",
        "recipe_show:strategies",
        "Print the strategies that are supported, and what each stands for.",
    ),
    CommandEntry(
        "certificate",
        "certificate_command:certificate",
        "Make the certificate of a job, and an authority of its own, for channel=grpc.",
    ),
    CommandEntry(
        "recipe show",
        "recipe_show:show",
        "Print the resolved recipe: every key, set or not, with its value and what it means.",
    ),
    CommandEntry(
        "recipe schema",
        "recipe_show:schema",
        "Print a JSON schema of recipes, by which editors check and complete them.",
    ),
    CommandEntry(
        "lab run",
        "lab_commands:run",
        "Run COMMAND (after --) on a cluster on this machine; `paceline` jobs spread their -n over the"
        " hosts.",
        _REST,
    ),
    CommandEntry(
        "lab shell",
        "lab_commands:shell",
        "Open a shell in a host of a running lab, or run the command after -- there.",
        {"allow_extra_args": True},
    ),
    CommandEntry(
        "lab ps",
        "lab_commands:ps",
        "List the labs of this user, their hosts and how many processes run there.",
    ),
    CommandEntry(
        "lab clean",
        "lab_commands:remove",
        "Remove what earlier labs have left: processes, control groups, files.",
    ),
    CommandEntry(
        "schedule show",
        "schedule_show:show",
        "Prove a schedule, and print it with its bubble and the micro-batches that each stage has in flight.",
    ),
    CommandEntry(
        "plan memory",
        "plan_memory:memory",
        "Say what each rank of a job will need in memory, by kind, and whether it fits.",
    ),
    CommandEntry(
        "bench link",
        "bench:link",
        "Measure latency and bandwidth of every pair of ranks, and of the all-reduce of all (CPU, Gloo).",
    ),
    CommandEntry(
        "bench comm",
        "bench:comm",
        "Measure the all-reduce by every route and codec (CPU); with --recipe what codecs do to a task.",
    ),
)
GROUPS = {
    "recipe": "Look at recipes.",
    "lab": "A cluster on this machine: hosts, links and faults.",
    "bench": "Measure what planning needs.",
    "schedule": "Look at the schedules of pipelines.",
    "plan": "Ask what a job will need before it is started.",
}


def _print_version(asked: bool) -> None:
    """The version of Paceline, of the installed PyTorch (which is not loaded), and of Python."""
    if asked:
        import platform
        from importlib import metadata

        torch = metadata.version("torch")
        typer.echo(f"paceline {VERSION} (torch {torch}, Python {platform.python_version()})")
        raise typer.Exit


_Version = typer.Option(
    "--version", help="Print the versions, and leave.", callback=_print_version, is_eager=True
)


def _root_command(version: Annotated[bool, _Version] = False) -> None:
    """Train one PyTorch model on many processes, devices and machines, and verify the answer."""


def build_app(words: Sequence[str] | None = None) -> typer.Typer:
    """The command line, with the command that `words` call loaded; with None, all of them."""
    app = typer.Typer(
        name="paceline",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root_command)
    groups = {name: _group(app, name, about) for name, about in GROUPS.items()}
    for command in COMMANDS:
        group, _, name = command.words.rpartition(" ")
        called = words is None or command.words.split() == list(words[: 1 + bool(group)])
        place, function = groups[group] if group else app, load(command) if called else _not_loaded
        place.command(name, short_help=command.about, context_settings=command.settings)(function)
    return app


def load(command: CommandEntry) -> Callable[..., None]:
    """Import a command."""
    module, _, function = command.home.partition(":")
    loaded: Callable[..., None] = getattr(import_module(f"paceline.cli.{module}"), function)
    return loaded


def _not_loaded() -> None:
    """Stands for a command that is listed and not called."""


def _group(app: typer.Typer, name: str, about: str) -> typer.Typer:
    group = typer.Typer(help=about, no_args_is_help=True, callback=lambda: None, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


def main() -> None:
    """Run the command line; an error that a user can meet is printed without its traceback."""
    words = sys.argv[1:]
    try:
        if words[:1] == ["train"]:
            from paceline.cli.common_options import fill_resume_value

            words = fill_resume_value(words)
        try:
            build_app(words)(args=words, prog_name="paceline")
        finally:
            sys.stdout.flush()
    except PacelineError as error:
        told = _resource_error(error) or error
        _print_error(told)
        sys.exit(told.exit_code)
    except OSError as error:
        from paceline.cli.console import discard_output

        told = _resource_error(error) or _system_error(error)
        _print_error(told)
        discard_output()
        sys.exit(told.exit_code)


def _print_error(error: PacelineError) -> None:
    from paceline.cli.console import print_error

    print_error(error)


def _resource_error(error: Exception) -> PacelineError | None:
    """Memory or open files that are used up, whatever could not be done without them."""
    from paceline.launch.worker_guard import explain_error

    return None if isinstance(error, MemoryLimitError) else explain_error(error)


def _system_error(error: OSError) -> PacelineError:
    """What the system does not allow, where no other error says more."""
    if error.filename is not None and error.errno is not None:
        from paceline.observe.file_writing import run_folder_error

        return run_folder_error(error)
    return PacelineError(
        f"the system refused: {error.strerror or error}",
        where="a file or a stream of this command, perhaps standard output",
        next_step="free space, check the rights, or choose another folder (TMPDIR, run_dir, --output)",
    )
