"""Buffers that forward and backward change, such as the running statistics of BatchNorm.

Every micro-batch of a step starts from the buffers before the step, and the buffers after it are those plus
the mean change over all micro-batches of all ranks. So they depend on the virtual shards, never on the world
size, and the sum can be taken in any order. Integer buffers (counters) are rounded. A task may say otherwise
by name (`set_buffer_reductions`): the sum of all changes in place of their mean, or that of the first virtual shard only.

Invariant: between steps, buffers are equal on all ranks that hold them. Non-persistent buffers (masks) are
not touched. A buffer on `meta` is another rank's: it has a place in the sums, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_REDUCTIONS_ATTRIBUTE = "_paceline_buffers"


def set_buffer_reductions(model: nn.Module, buffer_reductions: Mapping[str, str]) -> None:
    """Say how changes of buffers come together; copies of the modules, and parts of the model, know it too.

    Args:
        buffer_reductions: by name of the buffer: "mean", "sum" or "first".
    """
    for name, how in buffer_reductions.items():
        module, own = _owner_and_name(model, name)
        module.__dict__.setdefault(_REDUCTIONS_ATTRIBUTE, {})[own] = how


def _reduction_of(module: nn.Module, name: str) -> str:
    found: str = module.__dict__.get(_REDUCTIONS_ATTRIBUTE, {}).get(name, "mean")
    return found


class MicroBatchBuffers:
    """The persistent buffers of one model, around the micro-batches of a step.

    Args:
        reports: whether this rank adds its changes to the sums; of ranks that compute the same, one does.

    Attributes:
        names: of the buffers.
    """

    def __init__(self, model: nn.Module, *, reports: bool = True) -> None:
        self._reports = reports
        state = set(model.state_dict(keep_vars=True).keys())
        names = [name for name, _ in model.named_buffers() if name in state]
        self.names, self._places = names, [_owner_and_name(model, name) for name in names]
        self._buffer_reductions = [_reduction_of(*place) for place in self._places]
        self._base = self._copies()
        self._changes: list[Tensor] = []
        self._passed: dict[tuple[int, int], Tensor] = {}
        self._swapped_out: list[Tensor] = []
        self._nothing = torch.zeros(0, dtype=torch.float64)

    @property
    def num_values(self) -> int:
        """Total number of values: what a tally carries for them."""
        return sum(_view_as_real(base).numel() for base in self._base)

    def begin_step(self) -> None:
        """Remember the values before the step."""
        if self._places:
            self._base = self._copies()
            self._changes, self._passed = [], {}

    def end_micro_batch(self) -> None:
        """Note this micro-batch's change, and put the values before the step back."""
        if self._places:
            if self._reports:
                self._changes.append(self.change_since(self._base))
            self._restore()

    def abort_step(self) -> None:
        """Put the values before the step back, whatever a forward has done to them since."""
        for (module, name), own in zip(self._places, self._swapped_out, strict=False):
            module._buffers[name] = own
        if self._places:
            self._restore()

    def lend(self, held: Sequence[Tensor] | None = None) -> None:
        """Let the next forward or backward change other tensors, since micro-batches take turns.

        Args:
            held: what the forward of the same micro-batch left, for its backward; a forward gets copies.
        """
        self._swapped_out = self._now()
        for i, ((module, name), own) in enumerate(zip(self._places, self._swapped_out, strict=True)):
            module._buffers[name] = own.clone() if held is None else held[i]

    def take_back(self, micro_batch: int, chunk: int, *, counts: bool = True) -> list[Tensor]:
        """Note what a micro-batch has changed so far in a chunk of the model, and put the own buffers back.

        Args:
            counts: note it; a part of a backward that is done a second time does not count.
        Returns:
            What was lent, as it was left.
        """
        left = self._now()
        if self._places and self._reports and counts:
            self._passed[micro_batch, chunk] = self.change_since(self._base)
        for (module, name), own in zip(self._places, self._swapped_out, strict=True):
            module._buffers[name] = own
        return left

    @property
    def change(self) -> Tensor:
        """Sum of the changes that this rank reports, float64 [num_values]."""
        return self.added(self.changes)

    def added(self, changes: Sequence[Tensor]) -> Tensor:
        """The sum of some changes, float64 [num_values]."""
        if not self._places:
            return self._nothing  # the same in every step: nobody writes to what has no values
        return sum(changes, start=self._no_change())

    @property
    def changes(self) -> list[Tensor]:
        """The changes of this rank's micro-batches, one after another, float64 [num_values] each."""
        passed = dict[int, Tensor]()
        for (micro_batch, _), change in sorted(self._passed.items(), key=lambda item: item[0]):
            passed[micro_batch] = passed[micro_batch] + change if micro_batch in passed else change
        return [*self._changes, *passed.values()]

    @property
    def changed(self) -> list[str]:
        """Names of the buffers of which this rank reports a change."""
        parts = self.change.split([_view_as_real(base).numel() for base in self._base]) if self._base else ()
        return [name for name, part in zip(self.names, parts, strict=True) if bool(part.any())]

    def changes_of(self, shards: Sequence[int]) -> list[Tensor]:
        """As `changes`, and of buffers that follow the first shard nothing of any other.

        Args:
            shards: the virtual shards of this rank's micro-batches, in the same order.
        """
        changes = self.changes if self._places else []
        if not changes or "first" not in self._buffer_reductions:
            return changes
        sizes = [_view_as_real(base).numel() for base in self._base]
        follows = [
            torch.full((n,), how != "first") for n, how in zip(sizes, self._buffer_reductions, strict=True)
        ]
        counts = torch.cat(follows).to(changes[0].device)
        return [
            change if shard == 0 else torch.where(counts, change, 0.0)
            for change, shard in zip(changes, shards, strict=True)
        ]

    def append_changes(self, others: MicroBatchBuffers) -> None:
        """Note what the micro-batches of a copy have changed."""
        self._changes += others.changes

    def reorder(self, places: Sequence[int]) -> None:
        """Put the changes into another order: first the one at the first of these places."""
        if self._changes:
            self._changes = [self._changes[place] for place in places]

    def sum_changes_of(self, parts: Sequence[MicroBatchBuffers]) -> None:
        """Note what the parts of the model have changed in the same micro-batches, each its own buffers."""
        self._changes = [
            sum(micro_batch[1:], start=micro_batch[0])
            for micro_batch in zip(*(p.changes for p in parts), strict=True)
        ]

    def end_step(self, change: Tensor, micro_batches: float) -> None:
        """Apply the mean change, or what the task says; a value that no micro-batch changed keeps its bits.

        Args:
            change: summed over all micro-batches of all ranks, float64 [num_values].
            micro_batches: how many micro-batches that is.
        """
        if not (self._places and micro_batches):
            return
        pieces = change.split([_view_as_real(base).numel() for base in self._base])
        for now, base, piece, how in zip(
            self._now(), self._base, pieces, self._buffer_reductions, strict=True
        ):
            if not now.is_meta:
                moved = piece / micro_batches if how == "mean" else piece
                _apply_change(_view_as_real(now), _view_as_real(base), moved.to(now.device))

    def values(self) -> list[Tensor]:
        """Copies of the buffers as they are."""
        return self._copies()

    def change_since(self, before: list[Tensor]) -> Tensor:
        """The change since earlier `values`, float64 [num_values]."""
        changes = [_difference(now, base) for now, base in zip(self._now(), before, strict=True)]
        device = self._no_change().device
        return torch.cat([change.to(device) for change in changes]) if changes else self._no_change()

    def weighted_change_since(self, before: list[Tensor], micro_batches: float) -> Tensor:
        """The change since earlier `values` as replicas that were alone add it up, float64 [num_values].

        What a mean is meant of is weighed by this replica's micro-batches; the first shard is one replica's.
        """
        parts = self.change_since(before).split([_view_as_real(base).numel() for base in self._base] or [0])
        pairs = zip(parts, self._buffer_reductions or ["mean"], strict=True)
        return torch.cat([part * micro_batches if how == "mean" else part for part, how in pairs])

    def reset(self, before: list[Tensor]) -> None:
        """Restore earlier `values`, and start the step from them."""
        self._base = before
        if self._places:
            self._restore()

    def _now(self) -> list[Tensor]:
        """The buffers as the modules hold them now: a forward may have replaced one."""
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]

    def _copies(self) -> list[Tensor]:
        return [b.detach().clone() for b in self._now()]

    def _no_change(self) -> Tensor:
        device = next((base.device for base in self._base if not base.is_meta), None)
        return torch.zeros(self.num_values, dtype=torch.float64, device=device)

    def _restore(self) -> None:
        with torch.no_grad():
            for now, base in zip(self._now(), self._base, strict=True):
                now.copy_(base)


def _owner_and_name(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, own_name = name.rpartition(".")
    return model.get_submodule(owner), own_name


def _view_as_real(b: Tensor) -> Tensor:
    """Complex values as pairs of real ones."""
    return torch.view_as_real(b) if b.is_complex() else b


def _difference(now: Tensor, base: Tensor) -> Tensor:
    """now - base in float64 [numel]; 0 where they are equal, also for infinities and large integers."""
    a, b = _view_as_real(now.detach()), _view_as_real(base)
    if a.is_meta:
        return torch.zeros(a.numel(), dtype=torch.float64)
    return torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64)).reshape(-1)


def _apply_change(now: Tensor, base: Tensor, change: Tensor) -> None:
    """now <- base + change, in base's type; integers are rounded."""
    change = change.view_as(base)
    moved = base.to(torch.float64) + change
    moved = moved if base.dtype.is_floating_point else moved.round()
    with torch.no_grad():
        now.copy_(torch.where(change == 0, base, moved.to(base.dtype)))
