"""The table `[sparsity]`: which share of the weights is masked, and when.

Invariant: plain values without torch. A layout that the masks do not support is an error here, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.recipe.validation import FieldNeed, RecipeTable

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe


def _is_supported(recipe: Recipe) -> bool:
    """Return whether every rank, or every shard group, holds whole tensors and sums exact gradients."""
    strategy = recipe.strategy
    is_split = max(strategy.tensor, strategy.pipeline, strategy.context, strategy.lanes) > 1
    has_other_sums = strategy.servers or strategy.cut or strategy.is_set("storage")
    codecs = [word.spec for other in strategy.codec_alternatives for word in other.codec_words]
    sums_each_step = all(spec.exact and spec.sums and not spec.needs_server for spec in strategy.sync_specs)
    return sums_each_step and not is_split and not has_other_sums and all(c.is_identity for c in codecs)


SPARSITY_NEEDS = (
    FieldNeed(
        _is_supported,
        keys=("strategy",),
        scope="recipe",
        reason="expected replicas, or shard with zero, with sync=every-step and codec=fp32, found"
        " '{t.strategy}', whose ranks split tensors in other ways or send something else than gradients",
        is_conflict=True,
    ),
    FieldNeed(
        lambda recipe: recipe.average.decay is None,
        keys=("average.decay",),
        scope="recipe",
        reason="expected no average.decay, found {t.average.decay:g}: an average of weights from before a"
        " mask is not zero where the mask is",
        is_conflict=True,
    ),
)


_WITH_TARGET = FieldNeed(
    lambda table: table.target is not None, "with sparsity.target", "which is not set", keys=("target",)
)


class SparsityRecipe(RecipeTable):
    """Masks that set the smallest weights to zero while the model trains.

    Source: Zhu & Gupta 2017, To Prune, or Not to Prune, arXiv:1710.01878, equation 1.
    """

    target: Annotated[float | None, *SPARSITY_NEEDS] = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of each masked tensor that is zero in the end, as 0.8; left out: no masks",
    )
    first: Annotated[int, _WITH_TARGET] = Field(
        default=0, ge=0, description="updates before the schedule begins, at a share of 0"
    )
    last: Annotated[
        int | None,
        FieldNeed(
            lambda table: table.target is None or table.last is not None,
            keys=("target",),
            when=lambda last: last is None,
            reason="expected a number of updates with sparsity.target = {t.target:g}",
            is_conflict=True,
        ),
        _WITH_TARGET,
        FieldNeed(
            lambda table: table.last is None or table.last > table.first,
            keys=("first",),
            reason="expected more than sparsity.first = {t.first}, found {t.last}",
            is_conflict=True,
        ),
        FieldNeed(
            lambda recipe: recipe.steps is None or (recipe.sparsity.last or 0) <= recipe.steps,
            keys=("steps",),
            scope="recipe",
            reason="expected at most steps = {t.steps}, found {t.sparsity.last}: the target would not be"
            " reached",
            is_conflict=True,
        ),
    ] = Field(default=None, ge=1, description="updates after which the share is the target")
    every: Annotated[int, _WITH_TARGET] = Field(
        default=1, ge=1, description="updates from one mask to the next"
    )
    exclude: Annotated[
        tuple[Literal["one-dimensional", "normalization", "embeddings"], ...], _WITH_TARGET
    ] = Field(
        default=("one-dimensional", "normalization"),
        strict=False,
        description="kinds of tensors without a mask: those of one dimension or none, those of PyTorch's"
        " normalisation layers, those of embeddings",
    )

    def is_due(self, update: int) -> bool:
        """Return whether the masks change after this number of updates."""
        if self.target is None or self.last is None or not self.first <= update <= self.last:
            return False
        return update == self.last or (update - self.first) % self.every == 0

    def share(self, update: int) -> float:
        """Return the share of a tensor that is masked after a number of updates."""
        target, last = self._bounds()
        progress = min(1.0, max(0.0, (update - self.first) / (last - self.first)))
        return target - target * (1.0 - progress) ** 3

    def _bounds(self) -> tuple[float, int]:
        assert self.target is not None and self.last is not None, "a recipe without masks"
        return self.target, self.last
