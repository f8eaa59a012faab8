"""What makes a run last: checkpoints, and what is done when the numbers go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from paceline.recipe.acting import Need
from paceline.recipe.strict import Table


class CheckpointRecipe(Table):
    """When state is saved, where, and how much of it stays."""

    every_steps: int = Field(default=0, ge=0, description="updates between checkpoints; 0: only at the end")
    every_minutes: float = Field(default=0.0, ge=0, description="minutes between checkpoints; 0: steps count")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="checkpoints of the best evaluate.metric that are kept besides",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="a path or a URL such as s3://bucket/folder; left out: checkpoints/ in the run folder",
    )
    mode: Literal["background", "blocking"] = Field(
        default="background", description="whether training goes on while a checkpoint is written"
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="seconds to save and leave, once asked to stop, before processes are killed",
    )
    notice: str | None = Field(
        default=None,
        min_length=1,
        description="a file or http URL; once it is there, the machine will go: the run saves and stops",
    )
    deadline_seconds: float = Field(default=1800.0, gt=0, description="seconds that one save may take")
    full_disk_seconds: float = Field(
        default=0.0, ge=0, description="seconds that a save waits for space on a full disk; 0: the run stops"
    )


def _answered(answer: str) -> Need:
    return Need(
        ("non_finite",),
        lambda table: answer in table.answers,
        f'with "{answer}"',
        "which is not set",
    )


_WATCHED = Need(
    ("spike_factor",), lambda table: table.spike_factor is not None, "with spike_factor", "which is not set"
)


class AverageRecipe(Table):
    """A moving average of the weights, which is what is evaluated and exported where there is one."""

    decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the average that stays at an update, for example 0.999; left out: no average",
    )


class HealthRecipe(Table):
    """What is done when a loss or a gradient is not finite, or when the loss jumps."""

    needs: ClassVar[Mapping[str, Need]] = {
        "spike": _WATCHED,
        "spike_window": _WATCHED,
        "max_skips": Need(
            ("non_finite",),
            lambda table: "skip" in table.answers or table.non_finite == "lower-rate",
            'with "skip", or with non_finite = "lower-rate"',
            "which is not set",
        ),
        "max_roll_backs": _answered("roll-back"),
        "rate_factor": _answered("lower-rate"),
        "max_lowerings": _answered("lower-rate"),
    }

    non_finite: Literal["stop", "skip", "roll-back", "lower-rate"] = Field(
        default="stop",
        description="at a loss or gradient that is not finite: end, leave the step out, go back, or leave it"
        " out and lower all rates",
    )
    spike_factor: float | None = Field(
        default=None,
        gt=1,
        description="a loss this many times the median of the last ones is a spike; left out: none is",
    )
    spike_window: int = Field(default=32, ge=2, description="steps whose median a loss is compared with")
    spike: Literal["stop", "skip", "roll-back", "lower-rate"] = Field(
        default="stop",
        description="at a spike: end, leave the step out, go back to the last checkpoint, or lower all rates"
        " and take the step",
    )
    max_skips: int = Field(
        default=10, ge=1, description="steps that may be left out one after another before the run ends"
    )
    max_roll_backs: int = Field(default=3, ge=1, description="times that a run may go back before it ends")
    rate_factor: float = Field(
        default=0.5, gt=0, lt=1, description='what "lower-rate" multiplies every rate with, from then on'
    )
    max_lowerings: int = Field(
        default=10, ge=1, description="times that the rates may be lowered before the run ends"
    )
    straggler_factor: float | None = Field(
        default=None,
        gt=1,
        description="a rank that takes this many times what others take is named; left out: none is",
    )

    @property
    def answers(self) -> tuple[str, str]:
        """To what is not finite, and to a spike."""
        return self.non_finite, self.spike

    @property
    def rolls_back(self) -> bool:
        """Whether the run may go back to a checkpoint."""
        return "roll-back" in self.answers

    @property
    def lowers_rates(self) -> bool:
        """Whether the run may lower its rates."""
        return "lower-rate" in self.answers
