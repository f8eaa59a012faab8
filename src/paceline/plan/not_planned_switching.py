"""What a state takes that goes from rank to rank, tensor by tensor; see `paceline.parallel.state_transfer`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from paceline.parallel.placement import TensorPlacement, slot_bytes
from paceline.parallel.state_transfer import bytes_per_transfer, split_by_bytes
from paceline.recipe.recipe import Recipe
from paceline.state.slot import trained_parameters


class Travels(NamedTuple):
    """A tensor of a state.

    Args:
        whole: its bytes, of all that have some of their own.
        own: of those, what this rank goes on from.
        inside, apart: ranks of one replica hold parts of it; or ranks of all replicas do.
    """

    whole: int
    own: int
    inside: bool = False
    apart: bool = False


@dataclass(frozen=True)
class State:
    """What a checkpoint holds, and one rank of it.

    Args:
        recipe: under one rule.
        model: the task's, without values.
        held: what the rank holds of trained tensors, by name; `item_bytes` of one value.
        kept: bytes of the optimizer for each byte that it updates.
        saved: bytes of what the rule keeps and saves.
    """

    recipe: Recipe
    model: nn.Module
    held: Mapping[str, TensorPlacement]
    item_bytes: Mapping[str, int]
    kept: float
    saved: int

    def tensors(self, after: State) -> dict[str, Travels]:
        """By name.

        Args:
            after: of the rule that goes on from it, for the same rank.
        """
        trained = {slot.name: p.nbytes for slot, p in trained_parameters(self.model).items()}
        found = {
            f"model/{name}": Travels(value.nbytes, value.nbytes)
            for name, value in self.model.state_dict(keep_vars=True).items()
            if not value.requires_grad
        }
        for name, whole in trained.items():
            found |= {f"{word}/{name}": one for word, one in self._of(name, whole, after)}
        return found

    def _of(self, name: str, whole: int, after: State) -> Iterator[tuple[str, Travels]]:
        """What there is of a trained tensor, under words that come in the order of those of a run."""
        own, computes = self._updates(name), self._computes(name)
        part = Travels(whole, own, inside=own < whole)
        yield "model", Travels(whole, computes, inside=computes < whole)
        if self.recipe.average.decay is not None:
            yield "average", part
        for number in range(round(self.kept)):
            yield f"optimizer/{number}", part
            for replica in range(self._alone):
                is_mine = after._alone > 1 and not replica
                yield f"inner/{replica}/{number}", Travels(whole, own * is_mine, apart=True)
        for number in range(round(self.saved / max(1, sum(map(self._updates, self.held))))):
            yield f"outer/{number}", part._replace(own=own * (after.saved > 0))

    @property
    def _alone(self) -> int:
        """Replicas that have moments of their own."""
        strategy = self.recipe.strategy
        return strategy.degrees["replica"] if strategy.rule.agrees == "replica" else 0

    def _updates(self, name: str) -> int:
        one = self.held.get(name)
        return 0 if one is None or one.updates is None else slot_bytes(one.updates, self.item_bytes)

    def _computes(self, name: str) -> int:
        one = self.held.get(name)
        if one is None or not one.kept:
            return self._updates(name)
        return slot_bytes(one.computes, self.item_bytes)


def most_on_its_way(
    tensors: Mapping[str, Travels], inside: int, world: int, parts: int, *, is_first: bool
) -> int:
    """The most bytes that a rank has of a state while it takes its own from others, with what it has taken.

    Args:
        inside, world: ranks of a replica, and all; each may send as much as the one that has most.
        parts: in how many a tensor is cut; stages hold it whole.
        is_first: this one sends them to all.
    """
    sizes = {name: one.whole for name, one in sorted(tensors.items())}
    most = taken = 0
    for names in split_by_bytes(sizes, bytes_per_transfer(sum(sizes.values()))):
        here = [tensors[name] for name in names]
        split = sum(one.whole for one in here if one.inside and not one.apart)
        apart, total = sum(one.whole for one in here if one.apart), sum(one.whole for one in here)
        sent = split * (1 + (2 + inside) / parts), apart * (1 + (2 + world) / parts)
        gathered = max(sent[0], split + sent[1] if apart else 0)
        most = max(most, int(taken + gathered))
        taken += sum(one.own for one in here)
        most = max(most, taken + total + (split + apart if is_first else 0))
    return most
