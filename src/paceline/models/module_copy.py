"""Deep copies of modules, also of those that keep an activation of their last forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, tuple, dict)


def deep_copy(model: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module.

    PyTorch refuses to copy a tensor that autograd has made. Of one that a module keeps in an attribute, such
    as an attention map or an auxiliary loss, the copy has the value without the graph.

    Args:
        known: what replaces some objects in the copy, by their `id`, as in the memo of `copy.deepcopy`.
    """
    memo = {id(t): t.detach().clone() for module in model.modules() for t in _kept_activations(vars(module))}
    copied: nn.Module = copy.deepcopy(model, memo | dict(known or {}))
    return copied


def _kept_activations(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with a graph in the attributes of a module, and in containers in them."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
    elif type(value) in _CONTAINERS:
        for item in value.values() if type(value) is dict else value:
            yield from _kept_activations(item)
