"""Between the layers of a block that are cut by features, activations are cut by positions: norms and
dropouts work on a part of them. A sum is then a gather before a column, and a scattered sum after a row.

The gradient of what works on a part of the positions (norms, biases of rows) is summed over the tensor ranks.
Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198, section 4.2.2 (the functions g and g-bar).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.collectives.collective_protocol import Collective
from paceline.errors import TaskError
from paceline.parallel.placement import even_span
from paceline.parallel.tensor.module_swap import swap_forward

_POSITION_DIM = 1


class PositionPartition:
    """The positions of the sequences of the present micro-batch, [B, T, ...], and this rank's part of T.

    Args:
        collective: over the tensor ranks.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.length = 0

    def spans(self) -> list[tuple[int, int]]:
        """Of each rank."""
        size = self._collective.group.size
        return [even_span(self.length, size, rank) for rank in range(size)]

    def own(self) -> tuple[int, int]:
        """Of this rank."""
        return self.spans()[self._collective.group.rank]

    def take(self, x: Tensor) -> Tensor:
        """This rank's part of positions that all ranks have."""
        return x[:, slice(*self.own())].contiguous()

    def gathered(self, x: Tensor, key: str) -> Tensor:
        """All positions, of the parts of all ranks; no gradient."""
        widths = [last - first for first, last in self.spans()]
        rows = self._collective.all_gather(_padded(x, max(widths)).reshape(-1), key).wait()
        shape = (len(x), max(widths), *x.shape[2:])
        parts = [row.view(shape)[:, :width] for row, width in zip(rows, widths, strict=True)]
        return torch.cat(parts, _POSITION_DIM)

    def scattered(self, x: Tensor, key: str) -> Tensor:
        """This rank's part of the sum over all ranks; no gradient."""
        spans = self.spans()
        widest = max(last - first for first, last in spans)
        rows = torch.stack([_padded(x[:, slice(*span)], widest).reshape(-1) for span in spans])
        first, last = self.own()
        own: Tensor = self._collective.reduce_scatter(rows, key).wait()
        kept = own.view(len(x), widest, *x.shape[2:])[:, : last - first]  # until the next sum of this key
        return kept.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, width: int) -> Tensor:
    found = x.new_zeros(len(x), width, *x.shape[2:])
    found[:, : x.shape[_POSITION_DIM]] = x.detach()
    return found


class _SplitPositions(torch.autograd.Function):
    """Of what every rank has whole its part; gradients of all parts come together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.given = positions, key, positions.length
        return positions.take(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.given
        return positions.gathered(grads[0], f"{key}.backward"), None, None


class _JoinPositions(torch.autograd.Function):
    """All parts, with which every rank goes on alike; its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.given = positions, positions.length
        return positions.gathered(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, positions.length = ctx.given
        return positions.take(grads[0]), None, None


class _AllGatherPositions(torch.autograd.Function):
    """All parts, with which each rank goes on in its own way: gradients add up, and are scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.given = positions, key, positions.length
        return positions.gathered(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.given
        return positions.scattered(grads[0], f"{key}.backward"), None, None


class _ReduceScatterPositions(torch.autograd.Function):
    """This rank's part of the sum; gradients of all parts come together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.given = positions, key, positions.length
        return positions.scattered(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.given
        return positions.gathered(grads[0], f"{key}.backward"), None, None


def gather_positions(x: Tensor, positions: PositionPartition, key: str) -> Tensor:
    """All positions, before a layer that is cut by features."""
    found: Tensor = _AllGatherPositions.apply(x, positions, key)
    return found


def reduce_scatter_positions(x: Tensor, positions: PositionPartition, key: str) -> Tensor:
    """A part of the positions, summed over the ranks, after a layer that is cut by features."""
    found: Tensor = _ReduceScatterPositions.apply(x, positions, key)
    return found


def make_gathering_attention(module: nn.Module, positions: PositionPartition, key: str) -> None:
    """Let an attention have all positions of its hidden states, and give a part of them."""
    plain = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _replace_hidden_states(args, kwargs, lambda x: gather_positions(x, positions, key))
        return plain(self, *args, **kwargs)

    swap_forward(module, "Gathering", forward)


def make_sequence_parallel_block(
    module: nn.Module, positions: PositionPartition, key: str, *, first: bool, last: bool
) -> None:
    """Let the first of several blocks cut its input by positions, and the last one join its output."""
    plain = type(module).forward

    def cut(x: Tensor) -> Tensor:
        positions.length = x.shape[_POSITION_DIM]
        found: Tensor = _SplitPositions.apply(x, positions, f"{key}.cut")
        return found

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if first:
            args, kwargs = _replace_hidden_states(args, kwargs, cut)
        found = plain(self, *args, **kwargs)
        if not last:
            return found
        hidden, *rest = found if isinstance(found, tuple) else (found,)
        whole = _JoinPositions.apply(hidden, positions, f"{key}.join")
        return (whole, *rest) if isinstance(found, tuple) else whole

    swap_forward(module, "Stretch", forward)


def _replace_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """The arguments of a block with its hidden states changed: the first one, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def require_positionwise(name: str, block: nn.Module, planned: set[int]) -> None:
    """What works on a part of the positions must not look at others.

    Args:
        planned: ids of the modules that the plan cuts.
    Raises:
        TaskError: a module may look at several positions, or draws from a stream.
    """
    for inner, module in block.named_modules(prefix=name):
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise TaskError(
                f"'{inner}' drops values from a stream, and '{name}' is cut by positions",
                next_step="use paceline.models.KeyedDropout, whose mask goes by the position",
            )
        kind = type(module).__name__
        is_norm = kind.endswith(("LayerNorm", "RMSNorm"))
        if [*module.parameters(recurse=False)] and not is_norm and id(module) not in planned:
            raise TaskError(
                f"'{name}' is cut by positions, and '{inner}' ({kind}) may look at several of them",
                next_step=f"plan '{inner}' as heads, column or row, or leave '{name}' out of the plan",
            )
