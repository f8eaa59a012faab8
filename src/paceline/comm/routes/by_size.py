"""Every collective by the route that is best for its size."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.comm.collectives import Collective
from paceline.comm.collectives.collective import Arriving
from paceline.comm.handle import Handle
from paceline.comm.routes.forecast import Choice
from paceline.mesh import Group


class BySize:
    """Several paths of one group; operation and size of a buffer say which one it takes.

    Args:
        paths: by route, each on process groups of its own. The first carries what has no choice.
        choices: by operation, equal on every rank.
    Wire: that of the path.
    Exactness: that of rounding, as each path; equal bits on every rank.
    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH,
        section 6 (algorithms by message size).
    """

    feedback = None

    def __init__(self, paths: Mapping[str, Collective], choices: Mapping[str, Choice]) -> None:
        self._paths, self.choices = paths, choices
        self._first = next(iter(paths.values()))

    @property
    def group(self) -> Group:
        """See `Collective`."""
        return self._first.group

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return self._first.buffer(num_values, like, key)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._path("all_reduce", x).all_reduce(x, key)

    def reduce_scatter(self, x: Tensor, key: str, arriving: Arriving = None) -> Handle:
        """See `Collective`."""
        return self._path("reduce_scatter", x).reduce_scatter(x, key, arriving)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`."""
        return self._path("all_gather", x).all_gather(x, key, out)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self._path("broadcast", x).broadcast(x, key, source)

    def abort(self) -> None:
        """See `Collective`."""
        for path in self._paths.values():
            path.abort()

    def _path(self, op: str, x: Tensor) -> Collective:
        choice = self.choices.get(op)
        return self._first if choice is None else self._paths[choice.route(x.numel() * x.element_size())]
