"""`paceline`: train, verify, and look before you do. Each command lives in a module of its own."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from paceline._version import VERSION
from paceline.cli import bench, export, lab, recipe, run, runs, sweep, train, verify
from paceline.cli.console import fail, output
from paceline.cli.resume import with_value
from paceline.errors import PacelineError
from paceline.observe.disk import unwritable


def _print_version(asked: bool) -> None:
    """The version of Paceline, of the installed PyTorch (which is not loaded), and of Python."""
    if asked:
        output().print(
            f"paceline {VERSION} (torch {metadata.version('torch')}, Python {platform.python_version()})",
            markup=False,
            highlight=False,
        )
        raise typer.Exit


app = typer.Typer(
    name="paceline",
    help="Train one PyTorch model on many processes, devices and machines, and verify the answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_Version = typer.Option(
    "--version", help="Print the versions, and leave.", callback=_print_version, is_eager=True
)


@app.callback()
def about(version: Annotated[bool, _Version] = False) -> None:
    """Train one PyTorch model on many processes, devices and machines, and verify the answer."""


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
recipes.command("schema")(recipe.schema)
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
        app(args=with_value(words) if words[:1] == ["train"] else words, prog_name="paceline")
    except PacelineError as error:
        fail(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None or error.errno is None:
            raise
        told = unwritable(error)
        fail(told)
        sys.exit(told.exit_code)
