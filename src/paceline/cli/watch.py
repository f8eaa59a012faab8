"""`paceline watch` and `paceline top`: a live page and a live table of runs, read from their folders."""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

DEFAULT_PORT = 7600

Folders = Annotated[
    list[Path] | None,
    typer.Argument(help="Run folders, or folders that contain some. Default: runs/.", show_default=False),
]


def watch(
    folders: Folders = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Others than this host reach 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port; 0: any that is free. Default: 7600, or any if that is in use.",
            show_default=False,
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Token of the link. Default: a new one at each start.", show_default=False),
    ] = None,
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print the dashboard for Grafana as JSON and exit.")
    ] = False,
) -> None:
    """Serve a live page about runs until Ctrl-C: curves, ranks, events and state."""
    if grafana:
        from paceline.watch.promql import render_dashboard

        sys.stdout.write(render_dashboard())
        return
    try:
        from paceline.watch.page_server import PageServer
    except ImportError as error:
        raise MissingExtraError(
            f"paceline watch needs starlette and uvicorn: {error}", next_step="pip install 'paceline[watch]'"
        ) from error
    from paceline.watch.run_collection import RunCollection

    chosen = _existing_folders(folders)
    token = token or secrets.token_urlsafe(12)
    with _listen(host, port) as listener:
        name, number = listener.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        print_plain(f"watching {', '.join(map(str, chosen))} at http://{shown}:{number}/?token={token}")
        if not _is_loopback(name):
            print_plain("other hosts reach this page; the link is not encrypted", error_output())
        sys.stdout.flush()
        PageServer(RunCollection(chosen), token).run(sockets=[listener])


def top(
    folders: Folders = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once and exit.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time between two looks.")] = 1.0,
) -> None:
    """Show a live table of runs and their ranks in the terminal, until Ctrl-C."""
    from paceline.watch.run_collection import RunCollection

    runs = RunCollection(_existing_folders(folders))
    runs.read_all()
    if as_json:
        print_json(runs.summaries())
        return
    from rich.live import Live

    console = output()
    if once or not console.is_terminal:
        console.print(render_table(runs.summaries()))
        return
    with Live(render_table(runs.summaries()), console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(seconds)
                runs.read_all()
                live.update(render_table(runs.summaries()), refresh=True)
        except KeyboardInterrupt:
            return


def _existing_folders(folders: list[Path] | None) -> list[Path]:
    """Return the folders to look into; one that the user names has to exist.

    Raises:
        DataError: one of them does not exist.
    """
    from paceline.report.run_files import RUNS

    for folder in folders or []:
        if not folder.is_dir():
            raise DataError(
                f"the folder '{folder}' does not exist",
                next_step="runs are in runs/ of the folder in which they were started",
            )
    return folders or [RUNS]


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens.

    Raises:
        DataError: it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (DEFAULT_PORT, 0) if port is None else (port,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(512)
        except OSError as error:
            listener.close()
            problem = error
        else:
            return listener
    raise DataError(
        f"cannot listen at {host}, port {port}: {problem.strerror or problem}",
        next_step="choose another --port, or --port 0 for any that is free",
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "red", "stopped": "yellow"}
_OPERATION_SECONDS = 2.0  # an operation that lasts longer is shown with its time


def render_table(states: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of some states of runs, see `RunWatch.state`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    table.add_column("status", no_wrap=True)
    ranks = [_rank_rows(state) for state in states]
    # On a narrow terminal, columns that would be empty make the others too narrow to read.
    of_ranks = ("data", "comp", "wait", "peak") if any(ranks) else ()
    for name in ("step", "loss", "speed", "round", *of_ranks):
        table.add_column(name, justify="right", no_wrap=True)
    if of_ranks:
        table.add_column("now")
    for state, rows in zip(states, ranks, strict=True):
        table.add_row(*_run_cells(state))
        for cells in rows:
            table.add_row(*cells, style="dim")
    if not states:
        table.add_row("no runs yet")
    return table


def _run_cells(state: Mapping[str, Any]) -> list[str | Text]:
    from rich.text import Text

    from paceline.observe.terminal_text import escape_controls
    from paceline.report.number_format import format_duration

    status = state["status"]
    if state["is_silent"]:
        status = f"silent for {format_duration(state['silent_seconds'])}"
    speed, seconds = state["samples_per_second"], state["step_seconds"]
    return [
        escape_controls(state["name"]),
        Text(status, style=_STYLES.get(status, "yellow")),
        f"{state['steps_done']}/{state['num_steps']}",
        _format(state["loss"]),
        f"{_format(speed)}/s" if speed is not None else "",
        format_duration(seconds) if seconds is not None and math.isfinite(seconds) else "",
    ]


def _rank_rows(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the ranks of a run that has not ended; of a lost run, what its ranks did last."""
    if state["status"] not in ("running", "unknown", "lost"):
        return []
    operations = {operation["rank"]: operation for operation in state["operations"]}
    times = {rank["rank"]: rank for rank in state["ranks"]}
    shown = operations if state["status"] == "lost" else operations | times
    return [_rank_cells(rank, times.get(rank), operations.get(rank)) for rank in sorted(shown)]


def _rank_cells(rank: int, times: Mapping[str, Any] | None, operation: Mapping[str, Any] | None) -> list[str]:
    """Return the cells of a rank; one that hangs in its first steps has no times yet."""
    from paceline.observe.terminal_text import escape_controls
    from paceline.report.number_format import format_bytes, format_duration

    now = ""
    if operation is not None:
        seconds = time.time() - operation["since"]
        is_long = operation["alive"] is not False and seconds >= _OPERATION_SECONDS
        now = escape_controls(operation["text"]) + (f", for {format_duration(seconds)}" if is_long else "")
    if times is None:
        return [f"  rank {rank}", *[""] * 9, now]
    shares = times["shares"]
    compute = shares["forward"] + shares["backward"] + shares["optimizer"]
    return [
        f"  rank {rank}",
        "",
        str(times["step"] + 1),
        "",
        "",
        format_duration(times["round_seconds"]),
        f"{shares['data']:.0%}",
        f"{compute:.0%}",
        f"{shares['waiting']:.0%}",
        format_bytes(times["peak_bytes"]),
        now,
    ]


def _format(value: float | None) -> str:
    from paceline.report.number_format import format_number

    return "" if value is None else format_number(value) if math.isfinite(value) else str(value)
