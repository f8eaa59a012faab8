"""The table `[optimizer]` of a recipe: the update rule by name, its options, and clipping.

Invariant: an option that is left out has PyTorch's default for the optimizer that is named, except that no
optimizer decays weights unless the recipe says so. An option that the optimizer does not read is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.recipe.constraints import COUPLED_DECAY, need_of_optimizer
from paceline.recipe.registry import OptimizerSpec, known_specs
from paceline.recipe.validation import FieldNeed, RecipeTable, WordChoice


def _optimizers() -> tuple[str, ...]:
    return tuple(known_specs(OptimizerSpec))


def _check_optimizer(word: str) -> str:
    if word not in _optimizers():
        raise ValueError(word)  # the message is made from the field's WordChoice
    return word


_Share = Annotated[float, Field(ge=0, lt=1)]
_Positive = Annotated[float, Field(gt=0)]


class OptimizerRecipe(RecipeTable):
    """The optimizer by name; a task can bring its own instead."""

    name: Annotated[str, AfterValidator(_check_optimizer), WordChoice(_optimizers)] = Field(
        default="adamw",
        description="the update rule",
        json_schema_extra=lambda schema: schema.update(enum=[*_optimizers()]),
    )
    lr: float = Field(
        default=1e-3,
        ge=0,
        description="learning rate before the schedule; some optimizers have other defaults",
    )
    betas: Annotated[tuple[_Share, _Share], need_of_optimizer("betas")] = Field(
        default=(0.9, 0.999), strict=False, description="decay of the two moments"
    )
    eps: Annotated[float, need_of_optimizer("eps")] = Field(
        default=1e-8, ge=0, description="added to the denominator"
    )
    final_lr: Annotated[float, need_of_optimizer("final_lr")] = Field(
        default=0.1, gt=0, description="rate of the SGD that Adam becomes, before the schedule"
    )
    gamma: Annotated[float, need_of_optimizer("gamma")] = Field(
        default=1e-3, gt=0, description="how fast Adam becomes SGD: in about 1 / gamma updates"
    )
    switch_update: Annotated[
        int | None,
        need_of_optimizer("switch_update"),
        FieldNeed(
            lambda recipe: (
                "switch_update" not in recipe.optimizer.spec.reads or recipe.schedule.follows_evaluations
            ),
            keys=("optimizer.name", "schedule.decay"),
            scope="recipe",
            when=lambda update: update is None,
            reason='expected a number of updates, or schedule.decay = "plateau", at whose first fall it'
            " switches",
            is_conflict=True,
        ),
    ] = Field(
        default=None,
        ge=1,
        description="number of updates of Adam before SGD; left out: until the first fall on a plateau",
    )
    momentum: Annotated[float, need_of_optimizer("momentum")] = Field(
        default=0.0,
        ge=0,
        description="share of the last update that is kept; if left out, muon: 0.95, lars: 0.9, kfac: 0.8",
    )
    nesterov: Annotated[
        bool,
        need_of_optimizer("nesterov"),
        FieldNeed(
            lambda table: table.momentum or "nesterov" not in table.spec.reads,  # PyTorch's own condition
            keys=("momentum",),
            reason="expected momentum > 0 with nesterov, found 0",
            is_conflict=True,
        ),
    ] = Field(default=False, description="look ahead along the momentum; muon: true if left out")
    alpha: Annotated[float, need_of_optimizer("alpha")] = Field(
        default=0.99,
        ge=0,
        le=1,
        description="decay of the squared average; asgd: power with which the rate falls, 0.75 if left out",
    )
    rho: Annotated[float, need_of_optimizer("rho")] = Field(
        default=0.9, ge=0, le=1, description="decay of the averages of squared gradients and updates"
    )
    momentum_decay: Annotated[float, need_of_optimizer("momentum_decay")] = Field(
        default=4e-3, ge=0, description="how fast the first beta rises to its value"
    )
    lambd: Annotated[float, need_of_optimizer("lambd")] = Field(
        default=1e-4, ge=0, description="decay of the weights, and of the rate"
    )
    etas: Annotated[tuple[_Share, Annotated[float, Field(gt=1)]], need_of_optimizer("etas")] = Field(
        default=(0.5, 1.2), strict=False, description="factors of a step size when its sign changes and stays"
    )
    step_sizes: Annotated[tuple[_Positive, _Positive], need_of_optimizer("step_sizes")] = Field(
        default=(1e-6, 50.0), strict=False, description="smallest and largest step size"
    )
    beta2_decay: Annotated[float, need_of_optimizer("beta2_decay")] = Field(
        default=-0.8, le=0, description="the second beta of update t is 1 - t^beta2_decay"
    )
    d: Annotated[float, need_of_optimizer("d")] = Field(
        default=1.0, ge=1, description="largest root mean square of an update, before the rate"
    )
    adjust_lr_fn: Annotated[Literal["match_rms_adamw", "original"], need_of_optimizer("adjust_lr_fn")] = (
        Field(
            default="match_rms_adamw",
            description="how the rate follows the shape of a matrix: 0.2 sqrt(max(rows, columns)), so that"
            " one lr suits both rules, or sqrt(max(1, rows / columns)), PyTorch's default",
        )
    )
    adamw_on: Annotated[tuple[str, ...], need_of_optimizer("adamw_on")] = Field(
        default=(),
        strict=False,
        description='patterns of names of matrices that AdamW updates, as "head.*"; it always updates'
        " embeddings and what is no matrix",
    )
    damping: Annotated[float, need_of_optimizer("damping")] = Field(
        default=0.03,
        ge=0,
        description="multiple of the identity that is added to the curvature; newton_cg: 0 if left out",
    )
    max_cg_steps: Annotated[int, need_of_optimizer("max_cg_steps")] = Field(
        default=100, ge=1, description="most Hessian-vector products of an update"
    )
    factor_decay: Annotated[_Share, need_of_optimizer("factor_decay")] = Field(
        default=0.95, description="share of the old factors that an update of the factors keeps"
    )
    factor_interval: Annotated[int, need_of_optimizer("factor_interval")] = Field(
        default=1, ge=1, description="updates from one update of the factors to the next"
    )
    inverse_interval: Annotated[int, need_of_optimizer("inverse_interval")] = Field(
        default=10, ge=1, description="updates from one inversion of the factors to the next"
    )
    kl_clip: Annotated[float, need_of_optimizer("kl_clip")] = Field(
        default=0.01,
        gt=0,
        description="largest sum of lr^2 times update times gradient, by which updates are shortened",
    )
    trust_coefficient: Annotated[float, need_of_optimizer("trust_coefficient")] = Field(
        default=1e-3, gt=0, description="share of its norm by which a tensor changes at rate 1"
    )
    exclude: Annotated[
        tuple[Literal["one-dimensional", "normalization", "embeddings"], ...], need_of_optimizer("exclude")
    ] = Field(
        default=("one-dimensional", "normalization"),
        strict=False,
        description="kinds of tensors that are neither scaled by norms nor decayed: those of one dimension or"
        " none, those of PyTorch's normalisation layers, those of embeddings",
    )
    weight_decay: Annotated[float, need_of_optimizer("weight_decay", COUPLED_DECAY)] = Field(
        default=0.0, ge=0, description="decoupled decay per unit of lr; sgd: the same as l2, as in PyTorch"
    )
    l2: Annotated[
        float,
        need_of_optimizer("l2"),
        FieldNeed(
            lambda table: not table.weight_decay,
            keys=("weight_decay",),
            reason="expected one of both, found l2 = {t.l2:g} and weight_decay = {t.weight_decay:g}",
            is_conflict=True,
        ),
    ] = Field(default=0.0, ge=0, description="l2 * weight added to the gradient")
    decay_on: Annotated[
        Literal["matrices", "all"],
        FieldNeed(
            lambda table: table.weight_decay or table.l2,
            "with weight_decay or l2",
            "and both are 0",
            keys=("weight_decay",),
        ),
    ] = Field(
        default="matrices",
        description='parameters that decay: those of two dimensions or more, or all; PyTorch\'s is "all"',
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient; left out: no clipping"
    )
    clip_value: Annotated[
        float | None,
        FieldNeed(
            lambda table: table.clip_norm is None,
            keys=("clip_norm",),
            reason="expected one of both, found clip_value = {t.clip_value:g} and clip_norm ="
            " {t.clip_norm:g}",
            is_conflict=True,
        ),
    ] = Field(
        default=None, gt=0, description="largest magnitude of a value of the gradient; left out: no clipping"
    )
    fused: bool = Field(
        default=True, description="use fused kernels where they exist and give the same result"
    )

    def _fill_defaults(self) -> None:
        # Not through the fields that are set, so that `replace(name=...)` takes the defaults of that one.
        for key, value in self.spec.defaults:
            if key not in self.model_fields_set:
                self.__dict__[key] = value

    @property
    def spec(self) -> OptimizerSpec:
        """Return the specification of the optimizer."""
        return known_specs(OptimizerSpec)[self.name]

    @property
    def coupled_decay(self) -> str:
        """Return what to write in place of a weight_decay that the optimizer does not read."""
        if "l2" not in self.spec.reads:
            return f"remove optimizer.weight_decay: {self.name} has no weight decay"
        return (
            f"set optimizer.l2 = {self.weight_decay:g}, which is what PyTorch calls weight_decay of"
            f' "{self.name}", and optimizer.decay_on = "all" for PyTorch\'s choice of parameters: here only'
            " matrices decay by default"
        )
