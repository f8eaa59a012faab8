"""The command line `paceline`: a table of commands, and the errors that a user sees.

Invariant: only the command that is called is imported, so that `--help` and short commands cost little more
than typer itself. The short help of each command is repeated in the table for that; a test compares it with
the docstring of the command.
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
    """A command that has not been imported yet.

    Args:
        words: the words that call it, for example "lab run".
        home: "module:function" in `paceline.cli`.
        about: its line in the help of the program.
        settings: settings of its click context.
    """

    words: str
    home: str
    about: str
    settings: dict[str, Any] | None = None


COMMANDS = (
    CommandEntry("train", "train:train", "Train a recipe and print the result."),
    CommandEntry("submit", "submit:submit", "Start RECIPE by Slurm, MPI, ssh, Ray, Kubernetes or SkyPilot."),
    CommandEntry("new", "new:new", "Write a model, a recipe and a test for you to edit to a new folder."),
    CommandEntry(
        "verify",
        "verify:verify",
        "Run a strategy next to a single-process oracle and compare every tensor of every step.",
    ),
    CommandEntry(
        "export",
        "export:export",
        "Write the parameters and buffers of a run to a safetensors file.",
    ),
    CommandEntry(
        "evaluate",
        "evaluate_predict:evaluate",
        "Evaluate the weights of a run on its held-out samples or on other data; a policy in 100 episodes.",
    ),
    CommandEntry(
        "predict", "evaluate_predict:predict", "Print the prediction of a run's model for each sample."
    ),
    CommandEntry("generate", "generate:generate", "Continue prompts with the model of a run or a folder."),
    CommandEntry("serve", "generate:serve", "Serve completions and chats over HTTP until Ctrl-C or SIGTERM."),
    CommandEntry(
        "chat",
        "chat:chat",
        "Chat with the model of a server, until the end of the input or Ctrl-C.",
    ),
    CommandEntry(
        "sweep",
        "sweep:sweep",
        "Train RECIPE for every combination of some settings; write a table, a plot and results.json.",
    ),
    CommandEntry(
        "compare",
        "compare_strategies:compare_strategies",
        "Train RECIPE with every strategy of a file over several seeds; write tables and a page.",
    ),
    CommandEntry(
        "tune",
        "tune:tune",
        "Search for the best settings of RECIPE; the same command continues where it stopped.",
    ),
    CommandEntry(
        "tune work",
        "tune:work",
        "Run trials of a study that another machine coordinates, until it ends.",
    ),
    CommandEntry(
        "study hpo",
        "tune:study_hpo",
        "Compare grid, random and TPE searches on digits and on text; write tables, a plot and a page.",
    ),
    CommandEntry(
        "study optimizers",
        "study_optimizers:study_optimizers",
        "Compare optimizers over schedules, number formats and batch sizes; write tables, plots and a page.",
    ),
    CommandEntry(
        "study privacy",
        "study_privacy:study_privacy",
        "Train two tasks in six ways of privacy, score encrypted rows, and attack the updates.",
    ),
    CommandEntry(
        "run", "run_script:run", "Run SCRIPT with its arguments on every process, as torchrun does.", _ANY
    ),
    CommandEntry("runs", "runs:runs", "List runs, oldest first."),
    CommandEntry(
        "report",
        "runs:report",
        "Write an HTML page about one run, or about several to compare, and print a summary.",
    ),
    CommandEntry(
        "watch",
        "watch:watch",
        "Serve a live page about runs until Ctrl-C: curves, ranks, events and state.",
    ),
    CommandEntry(
        "top", "watch:top", "Show a live table of runs and their ranks in the terminal, until Ctrl-C."
    ),
    CommandEntry(
        "doctor",
        "doctor:doctor",
        "Check within 15 seconds what would end a job on this host and others, and say what to do.",
    ),
    CommandEntry(
        "explain",
        "explain:explain",
        "Compare what all ranks of a running job do, and say which rank the others wait for, and where.",
    ),
    CommandEntry(
        "leave",
        "leave:leave",
        "Let ranks of a running job leave it after their step; the others continue without them.",
    ),
    CommandEntry(
        "trace",
        "trace:trace",
        "Write what each rank did in some steps to a file for Perfetto; also of a running job.",
    ),
    CommandEntry(
        "alerts",
        "alert_command:alerts",
        "Print alerts about runs and why a run is slow; deliver them to a webhook or a command.",
    ),
    CommandEntry(
        "profile",
        "profile:profile",
        "Profile some steps of a running job: a table of operations, and a flame graph of Python functions.",
    ),
    CommandEntry(
        "strategies",
        "recipe_show:strategies",
        "List the supported strategies and what each name stands for.",
    ),
    CommandEntry(
        "certificate",
        "certificate_command:certificate",
        "Create a certificate for a job, and its own certificate authority, for channel=grpc.",
    ),
    CommandEntry(
        "client",
        "client:client",
        "Train on this client's data in the federated rounds of a job, until the run is complete.",
    ),
    CommandEntry(
        "recipe show",
        "recipe_show:show",
        "Print the resolved recipe: every key with its value and its meaning.",
    ),
    CommandEntry(
        "recipe schema",
        "recipe_show:schema",
        "Print a JSON schema of recipes, with which editors check and complete them.",
    ),
    CommandEntry(
        "lab run",
        "lab_commands:run",
        "Run COMMAND (after --) on a virtual cluster; `paceline` jobs spread their processes over its hosts.",
        _REST,
    ),
    CommandEntry(
        "lab shell",
        "lab_commands:shell",
        "Open a shell on a host of a running lab, or run the command after -- there.",
        {"allow_extra_args": True},
    ),
    CommandEntry(
        "lab ps",
        "lab_commands:ps",
        "List your labs, their hosts and the number of processes on each host.",
    ),
    CommandEntry(
        "lab clean",
        "lab_commands:remove",
        "Remove what earlier labs left behind: processes, control groups, files.",
    ),
    CommandEntry(
        "chaos",
        "chaos:chaos",
        "Train RECIPE in a lab with one fault at a time, and write what was survived to a certificate.",
    ),
    CommandEntry(
        "schedule show",
        "schedule_show:show",
        "Check a pipeline schedule, and print it with its bubble and the micro-batches in flight.",
    ),
    CommandEntry(
        "plan memory",
        "plan_memory:memory",
        "Predict how much memory each rank of a job needs, by kind, and whether it fits.",
    ),
    CommandEntry(
        "plan privacy",
        "plan_privacy:privacy",
        "Print the noise with which a run stays within an epsilon, and the epsilon of its own noise.",
    ),
    CommandEntry(
        "bench link",
        "bench:link",
        "Measure latency and bandwidth between every pair of ranks, and of an all-reduce (CPU, Gloo).",
    ),
    CommandEntry(
        "bench comm",
        "bench:comm",
        "Measure the all-reduce with every route and codec (CPU); with --recipe, compare codecs on a task.",
    ),
    CommandEntry(
        "bench machine",
        "bench_machine:machine",
        "Measure this machine in less than a minute, name slow paths, or compare two machines.",
    ),
    CommandEntry(
        "bench rl",
        "bench_rl:bench_rl",
        "Measure steps per second of an environment, rollouts and the learner, for 1, 2, 4, ... actors.",
    ),
    CommandEntry(
        "bench kernels",
        "bench_kernels:kernels",
        "Measure the forms of fused operations: plain, compiled, and in Triton on a GPU.",
    ),
)
GROUPS = {
    "recipe": "Inspect recipes.",
    "lab": "Run a virtual cluster on this machine, with hosts, links and faults.",
    "bench": "Measure communication, machines and environments.",
    "schedule": "Inspect pipeline schedules.",
    "plan": "Predict what a job needs before it starts.",
    "study": "Run a study and write its report.",
}


def _print_version(requested: bool) -> None:
    """Print the versions of Paceline, of PyTorch (without importing it) and of Python, and exit."""
    if requested:
        import platform
        from importlib import metadata

        torch = metadata.version("torch")
        typer.echo(f"paceline {VERSION} (torch {torch}, Python {platform.python_version()})")
        raise typer.Exit


_Version = typer.Option(
    "--version", help="Print the versions and exit.", callback=_print_version, is_eager=True
)


def _root_command(version: Annotated[bool, _Version] = False) -> None:
    """Train one PyTorch model on many processes, devices and machines, and verify the result."""


def build_app(words: Sequence[str] | None = None) -> typer.Typer:
    """Return the command line, with the command that `words` call imported; None imports all of them."""
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
        if group not in GROUPS:  # "tune work": `tune` is a command
            group, name = "", command.words
        is_called = words is None or command.words == " ".join(words[: 1 + bool(group)])
        parent, function = groups[group] if group else app, load(command) if is_called else _not_loaded
        parent.command(name, short_help=command.about, context_settings=command.settings)(function)
    return app


def load(command: CommandEntry) -> Callable[..., None]:
    """Import a command."""
    module, _, function = command.home.partition(":")
    loaded: Callable[..., None] = getattr(import_module(f"paceline.cli.{module}"), function)
    return loaded


def _not_loaded() -> None:
    """Stand in for a command that the help lists and nobody calls."""


def _group(app: typer.Typer, name: str, about: str) -> typer.Typer:
    group = typer.Typer(help=about, no_args_is_help=True, callback=lambda: None, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


def main() -> None:
    """Run the command line; expected errors are printed without a traceback, and set the exit code."""
    words = sys.argv[1:]
    try:
        # Only `train` has an option whose value can be left out.
        if words[:1] == ["train"]:
            from paceline.cli.common_options import fill_resume_value

            words = fill_resume_value(words)
        if words[:2] == ["tune", "work"]:
            words = ["tune work", *words[2:]]
        try:
            build_app(words)(args=words, prog_name="paceline")
        finally:
            sys.stdout.flush()  # here, where a full disk or a closed pipe is still an error that is reported
    except PacelineError as error:
        shown = _resource_error(error) or error
        _print_error(shown)
        sys.exit(shown.exit_code)
    except OSError as error:
        from paceline.cli.console import discard_output

        shown = _resource_error(error) or _system_error(error)
        _print_error(shown)
        discard_output()  # else Python tries to flush the same output again when it exits
        sys.exit(shown.exit_code)


def _print_error(error: PacelineError) -> None:
    from paceline.cli.console import print_error

    print_error(error)


def _resource_error(error: Exception) -> PacelineError | None:
    """Return the error that names the cause, if memory or open files ran out."""
    from paceline.launch.worker_guard import explain_error

    return None if isinstance(error, MemoryLimitError) else explain_error(error)


def _system_error(error: OSError) -> PacelineError:
    """Return an error for a failed system call that no other error describes."""
    if error.filename is not None and error.errno is not None:
        from paceline.observe.file_writing import run_folder_error

        return run_folder_error(error)
    return PacelineError(
        f"a system call failed: {error.strerror or error}",
        where="a file or a stream of this command, perhaps standard output",
        next_step="free space, check the permissions, or choose another folder (TMPDIR, run_dir, --output)",
    )
