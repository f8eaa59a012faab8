"""The table `[debug]`: what a run looks at to find mistakes of its own code."""

from __future__ import annotations

from pydantic import Field

from paceline.recipe.strict import Table


class DebugRecipe(Table):
    """Checks that end a run when they find something, and what makes a run repeat another."""

    bytes: bool = Field(
        default=False,
        description="hold the bytes that routes send against their closed forms, in every round",
    )
    races: bool = Field(
        default=False,
        description="find who touches a tensor between the launch of a collective and its wait",
    )
    replay_arrivals: str | None = Field(
        default=None,
        min_length=1,
        description="folder of a run with a server: hear the workers in the order in which it heard them",
    )
