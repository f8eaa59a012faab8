"""The executor that `--on` of `paceline tune` and `paceline client` names, and signals to what it runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from paceline.errors import RecipeError

if TYPE_CHECKING:
    from paceline.launch.executor import Executor

Engine = Literal["local", "slurm", "ray"]
_FREE_NODE_SECONDS = 600.0


def build_executor(engine: Engine, options: Sequence[str], flag: str) -> Executor:
    """Return the executor of an engine.

    Args:
        options: NAME=VALUE: wait=SECONDS for free nodes, address=HOST:PORT of Ray; of Slurm those of salloc.
        flag: the flag that passes them, for errors.
    Raises:
        RecipeError: the engine has no such option.
        PacelineError: its clients or its package are not installed.
    """
    from paceline.launch.executor import LocalExecutor, SlurmExecutor
    from paceline.launch.ray_executor import RayExecutor

    named = dict(text.lstrip("-").partition("=")[::2] for text in options)
    wait_seconds = float(named.pop("wait", _FREE_NODE_SECONDS))
    address = named.pop("address", "auto") if engine == "ray" else ""
    if named and engine != "slurm":
        raise RecipeError(
            f"{engine} has no option '{next(iter(named))}'",
            where=flag,
            next_step="wait=SECONDS, and for ray address=HOST:6379",
        )
    if engine == "slurm":
        return SlurmExecutor(named, wait_seconds)
    return RayExecutor(address, wait_seconds) if engine == "ray" else LocalExecutor()


@contextmanager
def signals_to(handle: Callable[[int], object]) -> Iterator[None]:
    """Call a function on SIGTERM and Ctrl-C during the block."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
