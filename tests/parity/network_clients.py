"""Clients of a network in threads of the test, and runs that they take part in."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import PacelineError
from paceline.recipe import Recipe
from paceline.session.federated_client import ClientSettings, FederatedClient
from paceline.session.session import Session
from paceline.session.train_rank import train
from tests.ports import free_port
from tests.recipes import recipe_of

KEY = "the key of the job"
_BUILDING = threading.Lock()
"""Sessions of one process are built one after another: they seed the generators of the process."""
SIZES = {"site-0": 12, "site-1": 9, "site-2": 20, "site-3": 7}


def make_task(
    name: str = "", *, rest_seconds: float = 0.0, bad: bool = False, width: int = 6, offset: float = 0.0
) -> Task:
    """A regression with the data of one client, or of all of them.

    Args:
        name: of the client; empty: all.
        rest_seconds: that each step takes longer.
        bad: its targets are not finite.
        width: of the hidden layer.
        offset: added to every feature.
    """
    sources = {}
    for number, (site, n) in enumerate(SIZES.items()):
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(number)) + offset
        y = x.sum(1, keepdim=True) * (math.nan if bad else 1.0) + number
        sources[site] = TensorDataset(x, y)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(model: nn.Module, batch: Any) -> Loss:
        if rest_seconds:
            time.sleep(rest_seconds)
        x, y = batch
        return Loss(F.mse_loss(model(x), y, reduction="sum"), len(x))

    return Task(model, loss=loss, clients={name: sources[name]} if name else sources)


def network_recipe(folder: Path, port: int, **settings: Any) -> Recipe:
    """A recipe whose clients connect at a port."""
    federated = {"clients": "network", "cohort": 4, "at_least": 4, "listen": f"127.0.0.1:{port}"}
    return _recipe(
        "sync=federated:1 channel=grpc", folder, federated | settings.pop("federated", {}), settings
    )


def simulated_recipe(folder: Path, **settings: Any) -> Recipe:
    """The recipe of the same clients, simulated."""
    federated = {"clients": 4, "cohort": 4, "partition": "natural"} | settings.pop("federated", {})
    return _recipe("sync=federated:1", folder, federated, settings)


def _recipe(strategy: str, folder: Path, federated: Mapping[str, Any], settings: dict[str, Any]) -> Recipe:
    defaults: dict[str, Any] = {
        "steps": 4,
        "batch": {},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "reproducible": True,
        "runtime": {"threads": 1, "deadline_seconds": 60.0},
    }
    return recipe_of(strategy, **(defaults | settings | {"federated": federated, "run_dir": str(folder)}))


class _BuiltInTurn(FederatedClient):
    def _build(self, text: str) -> Session:
        with _BUILDING:
            return super()._build(text)


class ClientThread:
    """A client in a thread; `error` is what it has raised."""

    def __init__(self, port: int, name: str, task: Any = None, **settings: Any) -> None:
        given = task or partial(make_task, name)

        def build() -> Task:
            built: Task = given()
            return built

        values = {"token": KEY, "deadline_seconds": 60.0} | settings
        self.said: list[str] = []
        self.error: BaseException | None = None
        self._client = _BuiltInTurn(
            ClientSettings("127.0.0.1", port, name, task=build, base_dir=Path.cwd(), **values),
            self.said.append,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._client.run()
        except (PacelineError, OSError, RuntimeError) as error:
            self.error = error

    @property
    def num_works(self) -> int:
        """How many works it has returned."""
        return self._client.num_works

    def wait(self, seconds: float = 60.0) -> None:
        """Wait for its end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.said


@contextmanager
def clients(
    port: int, tasks: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[list[ClientThread]]:
    """The four clients, each with a task of its own if `tasks` has one; they end well."""
    threads = [ClientThread(port, name, (tasks or {}).get(name), **settings) for name in SIZES]
    yield threads
    for thread in threads:
        thread.wait()
        assert thread.error is None, thread.error


def trained(recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, list[dict[str, Any]]]]:
    """Train as a server, or simulate; returns the weights and the events of the run."""
    result = train(recipe, make_task)
    assert result.model is not None and recipe.run_dir is not None
    weights = {name: value.clone() for name, value in result.model.state_dict().items()}
    return weights, events_of(Path(recipe.run_dir))


def events_of(folder: Path, file: str = "metrics.jsonl") -> dict[str, list[dict[str, Any]]]:
    """The events of a run by name."""
    events: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, (folder / file).read_text().splitlines()):
        events.setdefault(record["event"], []).append(record)
    return events


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two models are equal."""
    return all(torch.equal(value, other[name]) for name, value in one.items())


def wait_for_server(port: int, seconds: float = 60.0) -> None:
    """Wait until a server listens."""
    expires = time.monotonic() + seconds
    while time.monotonic() < expires:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def new_port() -> int:
    """A port for the server of a test."""
    return free_port()
