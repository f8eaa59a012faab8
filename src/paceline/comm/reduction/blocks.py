"""Memory that buckets take in turn, so that a steady step allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.comm.collectives.collective import Arriving
from paceline.comm.workspace import Workspace

UNDER_WAY = 2
"""Scatters, and gathers after an update, at a time."""


def moving(number: int, name: str = "") -> str:
    """The name of memory that gradients leave through, and after an update parameters come through."""
    return f"{name}moving.{number}"


def scatterer_name(number: int) -> str:
    """In front of the names of its memory: what the first leaves is that in which parameters come."""
    return f"{number}/" if number else ""


class Blocks:
    """Pieces of memory: a few stay, each as large as the largest bucket of its dtype.

    Whoever finds none free gets one of the size it asks for, which goes when it is given back.

    Args:
        sizes: values of the largest bucket, by dtype.
        device: where the memory lies.
        num_kept: how many of a dtype stay.
        workspace: from which these are, as `moving` names them; others may use them between two steps.
        name: tells them from those of others that are used meanwhile.
    """

    def __init__(
        self,
        sizes: Mapping[torch.dtype, int],
        device: torch.device,
        num_kept: int,
        workspace: Workspace,
        name: str,
    ) -> None:
        self._sizes, self._device, self._num_kept = sizes, device, num_kept
        self._workspace, self._name = workspace, name
        self.memory: dict[int, Tensor] = {}
        self._kept: dict[int, torch.dtype] = {}
        self._free: list[int] = []
        self._next = 0

    @property
    def passing_bytes(self) -> int:
        """Of those that somebody has, and that do not stay."""
        return sum(x.nbytes for number, x in self.memory.items() if number not in self._kept)

    @property
    def kept(self) -> list[Tensor]:
        """Those that stay."""
        return [self.memory[number] for number in self._kept]

    def take(self, dtype: torch.dtype, num_values: int) -> int:
        """The number of a block that nobody has; its values are whatever was left in it."""
        for number in self._free:
            if self._kept[number] == dtype:
                self._free.remove(number)
                return number
        number, self._next = self._next, self._next + 1
        place = [*self._kept.values()].count(dtype)
        if place < self._num_kept:
            self._kept[number], size = dtype, (self._sizes[dtype],)
            self.memory[number] = self._workspace.take(moving(place, self._name), size, dtype, self._device)
        else:
            self.memory[number] = torch.empty(num_values, dtype=dtype, device=self._device)
        return number

    def arriving(self, rows: Tensor, turn: int) -> Arriving:
        """Memory for what other ranks send of rows [P, n]; where blocks stay, one of each turn is in use."""
        num_others, width = len(rows) - 1, rows.shape[1]
        if not self._num_kept:
            return lambda: rows.new_empty(num_others, width)
        name, room = f"{self._name}arriving.{turn}", self._sizes[rows.dtype] // len(rows) * num_others
        size, where = (num_others, width), self._device
        return lambda: self._workspace.take(name, size, rows.dtype, where, room=room)

    def give(self, number: int) -> bool:
        """It may be taken again, if it stays; whether it does."""
        if number in self._kept:
            self._free.append(number)
            return True
        del self.memory[number]
        return False

    def give_all(self) -> None:
        """Nobody has any."""
        self.memory = {number: self.memory[number] for number in self._kept}
        self._free = [*self._kept]
