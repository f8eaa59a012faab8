"""Who may hear what the processes of a job tell each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.recipe.strict import Table


class SecurityRecipe(Table):
    """What is encrypted. The key of a job is no part of its recipe: `--token-file`, or PACELINE_TOKEN."""

    tls: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="encrypt what nodes say in the store of the job, and the channels of a server; "
        "auto: where there are several nodes",
    )
    certificate: str | None = Field(
        default=None,
        min_length=1,
        description="folder of `paceline certificate`, on every host: who has not the same cannot call;"
        " left out: one is made at the start",
    )
