"""A group whose ranks lie on several nodes, in two levels: inside a node, and between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import StrategyError
from paceline.mesh import Group


@dataclass(frozen=True)
class Levels:
    """A group on several nodes, with equally many ranks on each, in two levels.

    Args:
        scatter, gather: the ranks of this rank's node, as two process groups: parts of different buffers are
            under way at a time, and their order among each other differs from rank to rank.
        between: one rank of every node, all with this rank's place on it.
        order: places in the group, those with the first place on their nodes first.
    """

    scatter: Group
    between: Group
    gather: Group
    order: tuple[int, ...]

    @classmethod
    def build(cls, group: Group, parts: Sequence[tuple[int, ...]]) -> Levels:
        """Create the process groups; collective over the group.

        Args:
            parts: the group's ranks by node, two or more of them on two nodes or more.
        Raises:
            StrategyError: a node has more ranks of the group than another.
        """
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(str(len(part)) for part in parts)
            raise StrategyError(
                f"the ranks of the group '{group.name}' are uneven over the nodes: {counts}; a buffer is cut "
                "among the ranks of a node, and each slice is summed over the nodes",
                next_step="start equally many processes on every node, or choose route=native",
            )
        me = group.ranks[group.rank]
        mine = next(part for part in parts if me in part)
        across = [tuple(sorted(place)) for place in zip(*parts, strict=True)]
        return cls(
            group.part(f"{group.name}-inside-nodes", mine),
            group.part(f"{group.name}-between-nodes", across[mine.index(me)]),
            group.part(f"{group.name}-inside-nodes", mine),
            tuple(group.ranks.index(rank) for place in across for rank in place),
        )


def span_nodes(ranks: Sequence[int], node_of: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of a group by node, ascending; pure.

    Args:
        ranks: global ranks.
        node_of: the node of every global rank.
    """
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(node_of[rank], []).append(rank)
    return [tuple(part) for part in found.values()]
