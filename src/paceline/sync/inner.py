"""What replicas that train alone do not have in common between two rounds: optimizers, and how far they are.

A replica without samples makes no update, an expert is used by some replicas only, and a rule that keeps
numbers of its own (a distance, a counter) has others on each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.mesh import Group
from paceline.slot import Index, Keeper, Piece, Slot, below
from paceline.state import TrainState

_APART = "replica"
_OPTIMIZER = "optimizer/"
_VALUES = "values"


class InnerState(Keeper):
    """The optimizer, the loss scale and the number of updates of every replica, under names of its own.

    Under another number of replicas each goes on from what the first one had.

    Args:
        replica: one rank of each.
        inside: the ranks of this one: each has tensors and a text of what it updates.
    """

    def __init__(self, state: TrainState, replica: Group, inside: Group) -> None:
        self._state, self._mine = state, f"{replica.rank} of {replica.size}"
        self._text = f"{_VALUES}/{inside.rank}" if inside.rank else _VALUES

    def pieces(self) -> list[Piece]:
        """What this rank has of its replica: its tensors, and one text with the rest."""
        text = torch.frombuffer(bytearray(json.dumps(self._values()), "utf-8"), dtype=torch.uint8)
        found = [Piece(Slot.whole(self._text, text), text)]
        for piece in self._state.optimizer_pieces():
            name = piece.slot.name.removeprefix(_OPTIMIZER)
            found.append(Piece(replace(piece.slot, name=f"tensors/{name}"), piece.tensor))
        return [Piece(p.slot.on(_APART), p.tensor).under(self._mine) for p in found]

    def _values(self) -> dict[str, Any]:
        scale = self._state.scale
        return {
            "updates": self._state.updates,
            "scale": {"value": scale.value, "clean_steps": scale.clean_steps},
            "optimizer": self._state.kept.values(),
            "groups": self._state.groups.changed(),
        }

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """What this replica had, if there are as many replicas as then; of texts all that its ranks had."""
        prefix = f"{self._mine}/tensors/"
        own = {f"{_OPTIMIZER}{name}": shape for name, shape in below(shapes, prefix).items()}
        found = {name.replace(_OPTIMIZER, prefix, 1): i for name, i in self._state.kept.wanted(own)}
        return found | {name: () for name in shapes if self._is_text(name)}

    def _is_text(self, name: str) -> bool:
        text = f"{self._mine}/{_VALUES}"
        return name == text or name.startswith(f"{text}/")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Keeper`."""
        texts = [json.loads(bytes(t.tolist())) for name, t in tensors.items() if self._is_text(name)]
        if not texts:
            return
        values, prefix, state = texts[0], f"{self._mine}/tensors/", self._state
        own = {f"{_OPTIMIZER}{name}": value for name, value in below(tensors, prefix).items()}
        state.kept.take(own, {name: value for text in texts for name, value in text["optimizer"].items()})
        state.groups.restore(values["groups"])
        state.updates = values["updates"]
        state.scale = replace(state.scale, **values["scale"])
