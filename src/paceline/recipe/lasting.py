"""What makes a run last: checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.recipe.strict import Table


class CheckpointRecipe(Table):
    """When state is saved, where, and how much of it stays."""

    every_steps: int = Field(default=0, ge=0, description="updates between checkpoints; 0: only at the end")
    every_minutes: float = Field(default=0.0, ge=0, description="minutes between checkpoints; 0: steps count")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    keep_best: int = Field(
        default=0, ge=0, description="checkpoints of the lowest evaluation loss that are kept besides"
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
