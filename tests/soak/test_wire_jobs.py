"""Short jobs over routes and codecs, drawn by a seed: none hangs, none ends elsewhere than it should.

A job is a session of its own in processes that stay for some jobs: groups, threads, sockets and memory are
made and left by each. What three hundred jobs had left made the last ones slow, as each process group that is
left has three threads, one of which wakes a hundred times a second. Another `SEED` is another draw.
"""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy, support
from paceline.session import build_session
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU

SEED, JOBS, STEPS = 18, 1000, 3
TOGETHER = 100  # jobs in the same processes, a third of them on each number of ranks
ROUTES = ("native", "ring", "tree", "recursive-doubling", "grid", "shared-memory", "auto")
EXACT = ("fp32", "lossless")
CODECS = (
    *EXACT,
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int2",
    "int8:stochastic",
    "fixed:8",
    "sign",
    "topk:0.1",
    "topk:5+int4",
    "randomk:0.2",
    "lowrank:1",
    "int4+lossless",
)
LAYOUTS = ("replicas={n}", "replicas=1 shard={n} zero=1", "replicas=1 shard={n} zero=3")
RULES = ("", "", "sync=local:2", "sync=diloco:3")


class Found(NamedTuple):
    """Of one job on one rank: its words, what is wrong, and the bytes of its model."""

    words: str
    wrong: str
    bits: bytes


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), len(x))


def make_task(width: int) -> Task:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return Task(model, TensorDataset(x, x[:, :2] * 0.5), squared_error)


def drawn(number: int, world: int) -> tuple[str, int, int]:
    """The words of a job, the width of its model, and the bytes of a bucket; pure."""
    draw = random.Random(f"{SEED} {number}")
    route, layout = draw.choice(ROUTES), draw.choice(LAYOUTS)
    codec = "fp32" if route == "shared-memory" else draw.choice(CODECS)
    rule = draw.choice(RULES) if layout == LAYOUTS[0] else ""
    words = " ".join(filter(None, (layout.format(n=world), rule, f"route={route}", f"codec={codec}")))
    return words, draw.choice((1, 7, 40, 300)), draw.choice((64, 900, 1 << 20))


def job(cluster: Cluster, words: str, width: int, bucket_bytes: int) -> dict[str, Tensor]:
    """The whole model at the end."""
    recipe = Recipe(
        task="given",
        steps=STEPS,
        strategy=Strategy.parse(words),
        batch={"size": 12, "shards": 4},
        optimizer={"name": "sgd", "lr": 0.01},
        runtime={"device": "cpu", "deadline_seconds": 60.0, "bucket_bytes": bucket_bytes},
    )
    session = build_session(recipe, make_task(width), cluster, CPU, warn=lambda _: None)
    for _ in session.rounds():
        pass
    tensors = session.snapshot().tensors()
    whole = {name: x.clone() for name, x in tensors.items() if name.startswith("model/")}
    session.close()
    return whole


def jobs(cluster: Cluster, world: int, numbers: list[int]) -> dict[int, Found]:
    """By number, what every job that is not refused has found."""
    torch.set_num_threads(1)
    found = {}
    for number in numbers:
        words, width, bucket_bytes = drawn(number, world)
        strategy = Strategy.parse(words)
        if not support(strategy, processes=world, shards=4).ok:
            continue
        model = job(cluster, words, width, bucket_bytes)
        wrong = [] if all(torch.isfinite(p).all() for p in model.values()) else ["not finite"]
        if strategy.codec in EXACT:
            plain = words.replace(f"route={strategy.route}", "route=native").replace("lossless", "fp32")
            right = job(cluster, plain, width, bucket_bytes)
            off = max(float((p - right[name]).abs().max()) for name, p in model.items())
            wrong += [f"{off} from native"] if off > 1e-5 else []
        bits = b"".join(p.numpy().tobytes() for p in model.values())
        found[number] = Found(words, ", ".join(wrong), bits)
    return found


def mismatches(numbers: range, deadline: float) -> tuple[list[str], set[str]]:
    """What is wrong of some jobs, on 2, 3 and 4 ranks in turn; and the words of those that ran."""
    wrong, ran = [], set[str]()
    for world in (2, 3, 4):
        own = [number for number in numbers if number % 3 == world - 2]
        first, *others = run_ranks(partial(jobs, world=world, numbers=own), world, deadline=deadline)
        for number, one in first.items():
            ran.add(one.words)
            if one.wrong:
                wrong.append(f"{number} {one.words}: {one.wrong}")
            elif any(other[number].bits != one.bits for other in others):
                wrong.append(f"{number} {one.words}: ranks end with different models")
    return wrong, ran


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.capability("H8", "G5")
def test_a_thousand_short_jobs_neither_hang_nor_differ() -> None:
    ran = set[str]()
    for first in range(0, JOBS, TOGETHER):
        wrong, words = mismatches(range(first, first + TOGETHER), 300.0)
        assert wrong == []
        ran |= words
    for word in (*ROUTES, *CODECS):
        assert any(f"={word}" in words for words in ran), f"no job by {word} ran"
