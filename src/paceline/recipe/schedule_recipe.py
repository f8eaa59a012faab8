"""The table `[schedule]` of a recipe: the learning rate over the updates of a run.

Invariant: the rate is a function of the update, and under "plateau" of the evaluations before it as well.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.recipe.constraints import BATCH_SCALING_NEEDS
from paceline.recipe.validation import FieldNeed, RecipeTable


def _need_of_decay(*shapes: str) -> FieldNeed:
    return FieldNeed(
        lambda table: table.decay in shapes,
        f"with decay {' or '.join(shapes)}",
        'not "{t.decay}"',
        keys=("decay",),
    )


_ONE_CYCLE = _need_of_decay("one_cycle")
_PLATEAU = _need_of_decay("plateau")


class ScheduleRecipe(RecipeTable):
    """The learning rate as a function of the update, as a factor of `optimizer.lr`."""

    decay: Annotated[
        Literal["constant", "cosine", "exponential", "linear", "one_cycle", "plateau"],
        FieldNeed(
            lambda table: table.rate,
            when=lambda decay: decay == "exponential",
            reason='expected above 0 (or below 0, to rise) with decay = "exponential", found 0',
            change_first="rate",
            is_conflict=True,
        ),
        FieldNeed(
            lambda recipe: recipe.evaluate.every_steps,
            keys=("evaluate.every_steps",),
            scope="recipe",
            when=lambda decay: decay == "plateau",
            reason='expected evaluate.every_steps with decay = "plateau", whose rate follows evaluations',
            change_first="evaluate.every_steps",
            is_conflict=True,
            next_step="set evaluate.every_steps to the number of updates between two evaluations",
        ),
    ] = Field(default="constant", description="the shape after the warm-up")
    warmup_steps: Annotated[
        int,
        FieldNeed(
            lambda table: table.decay != "one_cycle",
            "without decay one_cycle",
            "which rises by itself: see pct_start",
            keys=("decay",),
        ),
    ] = Field(default=0, ge=0, description="updates of linear rise to the full rate")
    warmup_from: Annotated[
        float,
        FieldNeed(lambda table: table.warmup_steps, "with warmup_steps", "found 0", keys=("warmup_steps",)),
        FieldNeed(
            lambda table: table.batch_scaling == "none",
            "without batch_scaling",
            'found "{t.batch_scaling}", whose warm-up starts at the base rate',
            keys=("batch_scaling",),
        ),
    ] = Field(default=0.0, ge=0, le=1, description="fraction of lr at the first update")
    final: Annotated[float, _need_of_decay("cosine", "linear", "plateau")] = Field(
        default=0.0, ge=0, le=1, description="fraction of lr at the end; plateau: the lowest one"
    )
    rate: Annotated[float, _need_of_decay("exponential")] = Field(
        default=0.0, description="exp(-rate * t) after t updates; below 0 the learning rate rises"
    )
    cycle_steps: Annotated[int | None, _need_of_decay("cosine")] = Field(
        default=None, ge=1, description="updates of the first restart cycle"
    )
    cycle_factor: Annotated[
        int,
        FieldNeed(
            lambda table: table.cycle_steps, "with cycle_steps", "which is not set", keys=("cycle_steps",)
        ),
    ] = Field(default=1, ge=1, description="each cycle is this many times as long as the one before")
    pct_start: Annotated[float, _ONE_CYCLE] = Field(
        default=0.3, gt=0, lt=1, description="fraction of the run in which the rate rises to lr"
    )
    div_factor: Annotated[float, _ONE_CYCLE] = Field(
        default=25.0, ge=1, description="the first rate is lr / div_factor"
    )
    final_div_factor: Annotated[float, _ONE_CYCLE] = Field(
        default=1e4, ge=1, description="the last rate is the first one / final_div_factor"
    )
    anneal_strategy: Annotated[Literal["cos", "linear"], _ONE_CYCLE] = Field(
        default="cos", description="the shape of the rise and of the fall"
    )
    metric: Annotated[str, _PLATEAU] = Field(
        default="loss", min_length=1, description="what of an evaluation should improve: loss, or a metric"
    )
    better: Annotated[Literal["lower", "higher"], _PLATEAU] = Field(
        default="lower", description="which values of it are better"
    )
    factor: Annotated[float, _PLATEAU] = Field(
        default=0.1, gt=0, lt=1, description="factor of the rate each time that it is reduced"
    )
    patience: Annotated[int, _PLATEAU] = Field(
        default=10, ge=0, description="evaluations without improvement that do not reduce the rate yet"
    )
    threshold: Annotated[float, _PLATEAU] = Field(
        default=1e-4, ge=0, description="how much better a value has to be to count as an improvement"
    )
    threshold_mode: Annotated[Literal["rel", "abs"], _PLATEAU] = Field(
        default="rel", description="threshold is a fraction of the best value, or a difference"
    )
    cooldown: Annotated[int, _PLATEAU] = Field(
        default=0, ge=0, description="evaluations after a reduction that are not counted"
    )
    batch_scaling: Annotated[
        Literal["none", "linear", "sqrt"],
        *BATCH_SCALING_NEEDS,
        FieldNeed(
            lambda table: table.base_batch is not None,
            reason='expected with batch_scaling = "{t.batch_scaling}", and it is not set',
            change_first="base_batch",
            is_conflict=True,
        ),
    ] = Field(default="none", description="how lr grows with batch.size / base_batch")
    base_batch: Annotated[
        int | None,
        FieldNeed(
            lambda table: table.batch_scaling != "none",
            "with batch_scaling linear or sqrt",
            'found "none"',
            keys=("batch_scaling",),
        ),
    ] = Field(default=None, ge=1, description="samples per update for which lr was tuned")

    @property
    def follows_evaluations(self) -> bool:
        """Return whether the rate depends on evaluations."""
        return self.decay == "plateau"
