"""`[memory]`: what saves memory at the price of time, and how much of it there may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.recipe.expect import Words
from paceline.recipe.problems import found_instead, refused
from paceline.recipe.sizes import EXPECTED, as_bytes
from paceline.recipe.strict import Table

_WORDS = ("auto", "none", "blocks", "segments")
_RIGHT = 'one of auto, none, blocks, segments, or numbers of blocks as "0,1,4"'


def check_recompute(text: str) -> str:
    """What is computed again: a word, or numbers of blocks, ascending."""
    numbers = text.split(",")
    if text in _WORDS:
        return text
    if not all(n.isdecimal() for n in numbers) or numbers != sorted(set(numbers), key=int):
        raise refused(found_instead(_RIGHT, text, _WORDS))
    return text


class MemoryRecipe(Table):
    """What saves memory at the price of time."""

    recompute: Annotated[str, AfterValidator(check_recompute), Words(_RIGHT)] = Field(
        default="auto",
        description='what backward computes again: "none", the inside of "blocks", or of those with numbers'
        ' "0,1,4", or "segments" of about sqrt(blocks) blocks, of which one input is kept: the least memory,'
        ' two more forwards. "auto": what keeps the budget in the least time, and nothing without one',
    )
    budget: Annotated[int | None, BeforeValidator(as_bytes), Words(EXPECTED)] = Field(
        default=None,
        ge=1,
        description='the most that a rank may need, as "2GiB": a run that needs more does not start',
    )

    @property
    def chooses(self) -> bool:
        """Whether it is left open which blocks are computed again."""
        return self.recompute == "auto" and self.budget is not None

    @property
    def recomputes(self) -> bool:
        """Whether blocks are computed again, as far as it is known."""
        return self.recompute not in ("auto", "none")
