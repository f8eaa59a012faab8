"""Buffers that forward and backward change, such as the running statistics of BatchNorm.

Every micro-batch of a step starts from the buffers before the step, and the buffers after the step are those
plus the mean change over all micro-batches of all ranks. So they depend on the virtual shards and never on
the world size, and the sum can be taken in any order. Integer buffers (counters) are rounded. A task may
choose another reduction by name (`set_buffer_reductions`): the sum of all changes, the change of the first
virtual shard only, a moving average, or a function of the other buffers of the module.

A moving average b <- d b + (1 - d) s, where s is a sum over samples, changes in micro-batch k by
(1 - d)(s_k - b). With the sum of s over all K micro-batches it changes by the sum of these changes plus
(K - 1)(1 - d) b, which needs no more communication.

Invariant: between steps, buffers are equal on all ranks that hold them. Non-persistent buffers (masks) are
not touched. A buffer on `meta` belongs to another rank: it takes space in the sums and is never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.task import BufferRule, moving_average_decay

_REDUCTIONS_ATTRIBUTE = "_paceline_buffers"


def set_buffer_reductions(model: nn.Module, buffer_reductions: Mapping[str, BufferRule]) -> None:
    """Set how the changes of buffers are reduced.

    Copies of the modules and parts of the model keep the setting.

    Args:
        buffer_reductions: by name of the buffer; see `Task.buffers`.
    """
    for name, reduction in buffer_reductions.items():
        module, buffer_name = _owner_and_name(model, name)
        module.__dict__.setdefault(_REDUCTIONS_ATTRIBUTE, {})[buffer_name] = reduction


def _reduction_of(module: nn.Module, name: str) -> BufferRule:
    reduction: BufferRule = module.__dict__.get(_REDUCTIONS_ATTRIBUTE, {}).get(name, "mean")
    return reduction


def _is_weighted(reduction: BufferRule) -> bool:
    """Return whether replicas that trained alone are averaged by their numbers of micro-batches."""
    return reduction not in ("sum", "first")


class MicroBatchBuffers:
    """Persistent buffers of one model, around the micro-batches of a step.

    Args:
        reports: whether this rank adds its changes to the sums; of ranks that compute the same, one does.

    Attributes:
        names: of the buffers.
    """

    def __init__(self, model: nn.Module, *, reports: bool = True) -> None:
        self._reports = reports
        # named_buffers yields masks as well; state_dict has the persistent buffers only.
        state = set(model.state_dict(keep_vars=True).keys())
        names = [name for name, _ in model.named_buffers() if name in state]
        self.names, self._places = names, [_owner_and_name(model, name) for name in names]
        self._buffer_reductions = [_reduction_of(*owner) for owner in self._places]
        self._base, self._is_kept = self._copies(), False
        self._changes: list[Tensor] = []
        self._passed: dict[tuple[int, int], Tensor] = {}
        self._swapped_out: list[Tensor] = []
        self._nothing = torch.zeros(0, dtype=torch.float64)

    @property
    def num_values(self) -> int:
        """Total number of values, which is how many a tally carries for them."""
        return sum(_view_as_real(base).numel() for base in self._base)

    def begin_step(self) -> None:
        """Save the values before the step."""
        self._is_kept = False
        if self._places:
            self._base = self._copies()
            self._changes, self._passed = [], {}

    def end_micro_batch(self) -> None:
        """Record this micro-batch's change and restore the values from before the step."""
        if self._places:
            if self._reports:
                self._changes.append(self.change_since(self._base))
            self._restore()

    def keep_step(self) -> None:
        """Keep the values of a step that all ranks have completed: nothing restores those before it."""
        self._is_kept = True

    def abort_step(self) -> None:
        """Restore the values from before the step, whatever a forward has changed since.

        After `keep_step` they stay as they are.
        """
        # An aborted forward may have left the swapped-in copies in the modules.
        for (module, name), original in zip(self._places, self._swapped_out, strict=False):
            module._buffers[name] = original
        if self._places and not self._is_kept:
            self._restore()

    def swap_in(self, held: Sequence[Tensor] | None = None) -> None:
        """Put the buffers of another micro-batch into the modules, for its next forward or backward.

        Args:
            held: the buffers that the forward of the same micro-batch left, for its backward; a forward gets
                copies.
        """
        self._swapped_out = self._current()
        for i, ((module, name), original) in enumerate(zip(self._places, self._swapped_out, strict=True)):
            module._buffers[name] = original.clone() if held is None else held[i]

    def swap_out(self, micro_batch: int, chunk: int, *, counts: bool = True) -> list[Tensor]:
        """Record how a micro-batch has changed the buffers of a chunk, and put the original buffers back.

        Args:
            counts: whether to record it; False for the part of a backward pass that is run a second time.
        Returns:
            The buffers that were swapped in, as they are now.
        """
        buffers = self._current()
        if self._places and self._reports and counts:
            # A backward replaces the entry of its forward, since recomputation may change a buffer further.
            self._passed[micro_batch, chunk] = self.change_since(self._base)
        for (module, name), original in zip(self._places, self._swapped_out, strict=True):
            module._buffers[name] = original
        return buffers

    @property
    def change(self) -> Tensor:
        """Sum of the changes that this rank reports, float64 [num_values]."""
        return self.sum_changes(self.changes)

    def sum_changes(self, changes: Sequence[Tensor]) -> Tensor:
        """Return the sum of some changes, float64 [num_values]."""
        if not self._places:
            # One empty tensor for all steps: nothing can write to a tensor without values.
            return self._nothing
        return sum(changes, start=self._no_change())

    @property
    def changes(self) -> list[Tensor]:
        """Changes of this rank's micro-batches, one after another, float64 [num_values] each."""
        by_micro_batch = dict[int, Tensor]()
        # Sorted, so that the order of a schedule does not change the order of additions.
        for (micro_batch, _), change in sorted(self._passed.items(), key=lambda item: item[0]):
            by_micro_batch[micro_batch] = (
                by_micro_batch[micro_batch] + change if micro_batch in by_micro_batch else change
            )
        return [*self._changes, *by_micro_batch.values()]

    @property
    def changed(self) -> list[str]:
        """Names of the buffers of which this rank reports a change."""
        slices = self.change.split([_view_as_real(base).numel() for base in self._base]) if self._base else ()
        return [name for name, change in zip(self.names, slices, strict=True) if bool(change.any())]

    def changes_of(self, shards: Sequence[int]) -> list[Tensor]:
        """Return `changes`, with zeros for buffers that follow the first shard in all other shards.

        Args:
            shards: virtual shards of this rank's micro-batches, in the same order.
        """
        changes = self.changes if self._places else []
        if not changes or "first" not in self._buffer_reductions:
            return changes
        sizes = [_view_as_real(base).numel() for base in self._base]
        masks = [
            torch.full((n,), reduction != "first")
            for n, reduction in zip(sizes, self._buffer_reductions, strict=True)
        ]
        counts = torch.cat(masks).to(changes[0].device)
        return [
            change if shard == 0 else torch.where(counts, change, 0.0)
            for change, shard in zip(changes, shards, strict=True)
        ]

    def append_changes(self, others: MicroBatchBuffers) -> None:
        """Append what the micro-batches of a copy have changed."""
        self._changes += others.changes

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the changes: the new i-th is the old one at `indices[i]`."""
        if self._changes:
            self._changes = [self._changes[index] for index in indices]

    def sum_changes_of(self, stages: Sequence[MicroBatchBuffers]) -> None:
        """Record the sum of what stages have changed in the same micro-batches, each in its own buffers."""
        self._changes = [
            sum(micro_batch[1:], start=micro_batch[0])
            for micro_batch in zip(*(stage.changes for stage in stages), strict=True)
        ]

    def end_step(self, change: Tensor, micro_batches: float, *, of_rounds: bool = False) -> None:
        """Apply the reduced change; a value that no micro-batch changed keeps its bits.

        Args:
            change: summed over all micro-batches of all ranks, float64 [num_values].
            micro_batches: number of these micro-batches.
            of_rounds: the changes are those of replicas that trained alone, from `weighted_change_since`.
        """
        if not (self._places and micro_batches):
            return
        pieces = change.split([_view_as_real(base).numel() for base in self._base])
        for buffer, base, piece, reduction in zip(
            self._current(), self._base, pieces, self._buffer_reductions, strict=True
        ):
            if not buffer.is_meta:
                is_mean = _is_weighted(reduction) if of_rounds else reduction == "mean"
                reduced = (piece / micro_batches if is_mean else piece).to(buffer.device)
                start = _view_as_real(base)
                decay = None if is_mean else moving_average_decay(reduction)
                if decay is not None and bool(reduced.any()):
                    weight = (micro_batches - 1) * (1 - decay)
                    reduced = reduced + weight * start.to(torch.float64).reshape(-1)
                _apply_change(_view_as_real(buffer), start, reduced)
        self._derive(pieces)

    def _derive(self, changes: Sequence[Tensor]) -> None:
        """Compute the buffers that are functions of others, if a micro-batch has changed them."""
        for (module, name), change, rule in zip(self._places, changes, self._buffer_reductions, strict=True):
            buffer = module._buffers[name]
            if callable(rule) and buffer is not None and not buffer.is_meta and bool(change.any()):
                with torch.no_grad():
                    buffer.copy_(rule(module))

    def values(self) -> list[Tensor]:
        """Return copies of the buffers."""
        return self._copies()

    def change_since(self, before: list[Tensor]) -> Tensor:
        """Return the change since earlier `values`, float64 [num_values]."""
        changes = [_difference(buffer, base) for buffer, base in zip(self._current(), before, strict=True)]
        device = self._no_change().device
        return torch.cat([change.to(device) for change in changes]) if changes else self._no_change()

    def weighted_change_since(self, before: list[Tensor], micro_batches: float) -> Tensor:
        """Return the change since earlier `values`, weighted for the sum over replicas that trained alone.

        Buffers that are averaged are weighted by the number of this replica's micro-batches; all others are
        not.

        Returns:
            Float64 [num_values].
        """
        changes = self.change_since(before).split([_view_as_real(base).numel() for base in self._base] or [0])
        rules: Sequence[BufferRule] = self._buffer_reductions or ["mean"]
        pairs = zip(changes, rules, strict=True)
        return torch.cat(
            [change * micro_batches if _is_weighted(reduction) else change for change, reduction in pairs]
        )

    def reset(self, before: list[Tensor]) -> None:
        """Restore earlier `values` and start the step from them."""
        self._base, self._is_kept = before, False
        if self._places:
            self._restore()

    def _current(self) -> list[Tensor]:
        """Return the buffers that the modules hold now; a forward may have replaced one."""
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]

    def _copies(self) -> list[Tensor]:
        return [b.detach().clone() for b in self._current()]

    def _no_change(self) -> Tensor:
        device = next((base.device for base in self._base if not base.is_meta), None)
        return torch.zeros(self.num_values, dtype=torch.float64, device=device)

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, base in zip(self._current(), self._base, strict=True):
                buffer.copy_(base)


def _owner_and_name(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, own_name = name.rpartition(".")
    return model.get_submodule(owner), own_name


def _view_as_real(b: Tensor) -> Tensor:
    """Return complex values as pairs of real values."""
    return torch.view_as_real(b) if b.is_complex() else b


def _difference(buffer: Tensor, base: Tensor) -> Tensor:
    """Return buffer - base, float64 [numel]; 0 where both are equal, also if infinite or a large integer."""
    a, b = _view_as_real(buffer.detach()), _view_as_real(base)
    if a.is_meta:
        return torch.zeros(a.numel(), dtype=torch.float64)
    return torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64)).reshape(-1)


def _apply_change(buffer: Tensor, base: Tensor, change: Tensor) -> None:
    """Set the buffer to base + change in the dtype of base; integers are rounded."""
    change = change.view_as(base)
    values = base.to(torch.float64) + change
    values = values if base.dtype.is_floating_point else values.round()
    with torch.no_grad():
        # A round trip over float64 would change large integers, so unchanged values are copied.
        buffer.copy_(torch.where(change == 0, base, values.to(base.dtype)))
