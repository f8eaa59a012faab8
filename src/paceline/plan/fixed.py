"""What a rank holds of a model that no step trains: frozen parameters, and buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.plan.ranks import Place


def untrained_bytes(model: nn.Module, place: Place) -> tuple[int, int]:
    """Of frozen parameters, and of buffers of the state.

    Args:
        model: the task's, without values.
    """
    modules = _modules(model, place)
    frozen = {p for m in modules for p in m.parameters() if not p.requires_grad}
    kept = {t for m in modules for t in m.state_dict(keep_vars=True).values()}
    saved = {b for m in modules for b in m.buffers()} & kept
    return sum(p.nbytes for p in frozen), sum(b.nbytes for b in saved)


def fixed_bytes(model: nn.Module, place: Place, copies: int = 1) -> int:
    """Of frozen parameters, and buffers; those of the state are there three times around a step.

    Args:
        copies: of the modules, which share the parameters.
    """
    frozen, saved = untrained_bytes(model, place)
    buffers = {b for m in _modules(model, place) for b in m.buffers()}
    return frozen + copies * (sum(b.nbytes for b in buffers) + 2 * saved)


def _modules(model: nn.Module, place: Place) -> Sequence[nn.Module]:
    return [model] if place.stage is None else place.stage.links
