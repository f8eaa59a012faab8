"""The optimizers that a recipe can name, and the class of their specifications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.recipe.registry.word_spec import WordSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(WordSpec):
    """The specification of an update rule: `build(model, groups, recipe, *, fused) -> torch.optim.Optimizer`.

    If the optimizer has a method `on_build(session)`, it is called once, before anything is restored.

    Args:
        reads: keys of [optimizer] that it reads, besides those that all optimizers read.
        decays_by: the key whose value is the "weight_decay" of a group.
        elementwise: it updates each value independently of the others; if false, its class may state so, or
            a trial run decides.
        has_kernel: PyTorch has a fused kernel of it.
    """

    choice = "optimizer"
    reads: tuple[str, ...] = ()
    decays_by: Literal["weight_decay", "l2"] = "weight_decay"
    elementwise: bool = False
    has_kernel: bool = False


_BUILD = "paceline.optim.build_optimizer:"

OPTIMIZER_SPECS = (
    OptimizerSpec(
        word="adamw",
        summary="Adam with decoupled weight decay",
        build=f"{_BUILD}adamw",
        reads=("betas", "eps", "weight_decay"),
        elementwise=True,
        has_kernel=True,
    ),
    OptimizerSpec(
        word="adam",
        summary="two moments for each value",
        build=f"{_BUILD}adam",
        reads=("betas", "eps", "l2"),
        decays_by="l2",
        elementwise=True,
        has_kernel=True,
    ),
    OptimizerSpec(
        word="sgd",
        summary="the gradient, with or without momentum",
        build=f"{_BUILD}sgd",
        reads=("momentum", "nesterov", "l2"),
        decays_by="l2",
        elementwise=True,
        has_kernel=True,
    ),
    OptimizerSpec(
        word="rmsprop",
        summary="the gradient by the root of its squared average",
        build=f"{_BUILD}rmsprop",
        reads=("alpha", "eps", "momentum", "l2"),
        decays_by="l2",
        elementwise=True,
    ),
    OptimizerSpec(
        word="adabound",
        summary="Adam that turns into SGD, value by value",
        build=f"{_BUILD}adabound",
        reads=("betas", "eps", "l2", "final_lr", "gamma"),
        decays_by="l2",
        elementwise=True,
    ),
)
