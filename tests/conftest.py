"""What many tests use: quick workers, and runs that are trained once, by the command line."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from paceline.job.cluster import change_environment, process_environment
from paceline.launch import fork_server
from paceline.session.reproducibility import MKL_EQUAL_ROWS, MKL_VARIABLE, needs_equal_rows
from tests.commands import run
from tests.marks import is_further_cell

hypothesis.settings.register_profile("busy", deadline=None)  # how long a case takes is not what is tested
hypothesis.settings.load_profile("busy")

if needs_equal_rows():
    # Here, since a process that has computed a product cannot change it, and processes run many tests.
    change_environment({MKL_VARIABLE: process_environment().get(MKL_VARIABLE, MKL_EQUAL_ROWS)})

_UNIT = Path(__file__).parent / "unit"
STEPS, EVERY = 50, 20
TASK = """
import time

import torch
from torch import nn
from torch.nn import functional as F

from paceline import Cluster, Loss, Task


def build(rest_seconds=0.05):
    points = torch.rand(512, 2, generator=torch.Generator().manual_seed(0))
    data = list(zip(points, (points.sum(1) > 1).long(), strict=True))
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    slow = Cluster.from_env().global_rank == 1

    def loss(model, batch):
        x, y = batch
        if slow:
            time.sleep(rest_seconds)  # rank 1 is the one that the others wait for
        out = model(x)
        right = (out.argmax(-1) == y).sum()
        return Loss(F.cross_entropy(out, y, reduction="sum"), len(y), {"accuracy": right})

    return Task(model, data=data[:448], loss=loss, held_out=data[448:])
"""
RECIPE = f"""
task = "task.py:build"
steps = {STEPS}
[batch]
size = 32
shards = 2
[optimizer]
lr = 1e-2
[schedule]
decay = "cosine"
[evaluate]
every_steps = {EVERY}
"""


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Args:
        folder: of the run.
        printed: by the command that trained it.
        records: of its metrics, as they stand in the file.
    """

    folder: Path
    printed: str
    records: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The records of one event."""
        return [record for record in self.records if record["event"] == event]


Train = Callable[..., Trained]


def pytest_configure() -> None:
    """A suite that `nohup` starts ignores Ctrl-C, and so would its processes, which are tested with it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave further cells of contracts to `make soak`.

    Rooms with long tests come first: files are dealt in this order, and none should be the last.
    """
    for item in items:
        if isinstance(item, pytest.Function) and is_further_cell(item):
            item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: item.path.is_relative_to(_UNIT))


@pytest.fixture(scope="session", autouse=True)
def own_share_of_the_cores() -> None:
    """Tests that run at a time must not wait for each other's intra-op threads, nor must their commands."""
    at_a_time = int(process_environment().get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if at_a_time > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // at_a_time))
        change_environment({"OMP_NUM_THREADS": str(torch.get_num_threads())})


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A test that sets the number of intra-op threads changes no test after it."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def quick_workers() -> Iterator[None]:
    """The workers of commands are forked, where that makes no difference but in time."""
    with fork_server(["tests.preloaded"]) as variables:
        change_environment(variables)
        yield
        change_environment(dict.fromkeys(variables))


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train the recipe above in a folder of its own, where the run makes a folder under `runs/`."""

    def start(*arguments: str, processes: int = 2) -> Trained:
        place = tmp_path_factory.mktemp("project")
        (place / "task.py").write_text(TASK)
        (place / "recipe.toml").write_text(RECIPE)
        done = run(place, "train", "recipe.toml", "-n", processes, *arguments)
        assert done.returncode == 0, done.stderr
        (folder,) = (place / "runs").iterdir()
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return Trained(folder, done.stdout, [json.loads(line) for line in lines])

    return start


@pytest.fixture(scope="session")
def trained(train: Train) -> Trained:
    """Two processes, the second of which is slower."""
    return train()


@pytest.fixture(scope="session")
def trained_alone(train: Train) -> Trained:
    """One process, another rate, everything written."""
    return train("--set", "optimizer.lr=1e-3", "--set", "log.level=debug", processes=1)
