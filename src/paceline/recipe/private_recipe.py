"""The table `[private]`: clip and noise of each sum, and the budget of the run; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from paceline.recipe.validation import FieldNeed, RecipeTable

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe


def _needed(met: Any, reason: str, *keys: str, next_step: str = "") -> FieldNeed:
    """Return what a run with noise needs of other tables."""
    return FieldNeed(
        met,
        keys=keys,
        scope="recipe",
        when=lambda noise: noise > 0,
        reason=reason,
        is_conflict=True,
        next_step=next_step,
    )


def _of_client(recipe: Recipe) -> bool:
    return recipe.private.unit == "client"


def _sums_whole_gradients(recipe: Recipe) -> bool:
    """Return whether replicas of whole models sum their gradients in every step."""
    strategy = recipe.strategy
    is_whole = strategy.ranks_per_replica == 1 and strategy.lanes == 1 and not strategy.cut
    spec = strategy.sync_spec
    is_every_step = spec.exact and spec.agrees == "world" and spec.steady and not spec.trains_clients
    return is_whole and is_every_step and not strategy.is_coded and len(strategy.sync_specs) == 1


NOISE_NEEDS = (
    _needed(
        lambda r: not _of_client(r) or r.strategy.sync_spec.trains_clients,
        'expected sync=federated:E with unit = "client", found sync={t.strategy.sync}',
        "unit",
        "strategy.sync",
        next_step='set private.unit = "sample", or train clients',
    ),
    _needed(
        lambda r: _of_client(r) or _sums_whole_gradients(r),
        "expected sync=every-step on replicas of whole models, without lanes and codec, with unit ="
        " \"sample\", found '{t.strategy}': only there each sample is clipped before anything is added",
        "unit",
        "strategy",
        next_step='use replicas=all alone, or set private.unit = "client" and train clients',
    ),
    _needed(
        lambda r: not _of_client(r) or r.federated.weights == "equal",
        'expected federated.weights = "equal", found "samples": a client with many samples would change the'
        " sum by more than the clip norm",
        "federated.weights",
        next_step='set federated.weights = "equal"',
    ),
    _needed(
        lambda r: (
            not _of_client(r) or not (r.federated.clip_norm or r.federated.buffer or r.strategy.is_coded)
        ),
        "expected no federated.clip_norm, federated.buffer or codec: private.clip_norm clips, a buffer draws"
        " nobody, and a codec can lengthen a clipped update",
        "federated.clip_norm",
        "federated.buffer",
        "strategy.codec",
    ),
    _needed(
        lambda r: not (r.reproducible or r.health.rolls_back or r.health.spike_factor is not None),
        "expected no reproducible, no roll-back and no health.spike_factor: noise is drawn anew each time, a"
        " round that is taken again is released twice, and losses have no noise",
        "reproducible",
        "health.spike_factor",
    ),
    _needed(
        lambda r: r.precision.compute != "fp16" and r.batch.reduction == "mean",
        'expected precision.compute = "fp32" or "bf16", and batch.reduction = "mean"',
        "precision.compute",
        "batch.reduction",
    ),
    _needed(
        lambda r: _of_client(r) or (r.optimizer.spec.elementwise and not r.runtime.compile),
        "expected an optimizer that reads nothing but gradients, and no runtime.compile, with unit ="
        ' "sample", found optimizer.name = "{t.optimizer.name}"',
        "optimizer.name",
        "runtime.compile",
    ),
)
_NEEDS_NOISE = FieldNeed(lambda table: table.noise > 0, "with noise", "which is 0", keys=("noise",))


class PrivateRecipe(RecipeTable):
    """Differential privacy: the clip of what each unit adds to a sum, and the noise of the sum."""

    noise: Annotated[float, *NOISE_NEEDS] = Field(
        default=0.0,
        ge=0,
        description="standard deviation of the noise that is added once to each sum, in clip norms; 0: none",
    )
    clip_norm: Annotated[float, _NEEDS_NOISE] = Field(
        default=1.0, gt=0, description="largest norm of what a client or sample adds to a sum"
    )
    delta: Annotated[float, _NEEDS_NOISE] = Field(
        default=1e-5, gt=0, lt=1, description="delta of epsilon; well below 1 / number of clients or samples"
    )
    budget: Annotated[float, _NEEDS_NOISE] = Field(
        default=0.0,
        ge=0,
        description="largest epsilon: the run stops before the round that would exceed it; 0: no limit",
    )
    unit: Annotated[Literal["client", "sample"], _NEEDS_NOISE] = Field(
        default="client",
        description="whose data is protected: all of a client in federated rounds, or each sample in plain"
        " training, whose batches are then Poisson draws of batch.size samples on average",
    )

    @property
    def is_on(self) -> bool:
        """Return whether sums have noise."""
        return self.noise > 0
