"""Training and evaluation mode of modules, as the task has left them.

A task may put a part of its model into evaluation mode, such as a frozen trunk with BatchNorm and dropout, or
let the model's own `train()` do so. Invariant: in a training step every module has the mode that PyTorch's
loop would give it, except that a module which the task has put into evaluation mode stays in it. Evaluations
leave no trace. The marks on modules are in copies, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_STAYS_ATTRIBUTE = "_paceline_stays_in_evaluation"


def enter_training(model: nn.Module) -> nn.Module:
    """Put a model into training mode by its own `train()`, except for what the task has put into evaluation.

    The first call marks these modules. If the model as a whole is in evaluation mode then, as the models of
    `from_pretrained` are, none of its modules counts as put there on purpose.

    Returns:
        The model.
    """
    staying = [module for module in model.modules() if _stays(module, is_deliberate=model.training)]
    model.train()
    for module in staying:
        module.training = False
    return model


def _stays(module: nn.Module, *, is_deliberate: bool) -> bool:
    """Return whether a module stays in evaluation mode, and mark it if it has no mark."""
    stays: bool = module.__dict__.setdefault(_STAYS_ATTRIBUTE, is_deliberate and not module.training)
    return stays


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode in the block, and give every module its earlier mode after it."""
    with restored_modes(*models):
        for model in models:
            model.eval()
        yield


@contextmanager
def restored_modes(*models: nn.Module) -> Iterator[None]:
    """Give every module the mode after the block that it had before."""
    before = {module: module.training for model in models for module in model.modules()}
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def describe_modes(model: nn.Module) -> str:
    """Return a line about modules that are not in the mode that PyTorch's loop would give them, or "".

    Args:
        model: as the task has left it, or after `enter_training`.
    """
    marked = _STAYS_ATTRIBUTE in model.__dict__
    if not (model.training or marked):
        return (
            "the task has left the whole model in evaluation mode, as from_pretrained does: it is trained in"
            " training mode. To keep parts in evaluation mode, call eval() on them and train() on the model."
        )
    names = [
        name
        for name, module in model.named_modules()
        if name and (module.__dict__[_STAYS_ATTRIBUTE] if marked else not module.training)
    ]
    if not names:
        return ""
    others = f" and {len(names) - 1} more modules" if len(names) > 1 else ""
    return (
        f"'{names[0]}'{others} stay in evaluation mode, as the task has left them: no dropout, and fixed"
        " statistics of BatchNorm. Call train() on the model at the end of the task to train them."
    )
