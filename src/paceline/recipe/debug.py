"""The table `[debug]`: what a run looks at that costs time, to find mistakes of its own code."""

from __future__ import annotations

from pydantic import Field

from paceline.recipe.strict import Table


class DebugRecipe(Table):
    """Checks that end a run when they find something."""

    bytes: bool = Field(
        default=False,
        description="hold the bytes that routes send against their closed forms, in every round",
    )
    races: bool = Field(
        default=False,
        description="find who touches a tensor between the launch of a collective and its wait",
    )
