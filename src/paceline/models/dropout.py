"""Dropout whose mask is a pure function of the micro-batch's key and the module's name.

Invariant: with the same micro-batch key, name, shape and kind of device a mask has the same bits on every
rank, in a clone on another thread and in a recomputed forward. No generator is shared, so nothing depends on
earlier draws.

A module that is called twice in one forward draws the same mask twice: use one `KeyedDropout` per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.errors import TaskError, format_count
from paceline.state.keys import key


class PositionSpans(Protocol):
    """The positions of a micro-batch: their number, and the span that this rank has."""

    length: int

    def own(self) -> tuple[int, int]:
        """Return the first position of this rank, and the one after the last."""


class KeyedDropout(nn.Module):
    """Zero each value with probability `p` in training and scale the rest by 1 / (1 - p).

    In evaluation, or with p = 0, it is the identity.

    Args:
        p: probability that a value is dropped, in [0, 1).
    Source: Srivastava et al. 2014, Dropout, JMLR 15; keyed by (micro-batch, name) in place of a stream.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise TaskError(f"dropout of {p} is not a probability below 1", next_step="choose 0 <= p < 1")
        self.p = p
        self.name = ""
        self.micro_batch_key: int | None = None
        self._part: tuple[int, int] | None = None
        self._width = 0
        self._positions: PositionSpans | None = None
        self._samples: tuple[range, int] | None = None

    def take_part(self, span: tuple[int, int], width: int) -> None:
        """Use a span of the features: the mask is that part of the mask of all `width` features."""
        self._part, self._width = span, width

    def take_positions(self, positions: PositionSpans) -> None:
        """Use a part of the positions, dimension 1: the mask is that part of the mask of all positions."""
        self._positions = positions

    def take_samples(self, samples: range, num_samples: int) -> None:
        """Use some samples of a micro-batch, dimension 0: the mask is that part of the mask of all."""
        self._samples = None if len(samples) == num_samples else (samples, num_samples)

    def take_all(self) -> None:
        """Use all features, positions and samples again."""
        self._part = self._positions = self._samples = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of x, of any shape; the result has its shape and dtype."""
        if not self.training or self.p == 0.0:
            return x
        return (x * keep_mask(self, x)).mul_(1.0 / (1.0 - self.p))

    def take_key(self, micro_batch_key: int) -> None:
        """Draw the masks of this micro-batch from now on."""
        # `Module.__setattr__` costs microseconds in every micro-batch.
        self.__dict__["micro_batch_key"] = micro_batch_key

    def extra_repr(self) -> str:
        return f"p={self.p}"


class LayerDrop(KeyedDropout):
    """Skip a residual block with probability `p` in training, for all samples of a micro-batch.

    Whether it is skipped is a function of (seed, step, micro-batch, name), so ranks that run parts of one
    micro-batch skip the same blocks. In evaluation every block runs, unscaled.

    Source: Fan, Grave & Joulin 2019, Reducing Transformer Depth on Demand with Structured Dropout,
        arXiv:1909.11556, section 3.1.
    """

    def skips(self) -> bool:
        """Return whether the block is skipped in the present micro-batch."""
        return self.training and self.p > 0.0 and not _keeps_block(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return x: the block asks `skips` before it runs."""
        return x


@torch.compiler.disable  # a compiled graph would be built again for every micro-batch key
def _keeps_block(module: LayerDrop) -> bool:
    return bool(draw_mask(module, (1,), torch.device("cpu")))


@torch.compiler.disable  # a compiled graph would be built again for every micro-batch key
def keep_mask(module: KeyedDropout, x: Tensor) -> Tensor:
    """Draw which values of x the module keeps in the present micro-batch: bool, the shape and device of x.

    Raises:
        TaskError: no micro-batch key was set, so the mask would not be reproducible.
    """
    # Under context=N, x is a part of a sequence, and its subclass draws the mask of its positions.
    if has_torch_function_unary(x):
        mask: Tensor = handle_torch_function(keep_mask, (x,), module, x)
        return mask
    if module._samples is not None:
        return _mask_of_own_samples(module, x, *module._samples)
    return mask_of_own_positions(module, draw_mask(module, shape_of_all_positions(module, x), x.device))


def shape_of_all_positions(module: KeyedDropout, x: Tensor) -> tuple[int, ...]:
    """Return the shape of x with the positions of all ranks of the sequence."""
    return tuple(x.shape) if module._positions is None else (len(x), module._positions.length, *x.shape[2:])


def mask_of_own_positions(module: KeyedDropout, mask: Tensor) -> Tensor:
    """Return the part of a mask of `shape_of_all_positions` that belongs to this rank."""
    return mask if module._positions is None else mask[:, slice(*module._positions.own())]


def _mask_of_own_samples(module: KeyedDropout, x: Tensor, samples: range, num_samples: int) -> Tensor:
    """Return the mask of some samples; all samples have the same number of rows in x."""
    rows = len(x) // len(samples)
    if rows * len(samples) != len(x):
        raise TaskError(
            f"dropout {module.name!r} gets {format_count(len(x), 'row')} for"
            f" {format_count(len(samples), 'sample')},"
            " so it cannot tell which rows belong to which sample",
            next_step="make samples the first dimension of its input, or leave out rechunk",
        )
    mask = draw_mask(module, (rows * num_samples, *shape_of_all_positions(module, x)[1:]), x.device)
    return mask_of_own_positions(module, mask[rows * samples.start : rows * samples.stop])


def draw_mask(module: KeyedDropout, shape: Sequence[int], device: torch.device) -> Tensor:
    """Draw a mask of the given shape, bool, for the features of this rank."""
    if module.micro_batch_key is None:
        raise TaskError(
            f"KeyedDropout {module.name!r} has no micro-batch key",
            next_step="call set_micro_batch_key(model, key) before a training forward; Paceline's step does",
        )
    generator = torch.Generator(device).manual_seed(key(module.micro_batch_key, "dropout", module.name))
    if module._part is None:
        return torch.rand(tuple(shape), generator=generator, device=device) >= module.p
    # The whole mask is drawn, so that every tensor rank has the bits of one process.
    whole = torch.rand(*shape[:-1], module._width, generator=generator, device=device)
    return whole[..., slice(*module._part)] >= module.p


def name_dropouts(model: nn.Module) -> tuple[KeyedDropout, ...]:
    """Set the name of every `KeyedDropout` in the whole model, and return them in order.

    Call it on the whole model before that is cut, wrapped or compiled: these names are part of the keys.
    """
    dropouts = {name: m for name, m in model.named_modules() if isinstance(m, KeyedDropout)}
    for name, module in dropouts.items():
        module.name = name or "dropout"
    return tuple(dropouts.values())


def set_micro_batch_key(model: nn.Module, micro_batch_key: int) -> None:
    """Set the key of the micro-batch (one shard of one step) whose masks are drawn from now on.

    Modules that have no name yet are named as `name_dropouts` does.
    """
    dropouts = [m for m in model.modules() if isinstance(m, KeyedDropout)]
    if not all(module.name for module in dropouts):
        name_dropouts(model)
    for module in dropouts:
        module.take_key(micro_batch_key)
