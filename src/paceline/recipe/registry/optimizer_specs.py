"""The words of the optimizers: one line of registration each."""

from __future__ import annotations

from paceline.recipe.registry.word_spec import OptimizerSpec

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
