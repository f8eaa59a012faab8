"""What is kept of each client between rounds: control variates of a task, and errors of a codec.

Clients keep nothing on a rank by themselves, because the next round may run them on another one. A
`KeptVectors` holds one vector for each client that has returned an update, on a rank that follows from the
name of the client; it travels to the rank that runs the client and back. A task asks for such a vector with a
`ClientKeeper`, for example for SCAFFOLD (docs/howto/federated.md).

Invariant: what is kept does not depend on the number of ranks, and it changes only when a client's update was
counted. It is part of the state, so a resumed run continues with it on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.state.keys import key
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot

_SHARED_NAME = "shared"
_CLIENT_PREFIX = "client/"
_SUM_NAME = "#shared"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LocalTraining:
    """The local training of a client that has ended.

    Args:
        client: its name.
        kept: what was kept of it, by name.
        shared: what all clients share, as at the start of the round.
        update: its weights minus those at the start of the round, float64, by the name of the parameter.
        num_steps: its local steps.
        lr: their rate.
        num_clients: clients of the run, whether or not they take part.
    """

    client: str
    kept: Tensors
    shared: Tensors
    update: Tensors
    num_steps: int
    lr: float
    num_clients: int


@dataclass(frozen=True)
class KeeperChange:
    """Result of the work of one client.

    Args:
        kept: of the client from now on; all names of `ClientKeeper.kept`.
        shared: added to what all clients share, after the round; all names of `ClientKeeper.shared`.
    """

    kept: Tensors
    shared: Tensors


class ClientKeeper(Protocol):
    """State that a task keeps of each client, and its effect on local training: `Task(keeper=...)`.

    Every method is a function of its arguments: a keeper holds nothing itself.
    """

    def kept(self, parameters: Tensors) -> Tensors:
        """Return the first values of what is kept of a client, from the trained parameters by name."""

    def shared(self, parameters: Tensors) -> Tensors:
        """Return the first values of what all clients share."""

    def correction(self, kept: Tensors, shared: Tensors) -> Tensors:
        """Return what is added to the mean gradient of every local step, by the name of the parameter."""

    def after(self, training: LocalTraining) -> KeeperChange:
        """Return what a client leaves behind; called on the rank that ran it."""


class VectorLayout:
    """Named tensors as one vector, in the order of their names.

    Args:
        tensors: of the shapes; may be empty.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._shapes = {name: tensors[name].shape for name in sorted(tensors)}

    def pack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """Return the vector of all values."""
        pieces = [tensors[name].detach().reshape(-1).to(dtype) for name in self._shapes]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=dtype)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector by name."""
        pieces = vector.split([shape.numel() for shape in self._shapes.values()]) if self._shapes else ()
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


class KeptVectors(ExtraState):
    """A vector for each client, held by one rank each.

    Args:
        first: the vector of a client that has returned no update yet, [values].
        group: the ranks that share the clients.
        net: of this rank.
        shared: a vector that is equal on all ranks, saved with the others; None: there is none.
    """

    def __init__(self, first: Tensor, group: RankGroup, net: Net, shared: Tensor | None = None) -> None:
        self._first, self._group, self._net = first, group, net
        self._held: dict[str, Tensor] = {}
        self.shared = shared

    def _is_own(self, client: str) -> bool:
        return key("client", client) % self._group.size == self._group.rank

    @property
    def num_held(self) -> int:
        """Return the number of vectors on this rank."""
        return len(self._held)

    def fetch(self, cohort: Sequence[str]) -> dict[str, Tensor]:
        """Return the vector of each client of a cohort; collective.

        Wire: one all_reduce of the vectors of the cohort; none on one rank.
        """
        rows = self._first.new_zeros(len(cohort), len(self._first))
        for row, client in zip(rows, cohort, strict=True):
            if self._is_own(client):
                row.copy_(self._held.get(client, self._first))
        # Every row comes from one rank, and the others add zeros.
        return dict(zip(cohort, self._agree(rows), strict=True))

    def keep(self, cohort: Sequence[str], vectors: Mapping[str, Tensor]) -> None:
        """Keep the vectors of the clients that have returned an update; collective.

        Args:
            vectors: of those that ran on this rank.
        Wire: as `fetch`, and one value for each client.
        """
        rows = self._first.new_zeros(len(cohort), len(self._first) + 1)
        for row, client in zip(rows, cohort, strict=True):
            if client in vectors:
                row[:-1], row[-1] = vectors[client], 1.0
        for row, client in zip(self._agree(rows), cohort, strict=True):
            if self._is_own(client) and row[-1]:
                self._held[client] = row[:-1].clone()

    def _agree(self, rows: Tensor) -> Tensor:
        return self._net.all_reduce(rows, self._group).wait() if self._group.size > 1 and len(rows) else rows

    def pieces(self) -> list[TensorPiece]:
        """Return the vectors of this rank, `client/NAME`, and the shared one."""
        pieces = [TensorPiece(_slot(client, vector), vector) for client, vector in sorted(self._held.items())]
        if self.shared is not None:
            pieces.append(TensorPiece(TensorSlot.whole(_SHARED_NAME, self.shared), self.shared))
        return pieces

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return the vectors of the clients of this rank, and the shared one."""
        return {name: () for name in shapes if name == _SHARED_NAME or self._is_own(_client_of(name))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned."""
        self._held = {_client_of(n): v.detach().clone() for n, v in tensors.items() if n != _SHARED_NAME}
        if self.shared is not None and _SHARED_NAME in tensors:
            self.shared.copy_(tensors[_SHARED_NAME])


def _client_of(name: str) -> str:
    return name.removeprefix(_CLIENT_PREFIX)


def _slot(client: str, vector: Tensor) -> TensorSlot:
    return TensorSlot.whole(f"{_CLIENT_PREFIX}{client}", vector).on("replica")


class KeeperRounds:
    """State that a task keeps of clients, in the rounds of one rank.

    Args:
        keeper: of the task.
        parameters: trained, by name.
        group, net: as for `KeptVectors`.
    Attributes:
        slot: of the sum of what clients add to what they share.
        vectors: the state.
        correction: of the present client, by the name of the parameter.
    """

    def __init__(self, keeper: ClientKeeper, parameters: Tensors, group: RankGroup, net: Net) -> None:
        kept, shared = keeper.kept(parameters), keeper.shared(parameters)
        self._keeper, self._kept, self._shared = keeper, VectorLayout(kept), VectorLayout(shared)
        wide = any(value.dtype == torch.float64 for value in kept.values())
        first = self._kept.pack(kept, torch.float64 if wide else torch.float32)
        self.shared = self._shared.pack(shared, torch.float64)
        self.slot = TensorSlot.whole(_SUM_NAME, self.shared)
        self.vectors = KeptVectors(first, group, net, self.shared)
        self.correction: Tensors = {}
        self._fetched: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    def begin_round(self, cohort: Sequence[str]) -> None:
        """Fetch what is kept of the clients of a cohort; collective."""
        self._fetched, self._changed = self.vectors.fetch(cohort), {}

    def begin_client(self, client: str) -> None:
        """Set the correction of a client."""
        self.correction = self._keeper.correction(*self._present(client))

    def _present(self, client: str) -> tuple[Tensors, Tensors]:
        return self._kept.unpack(self._fetched[client]), self._shared.unpack(self.shared)

    def end_client(self, client: str, update: Tensors, num_steps: int, lr: float, num_clients: int) -> Tensor:
        """Note what a client leaves behind, whose update was counted; return what it adds to `shared`."""
        training = LocalTraining(client, *self._present(client), update, num_steps, lr, num_clients)
        change = self._keeper.after(training)
        self._changed[client] = self._kept.pack(change.kept, self._fetched[client].dtype)
        return self._shared.pack(change.shared, torch.float64)

    def end_round(self, cohort: Sequence[str], added: Tensor | None) -> None:
        """Keep what the clients left behind, and add the sum over them to what they share; collective."""
        self.vectors.keep(cohort, self._changed)
        if added is not None:
            self.shared.add_(added)
