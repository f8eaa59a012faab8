"""How many threads an operation runs on, and the reason for it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cores import Cores
from paceline.recipe import Recipe


class Threads(NamedTuple):
    """Intra-op threads of each process of this host, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"threads: {self.number}, as {self.reason}"


def share_of(cores: Cores, processes_here: int) -> int:
    """Of the cores, what each process of this host has."""
    return max(1, cores.number // processes_here)


def choose_threads(recipe: Recipe, processes_here: int, cores: Cores) -> Threads:
    """As many as the recipe says, or an equal share of the cores.

    Args:
        processes_here: of the run, on this host.
        cores: that they may use.
    """
    if recipe.reproducible:
        return Threads(1, "reproducible = true: their number changes the order of additions")
    if recipe.is_ordered:
        return Threads(1, "lanes have the cores")
    if recipe.runtime.threads:
        return Threads(recipe.runtime.threads, "runtime.threads says")
    if processes_here == 1:
        return Threads(cores.number, f"one process has {cores.reason}")
    return Threads(share_of(cores, processes_here), f"{processes_here} processes share {cores.reason}")


def crowded(threads: int, processes_here: int, cores: int) -> str:
    """By how much the threads of this host's processes are more than its cores; empty if they are not."""
    wanted = threads * processes_here
    if wanted <= cores:
        return ""
    return (
        f"runtime.threads = {threads} in {processes_here} processes is {wanted / cores:.1f} times the"
        f" {cores} cores here, so threads wait for each other; 0 shares the cores"
    )
