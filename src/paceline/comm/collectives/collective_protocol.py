"""The collective protocol: sums, gathers and broadcasts over one group, on some route and with some codec.

A route makes a collective (`comm.routes`); where a route allows it, a codec (`comm.codecs`) encodes what is
sent.
Invariant: the result of `wait` is equal on every rank that gets it.
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
"""A function that returns memory for received values; None: a collective takes its own."""


class ErrorFeedbackStore(Protocol):
    """The quantisation errors of a rank, by buffer, which are added to the next values of the same buffer.

    A side is a place where values are encoded: `sent` by the rank that has them, `owned` by the rank that
    sums them. Other sides are no errors: they are equal on all ranks (`factor`), and start again where the
    number of ranks changes.
    """

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """Set the positions of matrices in a buffer, before its first sum."""

    def commit(self, keys: Collection[str] | None = None) -> None:
        """Keep the errors of the present step for these buffers, as it was applied; None: for all."""

    def restore(self, key: str, places: Tensor) -> None:
        """Go back to the errors before this step at some positions of a buffer, bool [n]: what was sent there
        was dropped.
        """

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """Return the errors of a buffer by side, as long as the buffer; zeros where another rank encodes."""

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """Continue from these errors; the inverse of `residuals`."""

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """Multiply the errors of these buffers, between two steps."""

    def clear(self, key: str) -> None:
        """Set the errors of a buffer to zero."""


class Collective(Protocol):
    """Collectives of one group; `key` names the buffer, the same in every step."""

    @property
    def group(self) -> RankGroup:
        """The ranks that take part."""

    @property
    def feedback(self) -> ErrorFeedbackStore | None:
        """The quantisation errors; None: nothing is encoded."""

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """Allocate zeros [n] with the dtype and device of `like`, where sums of `key` cost least;
        collective.
        """

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Sum `x` [n] over the group, in place; the handle returns it."""

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum `x` [P, n]; the handle returns row `group.rank` of the sum, [n].

        The result may be that row of `x` itself, and is valid until `x` changes or the next sum of `key`.

        Args:
            arriving: returns memory [P - 1, n] for received rows, where the route can use it; all rows of `x`
                may be changed then.
        """

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """Collect `x` [n] of every rank; the handle returns [P, n]. Exact, whatever the codec.

        Args:
            out: where the rows are collected, contiguous; `x` may be this rank's row of it. None: new memory.
        """

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """Copy `x` of the group's rank `source` to all, in place; the handle returns `x`. Exact."""

    def abort(self) -> None:
        """Drop the present step, whose handles have all ended, with its quantisation errors."""


class AllToAllCollective(Collective, Protocol):
    """A collective that also exchanges messages of equal size, which a codec needs."""

    @property
    def net(self) -> Net:
        """This rank's net, which knows the step and has the ledger."""

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """Send row i of `x` [P, n] to rank i; the handle returns `out` [P, n], what each rank sent here.

        Both are contiguous. `tag`: 0 to 3, of exchanges that ranks may launch in different orders.
        """

    def in_any_order(self, x: Tensor) -> bool:
        """Return whether ranks may launch exchanges of `x` with different tags in different orders."""


class CodingCollective(Collective, Protocol):
    """A collective that encodes what it sends, on a thread of its own."""

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        """Return the number of values of a chunk of a buffer `x` [n], and of chunks in flight."""

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""


def wait_counter(ledger: ByteLedger, group_name: str, op: str | None = None) -> Callable[[str, float], None]:
    """Return a function that adds the seconds of a wait to a row of the ledger.

    Args:
        op: operation of the row; None: the one that was submitted.
    """

    def count(submitted_op: str, seconds: float) -> None:
        row = ledger.rows.get((op or submitted_op, group_name))
        # A sum over no values has no row.
        if row is not None:
            row.exposed_seconds += seconds

    return count


def pad_to_rows(x: Tensor, num_parts: int) -> Tensor:
    """Return [n] as [P, ceil(n / P)], padded with zeros."""
    width = -(-x.numel() // num_parts)
    out = x.new_zeros(num_parts * width)
    out[: x.numel()] = x
    return out.view(num_parts, width)
