"""The table `[log]`: what a run writes about itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.recipe.strict import Table


class LogRecipe(Table):
    """What is written down: `metrics.jsonl` for programs, `log.txt` for people."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the lowest level that is written"
    )
    rotate_bytes: int = Field(
        default=64 * 2**20, ge=0, description="size at which a new file begins; 0: one file"
    )
