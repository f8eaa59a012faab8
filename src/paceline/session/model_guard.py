"""Guard of the model between steps: what callbacks and the user's code may change, and what they may not.

Between two steps a rank may hold only a part of the model. Invariant: a change there has the same effect
under every layout, or is an error. A parameter that was trained at the build may be frozen and trained
again; its flag is part of the state. Weights are written inside `Session.weights`; where a rank holds the
whole model, it may also write to them directly.

Undetected is a write to single values through `parameter.data`, which PyTorch does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.parallel.sharded_model import ShardedModel
from paceline.recipe.strategy import Strategy
from paceline.state.slot import TensorPiece
from paceline.sync.every_step import EveryStep
from paceline.sync.sync_rule import SyncRule

TRAINED_FLAGS_KEY = "requires_grad"
"""Name of `TrainedFlags` in the state of a run."""
_NUM_SAMPLED_VALUES = 16
WRITE_ADVICE = "write on every rank inside of `with session.weights() as model:`, which gathers whole weights"


class ReplacedParameters:
    """Parameters as the task has built them, of which the layout has replaced some.

    They are watched as long as the user's code refers to them.

    Attributes:
        references: to each of them, by name, with whether it took a gradient and its version.
    """

    def __init__(self, model: nn.Module) -> None:
        self.references = {
            name: (weakref.ref(p), p.requires_grad, p._version) for name, p in model.named_parameters()
        }

    def drop_present(self, model: nn.Module) -> None:
        """Watch only those in whose place the model has others that this rank computes with."""
        present = dict(model.named_parameters())
        self.references = {
            name: (ref, trained, p._version)
            for name, (ref, trained, _) in self.references.items()
            if (p := ref()) is not None and present[name] is not p and not present[name].is_meta
        }

    def require_unchanged(self) -> None:
        """Raise a TaskError if one of them was frozen, unfrozen or written to."""
        for name, (ref, trained, version) in self.references.items():
            p = ref()
            if p is not None and (p.requires_grad, p._version) != (trained, version):
                raise TaskError(
                    f"'{name}' was changed through an object that is no longer a parameter of the model: this"
                    " rank holds only a part of it",
                    next_step="take parameters from the model when you need them, not once in the task; "
                    + WRITE_ADVICE,
                )


class TrainedFlags:
    """Which parameters take gradients, as state of a run.

    Args:
        model: placed.

    Attributes:
        frozen: by name, those that took no gradient when the session was built.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._trained = {name: p for name, p in named.items() if p.requires_grad}

    def require_frozen(self) -> None:
        """Raise a TaskError if a parameter takes gradients that was frozen when the session was built."""
        for name, p in self.frozen.items():
            if p.requires_grad:
                raise TaskError(
                    f"'{name}' was frozen when the run began and now takes a gradient, which no rank sums:"
                    " neither the layout nor the optimizer knows it",
                    next_step="leave requires_grad = True in the task, call requires_grad_(False) in the"
                    " callback's on_begin, and requires_grad_(True) in the step of your choice",
                )

    def state_dict(self) -> Mapping[str, Any]:
        """Return the names of the parameters that were frozen during training."""
        frozen = [name for name, p in self._trained.items() if not p.requires_grad]
        return {"frozen": frozen} if frozen else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Freeze the parameters that were frozen, and no others."""
        frozen = {*state_dict.get("frozen", ())}
        for name, p in self._trained.items():
            p.requires_grad_(name not in frozen)


class ModelGuard:
    """Guard of one rank's model; see the module.

    Args:
        sharded_model: as the layout has placed it.
        replaced: the parameters of the task's model, from before it was placed.
        holds_whole: this rank holds the whole model.
    """

    def __init__(
        self, sharded_model: ShardedModel, replaced: ReplacedParameters, *, holds_whole: bool
    ) -> None:
        self._sharded_model, self._replaced, self._holds_whole = sharded_model, replaced, holds_whole
        self.flags = TrainedFlags(sharded_model.model)
        self._held: list[_WatchedTensor] | None = None
        replaced.drop_present(sharded_model.model)

    def check(self) -> None:
        """Check what was changed since the last step.

        Raises:
            TaskError: a parameter was unfrozen, or an object was changed that is no longer in the model.
        """
        # Few calls, because this runs in every step.
        if self.flags.frozen:
            self.flags.require_frozen()
        if self._replaced.references:
            self._replaced.require_unchanged()

    def storages(self) -> Storages:
        """Return the memory of the parameters if this rank holds all of them, for `keep_storages`."""
        return [(p, p.data) for p in self._sharded_model.model.parameters()] if self._holds_whole else []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run callbacks in the block.

        Raises:
            TaskError: they have written to weights of which this rank holds a part, or to a copy of them.
        """
        storages = self.storages()
        self.retake()
        try:
            yield
            self.require_unwritten()
        finally:
            self._held = None
        keep_storages(storages)
        self.check()

    def watch_copy(self, model: nn.Module) -> None:
        """Watch a gathered copy of the model until the callbacks end: writes to it would be lost."""
        if self._held is not None:
            self._held += [_WatchedTensor(name, t, is_copy=True) for name, t in named_tensors(model)]

    def retake(self) -> None:
        """Take the present values as those that must not change."""
        self._held = []
        if self._holds_whole:
            return
        model = self._sharded_model
        # Ranks of a host may share the memory of what they gather, and then others write to it.
        gathered = {placement.computes.name for placement in model.held.values() if not placement.kept}
        for name, t in named_tensors(model.model):
            if _has_memory(t):
                self._held.append(_WatchedTensor(name, t, is_copy=False, samples=name not in gathered))
        for slot, p in model.updates.items():
            self._held.append(_WatchedTensor(slot.name, p, is_copy=False))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run a block in which the session itself writes to the weights."""
        watches = self._held is not None
        self.require_unwritten()
        yield
        if watches:
            self.retake()

    def require_unwritten(self) -> None:
        """Raise a TaskError if a watched tensor was written to."""
        for tensor in self._held or ():
            if tensor.was_written():
                raise TaskError(
                    f"a callback has written to '{tensor.name}' of the copy that session.complete() returned:"
                    " this rank holds only a part of the model, and the change would be lost"
                    if tensor.is_copy
                    else f"a callback has written to '{tensor.name}', but this rank holds only a part of the"
                    " model, so ranks would differ or the change would be lost",
                    next_step=WRITE_ADVICE
                    + (", or change copy.deepcopy(session.complete())" if tensor.is_copy else ""),
                )


Storages = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters with the tensors in whose memory the optimizer and other ranks see them."""


def keep_storages(storages: Storages) -> None:
    """Copy what was assigned to `parameter.data` since into the memory that the parameter had before."""
    for p, data in storages:
        if p.data_ptr() != data.data_ptr() and p.shape == data.shape and p.dtype == data.dtype:
            p.data = data.copy_(p.detach())


class _WatchedTensor:
    """A tensor that must not be written to: its version, memory and some of its values.

    Args:
        is_copy: it is part of a copy of the model.
        samples: its values are watched, too.
    """

    def __init__(self, name: str, tensor: Tensor, *, is_copy: bool, samples: bool = True) -> None:
        self.name, self.is_copy, self._tensor, self._samples = name, is_copy, tensor, samples
        self._before = self._fingerprint()

    def was_written(self) -> bool:
        """Return whether it was written to."""
        if not _has_memory(self._tensor):
            return False
        (*numbers, sample), (*others, other) = self._before, self._fingerprint()
        return numbers != others or not torch.equal(sample, other)

    def _fingerprint(self) -> Sequence[Any]:
        with torch._C.DisableTorchFunctionSubclass():
            t = self._tensor.detach()
            # The values in memory order; those of a tensor with gaps are not worth a copy.
            size = t.numel() if self._samples and t.is_contiguous() else 0
            step = max(1, size // _NUM_SAMPLED_VALUES)
            sample = t.as_strided((-(-size // step),), (step,)) if size else t.new_empty(0)
            # As bytes, since NaN differs from itself.
            return self._tensor._version, t.data_ptr(), sample.clone().view(torch.uint8)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def require_rule_without_copies(rule: SyncRule, strategy: Strategy) -> None:
    """Raise a StrategyError if a sync rule has other copies of the weights than the model."""
    if not isinstance(rule, EveryStep):
        raise StrategyError(
            f"session.weights() cannot be used with sync={strategy.sync}: a server, an earlier round or"
            " another rank has copies of the weights, which would not get the change",
            next_step="use sync=every-step, or compute the change in the forward, in a buffer",
        )


def require_same_tensors(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise a TaskError if the parameters and buffers of a model are other objects, or of another shape."""
    after = dict(named_tensors(model))
    for name in [*before, *after]:
        old, new = before.get(name), after.get(name)
        # A forward or a callback may assign buffers, which are written by name.
        is_same = new is old if isinstance(old, nn.Parameter) else new is not None and old is not None
        if not is_same or old is None or new is None or old.shape != new.shape:
            raise TaskError(
                f"'{name}' was added, removed or replaced inside of session.weights()",
                next_step="write values in place: parameter.copy_(values)",
            )


def write_pieces(pieces: Sequence[TensorPiece], model: nn.Module) -> None:
    """Write whole tensors to the parts of them that this rank holds.

    Args:
        pieces: of the model of this rank, by `model/NAME`.
        model: whole.
    """
    whole = dict(named_tensors(model))
    for piece in pieces:
        name = piece.slot.name.removeprefix("model/")
        piece.tensor.copy_(whole[name][piece.slot.index].view(piece.tensor.shape))


def _has_memory(t: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return not t.is_meta and t.untyped_storage().size() > 0
