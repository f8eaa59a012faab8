"""What the ranks of a user's own loop say to each other beside gradients: values, and what is done next.

A rank that has no samples in a step does not run the loop's body, and has to take part in what the others do
there. Nobody knows before a loop runs how many updates it makes in a step, or what it asks of all ranks in
between, so such ranks are told. Nothing is told in a step in which every rank has samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.text import gather_bytes, gather_texts
from paceline.training.reduced import as_bytes, from_bytes, reduced, require_how
from paceline.training.session import Session


class Told(NamedTuple):
    """What comes next.

    Args:
        what: "update" or "reduce".
        name: of the part that is updated, or of the reduction.
        metrics: names of those of the update's loss.
    """

    what: str
    name: str
    metrics: Sequence[str] = ()


class BetweenRanks:
    """Of one session. Wire: a ragged all_gather of some bytes for each thing that is told."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def tell(self, told: Told | None) -> None:
        """From a rank with samples: what comes now; None: nothing more in this step."""
        if self._are_any_idle():
            self._exchange(told)

    def hear_update(self) -> Told | None:
        """On a rank without samples: the next update; values that come before it have nothing from here."""
        while (told := self._exchange(None)) is not None and told.what == "reduce":
            self._gather(b"")
        return told

    def reduce(self, value: Tensor | float, how: str, *, tells: bool) -> Tensor:
        """See `OwnLoop.reduce`.

        Args:
            tells: ranks without samples do not know of it.
        """
        require_how(how)
        own = torch.as_tensor(value).detach()
        if tells:
            self.tell(Told("reduce", how))
        values = [from_bytes(data) for data in self._gather(as_bytes(own)) if data]
        return reduced(values, how).to(own.device)

    def _gather(self, data: bytes) -> list[bytes]:
        return gather_bytes(data, self._session.mesh.world, self._session.net)

    def _exchange(self, mine: Told | None) -> Told | None:
        texts = gather_texts(json.dumps(mine), self._session.mesh.world, self._session.net)
        return next((Told(*told) for told in map(json.loads, texts) if told is not None), None)

    def _are_any_idle(self) -> bool:
        work, step, replicas = self._session.work, self._session.state.step, self._session.mesh.data.size
        if work.num_samples(step) >= work.shards:
            return False
        return not all(work.part(rank, replicas).num_micro_batches(step) for rank in range(replicas))
