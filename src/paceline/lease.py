"""Process groups that are of use for a while, such as those of one session.

A process may train more than once, and a group has threads that also wake when nothing is sent. So who has
done with a mesh gives its groups back.

Invariant: a member ends none that another may still use, and waits for nobody to be allowed to: it looks
whether all have given theirs back when the next lease begins, and when groups of that are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paceline.membership import Groups
    from paceline.process_group import Made


class Lease:
    """Makes groups of a membership, and knows which.

    Args:
        key: of the store, where members say that they have given it back.
    """

    def __init__(self, groups: Groups, key: str) -> None:
        self._groups, self._key = groups, key
        self.made: list[Made] = []
        self._ranks: set[int] = set()
        self._is_given_back = False

    @property
    def world(self) -> Made | None:
        """The group of all members, which outlives every lease."""
        return self._groups.world

    @property
    def device(self) -> torch.device:
        """Where its tensors may lie."""
        return self._groups.device

    def make(self, name: str, ranks: tuple[int, ...]) -> Made:
        """See `Groups.make`."""
        self.made.append(self._groups.make(name, ranks))
        self._ranks.update(ranks)
        return self.made[-1]

    def give_back(self) -> None:
        """Use the groups no more; a second time does nothing."""
        if self.made and not self._is_given_back:
            self._is_given_back = True
            self._groups.take_back(self)

    def returns(self, members: Sequence[int]) -> list[str]:
        """Keys that are there when those have given theirs back who share a group of this lease.

        Args:
            members: the numbers of all processes, by rank.
        """
        return [self.returned(members[rank]) for rank in sorted(self._ranks)]

    def returned(self, member: int) -> str:
        """The key of one of them."""
        return f"{self._key}/{member}"
