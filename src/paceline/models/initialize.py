"""Initial weights that are keyed by (seed, parameter name, block of rows), never drawn from a stream.

Invariant: the values of a parameter depend only on the seed, its name, its shape and its dtype. So adding a
layer, splitting the model or changing the device leaves all other weights as they are, and some rows of a
parameter can be made without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.errors import TaskError
from paceline.state.keys import key
from paceline.state.slot import SlotIndex, span_of_index, span_runs

InitRule = Callable[[str, Tensor, torch.Generator], object]
"""`rule(name, values, generator)` fills the values in place, or leaves them as the constructor did."""

_BLOCK_VALUES = 2**20
_SMALL_VALUES = 2**12


@dataclass(frozen=True)
class InitializeByName:
    """An initialiser that applies a rule to every parameter, with one generator per block of rows.

    Args:
        make_rule: returns the rule for a model, from its modules and names. The rule gets CPU tensors, so
            that every device starts from the same bits, and must treat some rows of a parameter as all.
    """

    make_rule: Callable[[nn.Module], InitRule]

    @torch.no_grad()
    def __call__(self, model: nn.Module, seed: int) -> None:
        """Set all parameters, and allocate those on `meta`; tied ones are set under their first name."""
        rule = self.make_rule(model)
        replacements: dict[int, nn.Parameter] = {}
        for name, p in list(model.named_parameters()):
            values = _make_rows(rule, seed, name, p, 0, len(p) if p.dim() else 1)
            if p.is_meta:
                replacements[id(p)] = nn.Parameter(values, p.requires_grad)
            else:
                p.copy_(values)
        replace_parameters(model, replacements)

    @torch.no_grad()
    def part(self, model: nn.Module, seed: int, name: str, part: SlotIndex) -> Tensor:
        """Return a part of one parameter, [sizes of the part], on the CPU; only its rows are made."""
        p = model.get_parameter(name)
        rule = self.make_rule(model)
        if not part:
            return _make_rows(rule, seed, name, p, 0, 1)
        runs = span_runs(span_of_index(part[0], len(p)))
        rows = torch.cat([_make_rows(rule, seed, name, p, *run) for run in runs])
        return rows[(slice(None), *part[1:])].clone()


def initialize_by_name(model: nn.Module, seed: int, rule: InitRule) -> None:
    """Set every parameter by a rule, as `InitializeByName`."""
    InitializeByName(lambda _: rule)(model, seed)


def _make_rows(rule: InitRule, seed: int, name: str, p: Tensor, start: int, stop: int) -> Tensor:
    """Return rows of a parameter, made block by block; a scalar is one row."""
    height = max(1, _BLOCK_VALUES // max(1, p.numel() // max(1, len(p)))) if p.dim() else 1
    if p.numel() <= _BLOCK_VALUES:
        whole = _make_block(rule, key(seed, "initialize", name), name, p, slice(None))
        return whole[start:stop] if p.dim() else whole
    rows = torch.empty(stop - start, *p.shape[1:], dtype=p.dtype)
    for block in range(start // height, -(-stop // height)):
        first, last = block * height, min((block + 1) * height, len(p))
        values = _make_block(rule, key(seed, "initialize", name, block), name, p, slice(first, last))
        a, b = max(start, first), min(stop, last)
        rows[a - start : b - start] = values[a - first : b - first]
    return rows


def _make_block(rule: InitRule, seed: int, name: str, p: Tensor, rows: slice) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not p.is_meta:
        values = (p.detach()[rows] if p.dim() else p.detach()).cpu().clone()
        rule(name, values, generator)
        return values
    # NaN shows which values the rule does not set; the constructor's are lost on `meta`.
    values = torch.full((p[rows] if p.dim() else p).shape, torch.nan, dtype=p.dtype)
    rule(name, values, generator)
    if bool(torch.isnan(values).any()):
        raise TaskError(
            f"the initialisation rule does not set '{name}', and the model was built on the meta device",
            next_step="set it in the rule, or build the model on the CPU",
        )
    return values


@contextmanager
def without_memory() -> Iterator[None]:
    """Build large parameters on the `meta` device within the block, with a shape and no memory.

    A rank then allocates only the parameters that it holds. Buffers and small parameters (up to 4,096 values)
    are built as usual. The task needs an `initialize` that can make parts: `InitializeByName`.
    """

    def to_meta(module: nn.Module, name: str, p: Any) -> Any:
        if isinstance(p, nn.Parameter) and not p.is_meta and p.numel() > _SMALL_VALUES:
            return nn.Parameter(p.detach().to("meta"), p.requires_grad)
        return None

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def replace_parameters(model: nn.Module, replacements: dict[int, nn.Parameter]) -> None:
    """Replace parameters, by `id`, in all modules that use them."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) in replacements:
                module._parameters[name] = replacements[id(p)]


def fan_in_rule(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Fill weights for ReLU networks: normal of variance 2 / fan-in; biases are zero; norms stay.

    Source: He et al. 2015, Delving Deep into Rectifiers, arXiv:1502.01852, section 2.2.
    """
    if values.dim() >= 2:
        fan_in = values[0].numel()
        values.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
    elif name.endswith("bias"):
        values.zero_()
