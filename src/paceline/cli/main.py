"""`paceline`: train, verify, and look before you do. Each command lives in a module of its own."""

from __future__ import annotations

import sys

import typer

from paceline.cli import bench, export, lab, recipe, run, runs, sweep, train, verify
from paceline.cli.console import fail, forget_output
from paceline.cli.resume import with_value
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Train one PyTorch model on many processes, devices and machines, and verify the answer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("sweep")(sweep.sweep)
app.command(
    "run",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)(run.run)
app.command("runs")(runs.runs)
app.command("report")(runs.report)
app.command("strategies")(recipe.strategies)
recipes = typer.Typer(help="Look at recipes.", no_args_is_help=True)
recipes.command("show")(recipe.show)
app.add_typer(recipes, name="recipe")
labs = typer.Typer(help="A cluster on this machine: hosts, links and faults.", no_args_is_help=True)
_REST = {"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False}
labs.command("run", context_settings=_REST)(lab.run)
labs.command("shell", context_settings={"allow_extra_args": True})(lab.shell)
labs.command("ps")(lab.ps)
labs.command("clean")(lab.remove)
app.add_typer(labs, name="lab")
benches = typer.Typer(help="Measure what planning needs.", no_args_is_help=True, callback=lambda: None)
benches.command("link")(bench.link)
app.add_typer(benches, name="bench")


def main() -> None:
    """Run the command line; an error that a user can meet is printed without its traceback."""
    try:
        words = sys.argv[1:]
        try:
            app(args=with_value(words) if words[:1] == ["train"] else words)
        finally:
            sys.stdout.flush()
    except PacelineError as error:
        fail(error)
        sys.exit(error.exit_code)
    except OSError as error:
        fail(_refused(error))
        forget_output()
        sys.exit(PacelineError.exit_code)


def _refused(error: OSError) -> PacelineError:
    """What the system does not allow, where no other error says more."""
    where = "" if error.filename is None else str(error.filename)
    return PacelineError(
        f"the system refused: {error.strerror or error}",
        where=where or "a file or a stream of this command, perhaps standard output",
        next_step="free space, check the rights, or choose another folder (TMPDIR, run_dir, --output)",
    )
