"""Simulators of federated learning that are installed, with the clients and samples of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paceline.federated.cohorts import ClientOrder
from paceline.task import Task

Batch = tuple[Tensor, Tensor]


class ClientBatches:
    """The batches of the clients of each round, the same as in a session; read before the clock starts.

    Args:
        order: of the clients.
        task: its data is a `TensorDataset`.
    """

    _NUM_ROUNDS = 1000  # then they are repeated

    def __init__(self, order: ClientOrder, task: Task) -> None:
        self._rounds = [
            [
                [(task.data.tensors[0][b.indices], task.data.tensors[1][b.indices]) for b in batches]
                for batches in (order.micro_batches(number, member) for member in order.cohort(number))
            ]
            for number in range(self._NUM_ROUNDS)
        ]
        self._number = 0

    def next_round(self) -> list[list[Batch]]:
        """Return the batches of each client of the next round."""
        number, self._number = self._number, self._number + 1
        return self._rounds[number % self._NUM_ROUNDS]


BuildPeer = Callable[[ClientOrder, Task, float], Callable[[], float]]
PEERS: Mapping[str, tuple[str, BuildPeer]] = {}
