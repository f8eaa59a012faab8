"""Error feedback: the quantisation error of one rank by buffer, and the momentum that goes with it.

An error is added to the next values of the same buffer, and kept only once its step has been applied. Two
buffers of memory alternate, so that a step can be aborted and a steady step allocates nothing.
"""

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
    """The quantisation errors of this rank in one buffer.

    Args:
        sent: error of its own values, [P, part].
        owned: error of the sum of the part that it encoded for all, [part]; None where no sums are encoded.
        velocity: momentum of its own values where they have not been sent, [P, part]; None: no momentum.
        owned_memory: memory for `owned`, of an earlier step.
    """

    sent: Tensor
    owned: Tensor | None = None
    velocity: Tensor | None = None
    owned_memory: Tensor | None = None

    def flats(self, num_values: int, rank: int) -> dict[str, Tensor]:
        """Return the errors in the layout of the buffer, [n]; `rank` encoded the sum of its part."""
        flats = {"sent": self.sent.reshape(-1)[:num_values]}
        if self.velocity is not None:
            flats["velocity"] = self.velocity.reshape(-1)[:num_values]
        if self.owned is not None:
            all_rows = torch.zeros_like(self.sent)
            all_rows[rank] = self.owned
            flats["owned"] = all_rows.reshape(-1)[:num_values]
        return flats

    def recycle(self) -> ErrorFeedback:
        """Return this object, whose memory may be used for another step."""
        if self.owned is not None:
            self.owned_memory, self.owned = self.owned, None
        return self

    def add(self, x: Tensor, before: ErrorFeedback | None, momentum: float, some: slice) -> Tensor:
        """Write the values to send into `sent`, and return them: `x`, or its velocity, plus the error of the
        step before.

        Args:
            some: columns to write; all of them, if there is momentum.

        Source: Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887, section 3.1 (momentum
            correction): velocities
        are accumulated, not gradients, so that values that are sent late have their momentum.
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
        """Subtract the decoded values of a row from `sent`; velocity restarts where they are not zero
        (section 3.2).
        """
        zero_non_finite(self.sent[row, some].sub_(decoded))
        if self.velocity is not None:
            # A value that was sent takes its momentum with it; the velocity starts again from zero.
            was_sent = workspace.take("lost.sent", decoded.shape, torch.bool, decoded.device)
            torch.ne(decoded, 0, out=was_sent)
            zero_non_finite(self.velocity[row, some].masked_fill_(was_sent, 0.0))

    def zero_padding(self, num_values: int, rank: int) -> None:
        """Set the errors after the first `num_values` to zero, because padding has no error."""
        for x in (self.sent, self.velocity):
            if x is not None:
                x.view(-1)[num_values:].zero_()
        if self.owned is not None:
            self.owned[max(0, num_values - rank * self.owned.numel()) :].zero_()

    def restore(self, before: ErrorFeedback | None, rows: Tensor, rank: int) -> None:
        """Go back to the errors before this step at some positions, bool [P, part]; `rank` encoded the sum of
        its part.

        Where it sent its error of the sum without encoding (`owned` is None now), it has that error again,
        too.
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
        """Set the error of the sum of some columns of this rank's part: `total` less its decoded values."""
        width = self.sent.shape[1]
        if (
            self.owned_memory is None
            or self.owned_memory.numel() != width
            or self.owned_memory.dtype != total.dtype
        ):
            # Allocated once for each width and dtype.
            self.owned_memory = total.new_empty(width)
        zero_non_finite(torch.sub(total, decoded, out=self.owned_memory[some]))
        self.owned = self.owned_memory


class ErrorFeedbackBuffers:
    """An `ErrorFeedbackStore` of quantisation errors by buffer.

    Args:
        kept: errors of the last step that was applied.
        pending: errors of the present step.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.kept: dict[str, ErrorFeedback] = {}
        self.pending: dict[str, ErrorFeedback] = {}
        # Memory of the step before the last, used again by the next one.
        self._spare: dict[str, ErrorFeedback] = {}

    def open(self, key: str, like: Tensor, width: int) -> None:
        """Prepare memory for the errors of a buffer in this step.

        Args:
            like: a tensor of their dtype.
            width: width of a rank's part.
        """
        feedback, shape = self._spare.pop(key, None), (self._group.size, width)
        if feedback is None or feedback.sent.shape != shape or feedback.sent.dtype != like.dtype:
            feedback = ErrorFeedback(like.new_empty(shape))
        self.pending[key] = feedback.recycle()

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """Ignore matrices: a codec takes rows as they are."""

    def restore(self, key: str, places: Tensor) -> None:
        if key in self.pending:
            rows = pad_to_rows(places, self._group.size)
            self.pending[key].restore(self.kept.get(key), rows, self._group.rank)

    def commit(self, keys: Collection[str] | None = None) -> None:
        done = [*self.pending] if keys is None else [key for key in keys if key in self.pending]
        # The errors before this step are not needed any more; the next step uses their memory.
        self._spare |= {key: self.kept[key] for key in done if key in self.kept}
        self.kept |= {key: self.pending.pop(key) for key in done}

    def abort(self) -> None:
        """Drop the errors of the present step."""
        self._spare |= self.pending
        self.pending = {}

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        feedback = self.pending.get(key, self.kept.get(key))
        return {} if feedback is None else feedback.flats(num_values, self._group.rank)

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """Continue from these errors; this rank sends those of sums whose parts other ranks have now."""
        size, rank, velocity = self._group.size, self._group.rank, flats.get("velocity")
        sent, owned = pad_to_rows(flats["sent"], size), None
        if "owned" in flats:
            sums = pad_to_rows(flats["owned"], size).clone()
            owned = sums[rank].clone()
            # This rank keeps the error of the part that it sums now; the rest it adds to what it sends.
            sums[rank] = 0.0
            sent = sent + sums if bool(sums.any()) else sent
        self.kept[key] = ErrorFeedback(sent, owned, None if velocity is None else pad_to_rows(velocity, size))

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        for feedback in [self.kept[key] for key in keys if key in self.kept]:
            for x in (feedback.sent, feedback.owned, feedback.velocity):
                if x is not None:
                    x.mul_(factor)

    def clear(self, key: str) -> None:
        self.kept.pop(key, None)
        self.pending.pop(key, None)


def zero_non_finite(x: Tensor) -> Tensor:
    """Set values that are not finite to zero, in place: an overflow is seen in this step, and must not
    stay.
    """
    return x.nan_to_num_(0.0, 0.0, 0.0)


def restore_where(x: Tensor, before: Tensor | None, places: Tensor) -> None:
    """Set some positions of `x` to the values of `before`; None: to zero."""
    if before is None:
        x.masked_fill_(places, 0.0)
    else:
        torch.where(places, before, x, out=x)
