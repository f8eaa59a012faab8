"""What a collective is: a group, the path on which values travel in it, and the form in which they do.

A route makes one (`comm.routes`); where a route can, a codec (`comm.codecs`) changes what it sends.
Invariant: what `wait` returns is equal on every rank that gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.handle import Handle
from paceline.comm.ledger import ByteLedger
from paceline.comm.net import Net
from paceline.job.mesh import RankGroup

ReceiveBuffer = Callable[[], Tensor] | None
"""Gives memory for what arrives; None: a collective takes its own."""


class ErrorFeedbackStore(Protocol):
    """What coding has lost, by buffer, to be sent with the next values of the same buffer.

    A side is a place where values are coded: `sent` by their rank, `owned` by who adds them up. Other sides
    are no losses: they are equal on all ranks (`factor`), and begin anew where the number of ranks changes.
    """

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """Where matrices lie in a buffer, before its first sum."""

    def commit(self, keys: Collection[str] | None = None) -> None:
        """The present step has been applied: keep what it has lost of these buffers; None: of all."""

    def restore(self, key: str, places: Tensor) -> None:
        """What was sent of some places of a buffer, bool [n], was dropped: what was lost there before, is."""

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """By side, what is lost of a buffer, as long as the buffer; zeros where another rank codes."""

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """Go on from these; the inverse of `lost`."""

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """Multiply what was lost of these buffers, between two steps."""

    def clear(self, key: str) -> None:
        """Nothing was lost of a buffer."""


class Collective(Protocol):
    """Collectives of one group; `key` names the buffer, the same in every step."""

    @property
    def group(self) -> RankGroup:
        """Who takes part."""

    @property
    def feedback(self) -> ErrorFeedbackStore | None:
        """What coding has lost; None: nothing is coded."""

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """Zeros [n] of the dtype and on the device of `like`, where sums of `key` cost least; collective."""

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Sum `x` [n] over the group, in place; the handle returns it."""

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum `x` [P, n]; the handle returns row `group.rank` of the sum, [n].

        It may be that row of `x` itself, and is good until `x` changes or the next sum of `key`.

        Args:
            arriving: gives memory [P - 1, n] for what others send, where the route can use it; all rows
                of `x` may be changed then.
        """

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """Collect `x` [n] of every rank; the handle returns [P, n]. Exact, whatever the codec.

        Args:
            out: where it is collected, contiguous; `x` may be this rank's row of it. None: memory of its own.
        """

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """Copy `x` of the group's rank `source` to all, in place; the handle returns `x`. Exact."""

    def abort(self) -> None:
        """Forget the present step, whose handles have all ended; also what its coding has lost."""


class AllToAllCollective(Collective, Protocol):
    """A collective that also carries messages of equal size, which a codec needs."""

    @property
    def net(self) -> Net:
        """This rank's end of the wires: says the step, and counts."""

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """Send row i of `x` [P, n] to rank i; the handle returns what each rank sent here, in `out` [P, n].

        Both are contiguous. `tag`: 0 to 3, of those that ranks may launch in different orders.
        """

    def in_any_order(self, x: Tensor) -> bool:
        """Whether ranks may launch exchanges of `x` that have different tags in different orders."""


class CodingCollective(Collective, Protocol):
    """A collective that codes, on a thread of its own."""

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        """How many values of a buffer `x` [n] are a stretch, and how many of these are under way."""

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""


def wait_counter(ledger: ByteLedger, group_name: str, op: str | None = None) -> Callable[[str, float], None]:
    """Return a function that adds the seconds that a caller waited to a row of the ledger.

    Args:
        op: the operation of that row; None: the one that was submitted.
    """

    def count(submitted_op: str, seconds: float) -> None:
        row = ledger.rows.get((op or submitted_op, group_name))
        if row is not None:  # a sum of nothing has no row
            row.exposed_seconds += seconds

    return count


def pad_to_rows(x: Tensor, num_parts: int) -> Tensor:
    """[n] as [P, ceil(n / P)], the end filled with zeros."""
    width = -(-x.numel() // num_parts)
    out = x.new_zeros(num_parts * width)
    out[: x.numel()] = x
    return out.view(num_parts, width)
