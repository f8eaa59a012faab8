"""What a rank reduces: which gradients, over how many ranks, on which paths. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from paceline.comm.reduction import PartBuffer, behind_bytes
from paceline.data import split
from paceline.layout.placement import Held
from paceline.layout.sizes import Sizes, bytes_of
from paceline.plan.buckets import Bucket, Laid, reductions_of, sizes_in
from paceline.recipe import Recipe

Arriving = Literal["given", "in place", "apart"]
"""Where what others send in a scatter comes: in memory that whoever scatters gives, in the rows that are
scattered, or in memory that the path allocates for it.
"""


def arriving_of(recipe: Recipe, trained: Iterable[Tensor]) -> Arriving:
    """Where what comes in scatters of these tensors does; see `NativeCollective.reduce_scatter`."""
    route, shards = recipe.strategy.path, recipe.strategy.shard
    if recipe.strategy.is_coded:
        return "apart"
    if route.hops and not route.in_memory:
        return "in place"
    adds = all(p.is_floating_point() and (p.element_size() > 2 or shards == 2) for p in trained)
    given = route.word in ("native", "auto") and adds and recipe.runtime.device != "cuda"
    return "given" if given else "apart"


@dataclass(frozen=True)
class Reduced:
    """The gradients of a rank.

    Args:
        recipe: its strategy has its replicas filled in.
        held: what the rank holds, in the model's order; `item_bytes` by name, of one value.
        sizes: of that.
        shards: micro-batches of a step, over all ranks.
        common: sums are made in memory that ranks share. What coding has to make them is not counted here.
        arriving: where what others send in scatters comes.
        completes: names of tensors, in the order in which a backward completes their gradients.
        blocks: names of what is gathered at a time, where ranks gather in backward.
    """

    recipe: Recipe
    held: Sequence[Held]
    item_bytes: Mapping[str, int]
    sizes: Sizes
    shards: int
    common: bool
    arriving: Arriving
    completes: Sequence[str] = ()
    blocks: Sequence[Collection[str]] = ()

    @property
    def sharers(self) -> int:
        """Ranks that run samples of a step of their own, and sum it."""
        strategy = self.recipe.strategy
        copies = strategy.degrees["replica"] if strategy.rule.agrees == "world" else 1
        return strategy.shard * copies

    @property
    def runners(self) -> int:
        """Ranks among which the micro-batches of a step are divided, whoever sums what they find."""
        strategy = self.recipe.strategy
        return strategy.shard * (strategy.replicas or 1)

    @property
    def is_summed(self) -> bool:
        """Whether any other rank adds to these gradients."""
        return self.sharers * self.recipe.strategy.context > 1

    @property
    def leaves_often(self) -> bool:
        """Whether gradients leave with every micro-batch."""
        recipe, frees = self.recipe, any(one.frees for one in self.held)
        return frees and self.is_summed and not recipe.is_ordered and recipe.strategy.form.exact

    @property
    def in_memory(self) -> bool:
        """Whether scatters go through memory that ranks share: what is coded does not."""
        return self.common and not self.recipe.strategy.is_coded

    @property
    def most_micro_batches(self) -> int:
        """Of a step, on the rank that has most."""
        return max(len(split(self.shards, self.runners, rank)) for rank in range(self.runners))

    @property
    def is_even(self) -> bool:
        """Whether all ranks run as many micro-batches."""
        return self.shards % self.runners == 0

    @cached_property
    def reductions(self) -> list[Laid]:
        """In the order of a run."""
        recipe, often = self.recipe, self.leaves_often
        multiple = self.sharers // recipe.strategy.shard if recipe.is_ordered else 1
        return reductions_of(recipe, self.held, self.item_bytes, often=often, multiple=multiple)

    @property
    def often(self) -> list[Laid]:
        """Those that leave with every micro-batch; others meet inside a replica first, once a step."""
        return [one for one in self.reductions if self.leaves_often and not one.meets]

    @property
    def laid_apart(self) -> list[PartBuffer]:
        """Buckets that are scattered once a step, by messages of values as they are, a few at a time."""
        strategy = self.recipe.strategy
        waits = self.recipe.batch.sync_batchnorm or self.recipe.is_ordered
        is_apart = strategy.shard > 1 and not (self.common or strategy.is_coded or self.leaves_often)
        return [x for one in self.reductions for x in one.buffers] if is_apart and not waits else []

    @property
    def by_block(self) -> tuple[list[int], int]:
        """Bytes of each block, and of what lies in none."""
        sizes = {one.computes.name: bytes_of(one.computes, self.item_bytes) for one in self.held}
        blocks = [sum(sizes[name] for name in block) for block in self.blocks]
        return blocks, sum(sizes.values()) - sum(blocks)

    @property
    def behind(self) -> int:
        """See `behind_bytes`; where ranks gather in backward."""
        return behind_bytes(*self.by_block)

    @property
    def passing(self) -> float:
        """Of the bytes of a scatter, how many it takes from memory that does not stay."""
        if self.in_memory or self.recipe.strategy.is_coded or self.arriving == "in place":
            return 0.0
        if self.arriving == "apart":
            return 1.0
        shards = self.recipe.strategy.shard
        return (shards - 1) / shards if self.blocks else 0.0

    @property
    def takes_row(self) -> bool:
        """Whether a sum of scattered rows has memory of its own once it is there."""
        return bool(self.passing) and self.arriving == "apart"

    @property
    def keeps(self) -> bool:
        """Whether the rank keeps in memory what it computes with."""
        return all(one.kept for one in self.held)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Of all reductions."""
        return sizes_in(self.reductions)
