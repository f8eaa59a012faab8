"""What a run prints at its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from torch import nn

from paceline.report.folder import METRICS, REPORT
from paceline.training.loop import Result
from paceline.training.session import Session


def conclude(
    session: Session, result: Result, run_dir: Path, console: Console, whole: nn.Module | None
) -> None:
    """Print what came out, where it is, and how to go on.

    Args:
        whole: the whole model, if the task reports on it.
    """
    lines: list[str] = []
    if session.task.report is not None and result.evaluation is not None and whole is not None:
        found = result.evaluation
        values = {"loss": found.loss, "count": found.num_items, **found.metrics}
        lines += session.task.report(whole, values)
    resume = f"paceline train --resume {run_dir} -n {session.cluster.world_size}{_longer(session, result)}"
    if result.sha256 is not None:
        lines.append(f"state sha256: {result.sha256}")
    lines += [
        f"checkpoint: {result.checkpoint}",
        f"metrics:    {run_dir / METRICS}",
        f"report:     {run_dir / REPORT}",
        f"resume:     {resume}",
    ]
    for line in lines:
        plain_lines(console)(line)


def plain_lines(console: Console | None) -> Callable[[str], None]:
    """Prints a text as it is, never wrapped, coloured or read as markup; nothing without a console."""
    if console is None:
        return lambda text: None
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def _longer(session: Session, result: Result) -> str:
    """A run that has reached its end goes on only if it is made longer."""
    if result.stopped:
        return ""
    epochs = session.recipe.epochs
    return f" --set epochs={2 * epochs:g}" if epochs is not None else f" --set steps={2 * session.num_steps}"
