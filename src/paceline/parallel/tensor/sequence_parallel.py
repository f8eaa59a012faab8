"""Sequence parallelism: between the split layers of a block, activations are split by positions.

Norms and dropouts work on a part of the positions. A sum is then an all_gather before a column and a
reduce_scatter after a row. The gradient of what works on a part of the positions (norms, biases of rows) is
summed over the tensor ranks.

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
from paceline.parallel.tensor.mappings import gather_uneven
from paceline.parallel.tensor.module_swap import swap_forward

_POSITION_DIM = 1


class PositionPartition:
    """Positions of the sequences of the current micro-batch, [B, T, ...], and this rank's part of T.

    Args:
        collective: over the tensor ranks.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.length = 0

    def spans(self) -> list[tuple[int, int]]:
        """Return the positions of each rank."""
        size = self._collective.group.size
        return [even_span(self.length, size, rank) for rank in range(size)]

    def own(self) -> tuple[int, int]:
        """Return the positions of this rank."""
        return self.spans()[self._collective.group.rank]

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor that all ranks have."""
        return x[:, slice(*self.own())].contiguous()

    def all_gather(self, x: Tensor, key: str) -> Tensor:
        """Return all positions from the parts of all ranks; no gradient."""
        widths = [last - first for first, last in self.spans()]
        return gather_uneven(x, widths, _POSITION_DIM, self._collective, key)

    def reduce_scatter(self, x: Tensor, key: str) -> Tensor:
        """Return this rank's part of the sum over all ranks; no gradient."""
        spans = self.spans()
        widest = max(last - first for first, last in spans)
        rows = torch.stack([_padded(x[:, slice(*span)], widest).reshape(-1) for span in spans])
        first, last = self.own()
        row: Tensor = self._collective.reduce_scatter(rows, key).wait()
        local_x = row.view(len(x), widest, *x.shape[2:])[:, : last - first]
        # A copy: the buffer of the collective is reused by the next sum of this key.
        return local_x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, width: int) -> Tensor:
    padded = x.new_zeros(len(x), width, *x.shape[2:])
    padded[:, : x.shape[_POSITION_DIM]] = x.detach()
    return padded


class _SplitPositions(torch.autograd.Function):
    """This rank's part of a tensor that every rank has whole; backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.arguments = positions, key, positions.length
        return positions.take(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The length belongs to the micro-batch of this forward; another may have run since.
        positions, key, positions.length = ctx.arguments
        return _JoinPositions.apply(grads[0], positions, f"{key}.backward"), None, None


class _JoinPositions(torch.autograd.Function):
    """All parts joined, for equal computations on all ranks; backward returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.arguments = positions, key, positions.length
        return positions.all_gather(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.arguments
        return _SplitPositions.apply(grads[0], positions, key), None, None


class _AllGatherPositions(torch.autograd.Function):
    """All parts joined, for different computations on the ranks; backward sums and scatters gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.arguments = positions, key, positions.length
        return positions.all_gather(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.arguments
        return _ReduceScatterPositions.apply(grads[0], positions, f"{key}.backward"), None, None


class _ReduceScatterPositions(torch.autograd.Function):
    """This rank's part of the sum over ranks; backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: PositionPartition, key: str) -> Tensor:
        ctx.arguments = positions, key, positions.length
        return positions.reduce_scatter(x, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        positions, key, positions.length = ctx.arguments
        return _AllGatherPositions.apply(grads[0], positions, f"{key}.backward"), None, None


def gather_positions(x: Tensor, positions: PositionPartition, key: str) -> Tensor:
    """Return all positions, before a layer that is split by features."""
    y: Tensor = _AllGatherPositions.apply(x, positions, key)
    return y


def reduce_scatter_positions(x: Tensor, positions: PositionPartition, key: str) -> Tensor:
    """Return a part of the positions, summed over the ranks, after a layer that is split by features."""
    y: Tensor = _ReduceScatterPositions.apply(x, positions, key)
    return y


def make_gathering_attention(module: nn.Module, positions: PositionPartition, key: str) -> None:
    """Let an attention module gather all positions of its hidden states and return a part of them."""
    plain = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _replace_hidden_states(args, kwargs, lambda x: gather_positions(x, positions, key))
        return plain(self, *args, **kwargs)

    swap_forward(module, "Gathering", forward)


def make_sequence_parallel_block(
    module: nn.Module, positions: PositionPartition, key: str, *, first: bool, last: bool
) -> None:
    """Let the first of several blocks split its input by positions, and the last one join its output."""
    plain = type(module).forward

    def split(x: Tensor) -> Tensor:
        positions.length = x.shape[_POSITION_DIM]
        y: Tensor = _SplitPositions.apply(x, positions, f"{key}.cut")
        return y

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if first:
            args, kwargs = _replace_hidden_states(args, kwargs, split)
        output = plain(self, *args, **kwargs)
        if not last:
            return output
        hidden, *others = output if isinstance(output, tuple) else (output,)
        whole = _JoinPositions.apply(hidden, positions, f"{key}.join")
        return (whole, *others) if isinstance(output, tuple) else whole

    swap_forward(module, "Stretch", forward)


def _replace_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """Return the arguments of a block with its hidden states replaced: the first one, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def require_positionwise(name: str, block: nn.Module, planned: set[int]) -> None:
    """Require that modules which work on a part of the positions do not look at others.

    Args:
        planned: ids of the modules that the plan splits.
    Raises:
        TaskError: a module may look at several positions, or draws from PyTorch's generator.
    """
    for inner, module in block.named_modules(prefix=name):
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise TaskError(
                f"'{inner}' uses PyTorch's generator for dropout, and '{name}' is split by positions",
                next_step="use paceline.models.KeyedDropout, whose mask depends on the position",
            )
        kind = type(module).__name__
        is_norm = kind.endswith(("LayerNorm", "RMSNorm"))
        if [*module.parameters(recurse=False)] and not is_norm and id(module) not in planned:
            raise TaskError(
                f"'{name}' is split by positions, but '{inner}' ({kind}) may look at several of them",
                next_step=f"plan '{inner}' as heads, column or row, or leave '{name}' out of the plan",
            )
