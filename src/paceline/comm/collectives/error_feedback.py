"""What coding has lost of a buffer on one rank, and the momentum that goes with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.collectives.collective_protocol import pad_to_rows
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup


@dataclass
class ErrorFeedback:
    """What this rank's coding lost of one buffer.

    Args:
        sent: of its own values, [P, part].
        owned: of the sum of the part that it coded for all, [part]; None where nobody codes sums.
        velocity: momentum of its own values where they have not been sent, [P, part]; None: there is none.
        room: memory for `owned`, of an earlier step.
    """

    sent: Tensor
    owned: Tensor | None = None
    velocity: Tensor | None = None
    room: Tensor | None = None

    def flats(self, num_values: int, rank: int) -> dict[str, Tensor]:
        """All of it as the buffer lies, [n]; `rank` coded the sum of its part."""
        flats = {"sent": self.sent.reshape(-1)[:num_values]}
        if self.velocity is not None:
            flats["velocity"] = self.velocity.reshape(-1)[:num_values]
        if self.owned is not None:
            whole = torch.zeros_like(self.sent)
            whole[rank] = self.owned
            flats["owned"] = whole.reshape(-1)[:num_values]
        return flats

    def recycle(self) -> ErrorFeedback:
        """The same memory, for another step."""
        if self.owned is not None:
            self.room, self.owned = self.owned, None
        return self

    def add(self, x: Tensor, before: ErrorFeedback | None, momentum: float, some: slice) -> Tensor:
        """What is to be sent now of some columns, in `sent`: `x`, or its velocity, and what was lost before.

        Args:
            some: all of them, where there is momentum.

        Source: Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887, section 3.1 (momentum
        correction): velocities are accumulated, not gradients, so that what is sent late has its momentum.
        """
        if momentum:
            self.velocity = self._velocity(x, before, momentum)
            x = self.velocity
        sent = self.sent[:, some]
        return sent.copy_(x) if before is None else torch.add(x, before.sent[:, some], out=sent)

    def _velocity(self, x: Tensor, before: ErrorFeedback | None, momentum: float) -> Tensor:
        out = torch.empty_like(x) if self.velocity is None else self.velocity
        if before is None or before.velocity is None:
            return out.copy_(x)
        return torch.add(x, before.velocity, alpha=momentum, out=out)

    def subtract_sent(self, row: int, decoded: Tensor, workspace: Workspace, some: slice) -> None:
        """Columns of a row are sent as `decoded`; where they were, velocity begins anew (section 3.2)."""
        zero_non_finite(self.sent[row, some].sub_(decoded))
        if self.velocity is not None:
            was_sent = workspace.take("lost.sent", decoded.shape, torch.bool, decoded.device)
            torch.ne(decoded, 0, out=was_sent)
            zero_non_finite(self.velocity[row, some].masked_fill_(was_sent, 0.0))

    def zero_padding(self, num_values: int, rank: int) -> None:
        """The rows are filled up behind so many values, and of nothing nothing is lost."""
        for x in (self.sent, self.velocity):
            if x is not None:
                x.view(-1)[num_values:].zero_()
        if self.owned is not None:
            self.owned[max(0, num_values - rank * self.owned.numel()) :].zero_()

    def restore(self, before: ErrorFeedback | None, rows: Tensor, rank: int) -> None:
        """In some places, bool [P, part], go on from what was lost before; `rank` coded the sum of its part.

        Where it sent what it had lost of the sum as it was (`owned` is None now), that is lost again, too.
        """
        owned = None if before is None else before.owned
        restore_where(self.sent, None if before is None else before.sent, rows)
        if self.velocity is not None:
            restore_where(self.velocity, None if before is None else before.velocity, rows)
        if self.owned is None and owned is not None:
            self.owned = torch.zeros_like(owned)
        if self.owned is not None:
            restore_where(self.owned, owned, rows[rank])

    def subtract_sent_sum(self, total: Tensor, decoded: Tensor, some: slice) -> None:
        """The sum of some columns of the own part has been given to all as `decoded`."""
        width = self.sent.shape[1]
        if self.room is None or self.room.numel() != width or self.room.dtype != total.dtype:
            self.room = total.new_empty(width)
        zero_non_finite(torch.sub(total, decoded, out=self.room[some]))
        self.owned = self.room


class ErrorFeedbackBuffers:
    """What coding has lost, by buffer: a `ErrorFeedbackStore`.

    Args:
        kept: of the last step that was applied.
        pending: of the present one.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.kept: dict[str, ErrorFeedback] = {}
        self.pending: dict[str, ErrorFeedback] = {}
        self._spare: dict[str, ErrorFeedback] = {}  # memory of the step before the last

    def open(self, key: str, like: Tensor, width: int) -> None:
        """Memory for what a buffer loses in this step.

        Args:
            like: of its type.
            width: of a rank's part.
        """
        found, shape = self._spare.pop(key, None), (self._group.size, width)
        if found is None or found.sent.shape != shape or found.sent.dtype != like.dtype:
            found = ErrorFeedback(like.new_empty(shape))
        self.pending[key] = found.recycle()

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """See `ErrorFeedbackStore`; a codec takes rows as they are."""

    def restore(self, key: str, places: Tensor) -> None:
        """See `ErrorFeedbackStore`."""
        if key in self.pending:
            rows = pad_to_rows(places, self._group.size)
            self.pending[key].restore(self.kept.get(key), rows, self._group.rank)

    def commit(self, keys: Collection[str] | None = None) -> None:
        """See `ErrorFeedbackStore`."""
        done = [*self.pending] if keys is None else [key for key in keys if key in self.pending]
        self._spare |= {key: self.kept[key] for key in done if key in self.kept}
        self.kept |= {key: self.pending.pop(key) for key in done}

    def abort(self) -> None:
        """Forget what the present step has lost."""
        self._spare |= self.pending
        self.pending = {}

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `ErrorFeedbackStore`."""
        found = self.pending.get(key, self.kept.get(key))
        return {} if found is None else found.flats(num_values, self._group.rank)

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `ErrorFeedbackStore`; of a sum whose part lies elsewhere now, this rank sends what it owes itself."""
        size, mine, velocity = self._group.size, self._group.rank, flats.get("velocity")
        sent, owned = pad_to_rows(flats["sent"], size), None
        if "owned" in flats:
            sums = pad_to_rows(flats["owned"], size).clone()
            owned = sums[mine].clone()
            sums[mine] = 0.0
            sent = sent + sums if bool(sums.any()) else sent
        self.kept[key] = ErrorFeedback(sent, owned, None if velocity is None else pad_to_rows(velocity, size))

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """See `ErrorFeedbackStore`."""
        for one in [self.kept[key] for key in keys if key in self.kept]:
            for x in (one.sent, one.owned, one.velocity):
                if x is not None:
                    x.mul_(factor)

    def clear(self, key: str) -> None:
        """See `ErrorFeedbackStore`."""
        self.kept.pop(key, None)
        self.pending.pop(key, None)


def zero_non_finite(x: Tensor) -> Tensor:
    """An overflow is seen by all in this step, and must not stay."""
    return x.nan_to_num_(0.0, 0.0, 0.0)


def restore_where(x: Tensor, before: Tensor | None, places: Tensor) -> None:
    """In some places of `x` put what was there before; None: zeros."""
    if before is None:
        x.masked_fill_(places, 0.0)
    else:
        torch.where(places, before, x, out=x)
