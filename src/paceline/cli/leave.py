"""`paceline leave`: take ranks out of a running job, for example before their host is shut down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import DataError, DeadlineError, StrategyError, format_count

if TYPE_CHECKING:
    from paceline.observe.rank_activity import RankOperation

_LOOK_SECONDS = 0.2
_AGREE_SECONDS = 5.0


def leave(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="Global rank. Repeatable.", show_default=False)
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="Host, all of whose ranks leave. Repeatable.", show_default=False),
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds to wait until they have left.")] = 120.0,
) -> None:
    """Let ranks of a running job leave it after their step; the others continue without them."""
    from paceline.observe.file_writing import explain_os_errors
    from paceline.observe.rank_activity import leave_request
    from paceline.report.run_files import resolve_run_folder

    folder = resolve_run_folder(run)
    present = _training_ranks(folder)
    seen = time.monotonic()
    # Ranks show nothing while they agree on their members, and do not end that at the same moment.
    while not _are_all(present) and time.monotonic() < seen + _AGREE_SECONDS:
        time.sleep(_LOOK_SECONDS)
        present = _training_ranks(folder)
    chosen = [one for one in present if one.rank in (ranks or ()) or one.host in (hosts or ())]
    _require_possible(folder, present, chosen)
    with explain_os_errors(folder):
        for one in chosen:
            leave_request(folder, one.host, one.pid).touch()
    expires = time.monotonic() + deadline
    leaving = {(one.host, one.pid) for one in chosen}
    while staying := leaving & {(one.host, one.pid) for one in _training_ranks(folder)}:
        if time.monotonic() > expires:
            for host, pid in staying:
                leave_request(folder, host, pid).unlink(missing_ok=True)
            raise DeadlineError(
                f"{format_count(len(staying), 'rank')} did not leave within {deadline:g} s",
                next_step=f"paceline explain {folder} shows what they do; or set a longer --deadline",
            )
        time.sleep(_LOOK_SECONDS)
    while len(_training_ranks(folder)) < len(present) - len(chosen) and time.monotonic() < expires:
        time.sleep(_LOOK_SECONDS)
    names = ", ".join(str(one.rank) for one in chosen)
    print_plain(f"left: rank {names}; {format_count(len(present) - len(chosen), 'rank')} continue")


def _training_ranks(folder: Path) -> list[RankOperation]:
    """Return the ranks of a run whose processes live, or may live on another host."""
    from paceline.observe.rank_activity import read_operations

    return [one for one in read_operations(folder) if one.alive is not False]


def _are_all(present: list[RankOperation]) -> bool:
    """Return whether these are all ranks of the job, as each of them sees it."""
    return bool(present) and {one.num_ranks for one in present} == {len(present)}


def _require_possible(folder: Path, present: list[RankOperation], chosen: list[RankOperation]) -> None:
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.recipe.recovery import recovery_of
    from paceline.report.run_files import RECIPE

    if not chosen:
        doing = ", ".join(f"{one.rank} ({one.host})" for one in present)
        raise DataError(
            f"no such rank trains in '{folder}' now; present: {doing or 'none'}",
            next_step="choose ranks with --rank, or hosts with --host",
        )
    recipe = load_recipe(folder / RECIPE)
    recovery = recovery_of(recipe)
    if recovery.kind != "in process":
        raise StrategyError(
            f"the job cannot continue without a rank: {recovery.reason}",
            next_step="stop it (SIGTERM saves its state) and continue with --resume RUN and another -n",
        )
    least = recipe.elastic.min_processes
    if len(present) - len(chosen) < least:
        raise StrategyError(
            f"{format_count(len(present) - len(chosen), 'rank')} would be left, at least {least} are needed",
            where="elastic.min_processes",
            next_step="let fewer ranks leave",
        )
