"""What each host is told to run: the command of one machine, spread over the hosts. Pure.

`paceline train R -n 4` starts four processes on one machine; on four hosts the same four processes are one a
host. So -n counts all processes here, as a strategy's own count does, and every host gets its part with the
options that a real cluster's nodes are given. Any other command runs on every host as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.errors import RecipeError

_PORT = 29500  # in the first host's own network, so nobody else can have it
_JOBS = {("train",): False, ("verify",): False, ("run",): True, ("bench", "link"): False}
"""The commands that start a job; True: what follows the script belongs to the script."""
_PROCESSES = ("-n", "--processes")


def spread(command: Sequence[str], addresses: Sequence[str]) -> list[list[str]]:
    """The argument vector of each host, in the order of the addresses.

    Args:
        command: as a user types it on one machine.
        addresses: of the hosts; the job meets at the first.
    Raises:
        RecipeError: the processes cannot be shared out evenly, or the command is empty.
    """
    if not command:
        raise RecipeError(
            "there is no command to run", next_step="put it after --, for example -- paceline train RECIPE"
        )
    if command[0] != "paceline":
        return [list(command) for _ in addresses]
    base = [sys.executable, "-m", "paceline"]
    words = list(command[1:])
    name = next((name for name in _JOBS if tuple(words[: len(name)]) == name), None)
    if name is None:
        return [[*base, *words] for _ in addresses]
    own = _share_processes(words[len(name) :], len(addresses), script=_JOBS[name])
    meeting = ["--nodes", str(len(addresses)), "--rendezvous", f"{addresses[0]}:{_PORT}"]
    return [[*base, *name, *meeting, "--node-rank", str(i), *own] for i in range(len(addresses))]


def _share_processes(words: list[str], num_hosts: int, *, script: bool) -> list[str]:
    """The words with the number of processes of one host; without -n, what the command takes by itself."""
    place = 0
    while place < len(words):
        if words[place] in _PROCESSES and place + 1 < len(words):
            return [*words[: place + 1], str(_part(words[place + 1], num_hosts)), *words[place + 2 :]]
        if script and not words[place].startswith("--"):
            break  # the script, or -m
        place += 2 if script else 1
    return words


def _part(text: str, num_hosts: int) -> int:
    if not text.isdigit() or int(text) % num_hosts or int(text) == 0:
        raise RecipeError(
            f"-n {text} processes cannot be shared evenly by {num_hosts} hosts",
            next_step=f"-n counts the processes of all hosts: a multiple of {num_hosts}",
        )
    return int(text) // num_hosts
