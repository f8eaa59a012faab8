"""Simulators of federated learning that are installed, with the clients and samples of the comparison."""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class PflModel(nn.Module):
    """The model with the two methods that pfl calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.inner(x)
        return logits

    def loss(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, **options: Any) -> dict[str, Any]:
        """Return none."""
        return {}


def pfl_rounds(order: ClientOrder, task: Task, rate: float) -> Callable[[], float]:
    """Rounds of pfl's FedAvg without evaluation; it reports no loss. It draws clients and orders itself."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    torch_model = PflModel(copy.deepcopy(task.model))
    server = torch.optim.SGD(torch_model.parameters(), 1.0)
    model = PyTorchModel(torch_model, torch.optim.SGD, server)
    users = [Dataset(tuple(t[indices] for t in task.data.tensors)) for indices in order.clients.indices]
    draws = random.Random(1)
    data = FederatedDataset(users.__getitem__, lambda: draws.randrange(len(users)))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    algorithm, local, number = FederatedAveraging(), NNTrainHyperParams(10, 1, rate), 0
    size = order.settings.cohort_size.number

    def step() -> float:
        nonlocal number
        number += 1
        limits = NNAlgorithmParams(number, 10**9, size, 0)
        algorithm.run(limits, backend, model, local, send_metrics_to_platform=False)
        return math.nan

    return step


def flower_records(order: ClientOrder, task: Task, rate: float) -> Callable[[], float]:
    """FedAvg with Flower's records and aggregation, called directly: no runtime, processes or messages."""
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    logging.getLogger("flwr").setLevel(logging.ERROR)
    rounds, model = ClientBatches(order, task), copy.deepcopy(task.model)
    arrays = ArrayRecord(model.state_dict())

    def train_client(content: Any, batches: list[Batch]) -> Any:
        model.load_state_dict(content["arrays"].to_torch_state_dict())
        optimizer, total, count = torch.optim.SGD(model.parameters(), content["config"]["lr"]), 0.0, 0
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(x), count + len(x)
        metrics = MetricRecord({"train_loss": total, "num-examples": count})
        return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})

    def step() -> float:
        nonlocal arrays
        config = ConfigRecord({"lr": rate})
        replies = [
            train_client(RecordDict({"arrays": arrays, "config": config}), batches)
            for batches in rounds.next_round()
        ]
        arrays = aggregate_arrayrecords(replies, "num-examples")
        count = sum(reply["metrics"]["num-examples"] for reply in replies)
        return sum(float(reply["metrics"]["train_loss"]) for reply in replies) / float(count)

    return step


def flower_simulation(order: ClientOrder, task: Task, rate: float, num_rounds: int) -> list[float]:
    """Run Flower's simulation with Ray, two actors of one thread each; return when each round began."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    settings, model = order.settings, copy.deepcopy(task.model)
    x, y = task.data.tensors
    indices = [torch.as_tensor(i) for i in order.clients.indices]
    began: list[float] = []

    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        own = indices[int(context.node_config["partition-id"])]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, total = torch.optim.SGD(model.parameters(), message.content["config"]["lr"]), 0.0
        for rows in own[torch.randperm(len(own))].split(settings.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        metrics = MetricRecord({"train_loss": total / len(own), "num-examples": len(own)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    def main(grid: Grid, context: Context) -> None:
        fraction = settings.cohort_size.number / len(indices)
        config = ConfigRecord({"lr": rate})
        strategy = FedAvg(fraction_train=fraction, fraction_evaluate=0.0)
        configure = strategy.configure_train

        def timed(*args: Any, **kwargs: Any) -> Any:
            began.append(time.perf_counter())
            return configure(*args, **kwargs)

        strategy.configure_train = timed
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=num_rounds, train_config=config)

    client_app.train()(train)
    server_app.main()(main)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=len(indices), backend_config=resources)
    return began


PEERS: Mapping[str, tuple[str, BuildPeer]] = {
    "pfl": ("pfl", pfl_rounds),
    "Flower's records, without its runtime": ("flwr", flower_records),
}
