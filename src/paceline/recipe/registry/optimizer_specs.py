"""The optimizers that a recipe can name, and the class of their specifications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.recipe.registry.word_spec import WordSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(WordSpec):
    """The specification of an update rule: `build(model, groups, recipe, *, fused) -> torch.optim.Optimizer`.

    If the optimizer has a method `on_build(session)`, it is called once, before anything is restored.

    Args:
        reads: keys of [optimizer] that it reads, besides those that all optimizers read.
        defaults: values of keys that are left out, where they differ from those of the table.
        elementwise: it updates each value independently of the others; if false, its class may state so, or
            a trial run decides.
        has_kernel: PyTorch has a fused kernel of it.
        follows_rate: it reads its rate in every update, and not only in the first one.
    """

    choice = "optimizer"
    reads: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    elementwise: bool = False
    has_kernel: bool = False
    follows_rate: bool = True


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
        elementwise=True,
        has_kernel=True,
    ),
    OptimizerSpec(
        word="sgd",
        summary="the gradient, with or without momentum",
        build=f"{_BUILD}sgd",
        reads=("momentum", "nesterov", "weight_decay", "l2"),
        elementwise=True,
        has_kernel=True,
    ),
    OptimizerSpec(
        word="rmsprop",
        summary="the gradient by the root of its squared average",
        build=f"{_BUILD}rmsprop",
        reads=("alpha", "eps", "momentum", "l2"),
        elementwise=True,
    ),
    OptimizerSpec(
        word="adabound",
        summary="Adam that turns into SGD, value by value",
        build=f"{_BUILD}adabound",
        reads=("betas", "eps", "l2", "final_lr", "gamma"),
        elementwise=True,
    ),
    OptimizerSpec(
        word="adam_to_sgd",
        summary="Adam, replaced by SGD at an update or on a plateau",
        build=f"{_BUILD}adam_to_sgd",
        reads=("betas", "eps", "l2", "switch_update"),
    ),
    OptimizerSpec(
        word="adadelta",
        summary="the gradient by the ratio of averages of squared updates and gradients",
        build=f"{_BUILD}adadelta",
        reads=("rho", "eps", "l2"),
        defaults=(("lr", 1.0), ("eps", 1e-6)),
        elementwise=True,
    ),
    OptimizerSpec(
        word="adagrad",
        summary="the gradient by the root of the sum of its squares",
        build=f"{_BUILD}adagrad",
        reads=("eps", "l2"),
        defaults=(("lr", 1e-2), ("eps", 1e-10)),
        elementwise=True,
    ),
    OptimizerSpec(
        word="adamax",
        summary="Adam with the largest gradient in place of the second moment",
        build=f"{_BUILD}adamax",
        reads=("betas", "eps", "l2"),
        defaults=(("lr", 2e-3),),
        elementwise=True,
    ),
    OptimizerSpec(
        word="asgd",
        summary="SGD with a rate that falls with the updates",
        build=f"{_BUILD}asgd",
        reads=("lambd", "alpha", "l2"),
        defaults=(("lr", 1e-2), ("alpha", 0.75)),
        elementwise=True,
    ),
    OptimizerSpec(
        word="nadam",
        summary="Adam that looks ahead along its momentum",
        build=f"{_BUILD}nadam",
        reads=("betas", "eps", "momentum_decay", "weight_decay", "l2"),
        defaults=(("lr", 2e-3),),
        elementwise=True,
    ),
    OptimizerSpec(
        word="radam",
        summary="Adam with a rectified rate at the start",
        build=f"{_BUILD}radam",
        reads=("betas", "eps", "weight_decay", "l2"),
        elementwise=True,
    ),
    OptimizerSpec(
        word="rprop",
        summary="a step size of each value that follows the signs of its gradients",
        build=f"{_BUILD}rprop",
        reads=("etas", "step_sizes"),
        defaults=(("lr", 1e-2),),
        elementwise=True,
        follows_rate=False,
    ),
    OptimizerSpec(
        word="lamb",
        summary="Adam whose update of a tensor has the length of the tensor",
        build=f"{_BUILD}lamb",
        reads=("betas", "eps", "weight_decay", "exclude"),
        defaults=(("eps", 1e-6),),
    ),
    OptimizerSpec(
        word="lars",
        summary="SGD with a rate for each tensor, from its norm and that of its gradient",
        build=f"{_BUILD}lars",
        reads=("momentum", "trust_coefficient", "weight_decay", "exclude"),
        defaults=(("lr", 0.1), ("momentum", 0.9)),
    ),
    OptimizerSpec(
        word="adafactor",
        summary="second moments as a row times a column",
        build=f"{_BUILD}adafactor",
        reads=("beta2_decay", "d", "weight_decay"),
        defaults=(("lr", 1e-2),),
    ),
    OptimizerSpec(
        word="muon",
        summary="orthogonal updates of matrices, and AdamW for the rest",
        build=f"{_BUILD}muon",
        reads=("momentum", "nesterov", "adjust_lr_fn", "adamw_on", "betas", "eps", "weight_decay"),
        defaults=(("momentum", 0.95), ("nesterov", True)),
    ),
    OptimizerSpec(
        word="kfac",
        summary="the gradient of a layer between the inverses of two factors of its curvature",
        build=f"{_BUILD}kfac",
        reads=(
            "momentum",
            "weight_decay",
            "damping",
            "factor_decay",
            "factor_interval",
            "inverse_interval",
            "kl_clip",
        ),
        defaults=(("lr", 0.3), ("momentum", 0.8)),
    ),
    OptimizerSpec(
        word="newton_cg",
        summary="Newton's method by conjugate gradients, with a line search",
        build=f"{_BUILD}newton_cg",
        reads=("l2", "damping", "max_cg_steps"),
        defaults=(("lr", 1.0), ("damping", 0.0)),
    ),
)
