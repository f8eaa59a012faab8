"""A rank of a cut model has its part in memory, and nothing of what others hold, from its build on.

Bytes are those of every tensor that Python can reach, by storage; what travels natively has no memory of its
own then. P: bytes of a whole model's parameters, S: shard ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPTConfig, gpt_chain, initialize_gpt, without_memory
from paceline.parallel import ReplicatedRunner
from paceline.parallel.pipeline import PipelineRunner
from paceline.recipe import Recipe, Strategy
from paceline.session import Components, Session
from paceline.session.checkpointing import build_saver
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.peak import bytes_now

SMALL_BYTES = 2**17  # data, buffers, one batch, numbers
BUCKET_BYTES = 2**17
Sizes = dict[str, int]


def light_gpt() -> Task:
    """A GPT that is built without memory; its embedding is the output layer too."""
    with without_memory():
        model = GPT(GPTConfig(vocab=1024, context=16, layers=4, heads=4, width=128))

    def loss(model: nn.Module, tokens: Tensor) -> Loss:
        targets = tokens[:, 1:].flatten()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return Loss(F.cross_entropy(logits, targets, reduction="sum"), targets.numel())

    return Task(
        model,
        list(torch.arange(64 * 17).remainder(1024).view(64, 17)),
        loss,
        stages=gpt_chain,
        initialize=initialize_gpt,
        tensor={"blocks.*.feed_forward.expand": "column", "blocks.*.feed_forward.project": "row"},
    )


def eager_chain() -> Task:
    """A model that somebody has built as usual, whole."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    plan = {"0": "column", "2": "row", "4": "column", "6": "row"}
    return Task(
        nn.Sequential(*layers, nn.Linear(256, 1)),
        list(torch.rand(64, 256)),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
        tensor=plan,
    )


MODELS = {"light": light_gpt, "eager": eager_chain}


def settled_bytes(before: int) -> int:
    """The thread that times calls lets go of the last one a moment later."""
    sizes = []
    for _ in range(4):
        sizes.append(bytes_now() - before)
        time.sleep(0.01)
    return min(sizes)


@dataclass
class Life:
    """Sizes in bytes, of one rank.

    Args:
        whole: of all parameters; computes, updates, shared: of those that this rank computes with, updates,
            and holds with another stage; largest: of one parameter.
        placed_bytes: when the model is placed; built: when the session is; placing: the most up to there.
        steps: after each step, the last two after a save.
        written: by this rank, of every save.
    """

    whole: int = 0
    computes: int = 0
    updates: int = 0
    shared: int = 0
    largest: int = 0
    placed_bytes: int = 0
    built: int = 0
    placing: int = 0
    steps: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


def most_allocated(record: profile) -> int:
    """The most bytes that were in use at a time, above those at the beginning."""
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def live(cluster: Cluster, strategy: str, model: str, folder: str) -> Life:
    """Build, train five steps, save twice."""
    recipe = Recipe(
        task="sum",
        steps=5,
        batch={"size": 8, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3},
        strategy=Strategy.parse(strategy),
        runtime={"bucket_bytes": BUCKET_BYTES},
        debug={"check": False},  # it keeps gradients of the whole model until it has compared them
    )
    before, life = bytes_now(), Life()
    record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def when_placed(kind: Callable[..., Any]) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            life.placed_bytes = settled_bytes(before)
            record.stop()
            return kind(*args, **kwargs)

        return build

    record.start()
    components = Components(whole=when_placed(ReplicatedRunner), stage=when_placed(PipelineRunner))
    session = build_test_session(cluster, recipe, MODELS[model], components)
    life.placing = most_allocated(record)
    note_sizes(life, session)
    life.built = settled_bytes(before)
    saver = build_saver(session, Path(folder), print)
    for _ in session.rounds():
        life.steps.append(settled_bytes(before))
        if session.state.step in (2, 4):
            name = saver.save()
            saver.finish()
            life.saved.append(settled_bytes(before))
            files = (Path(folder) / "checkpoints" / name).glob(f"rank-{cluster.global_rank:05d}*safetensors")
            life.written.append(sum(path.stat().st_size for path in files))
            saver.wait_published(name)
    saver.close()
    session.close()
    return life


def note_sizes(life: Life, session: Session) -> None:
    sharded_model = session.runner.sharded_model
    life.whole = 4 * sum(slot.numel for slot in sharded_model.slots)
    life.computes = 4 * sum(slot.numel for slot in sharded_model.computes)
    life.updates = 4 * sum(slot.numel for slot in sharded_model.updates)
    life.shared = 4 * sum(one.computes.numel for one in sharded_model.held.values() if one.holders)
    life.largest = 4 * max(slot.numel for slot in sharded_model.slots)


LAYOUTS = {
    "replicas=2 route=native": 2,
    "replicas=1 pipeline=2 route=native": 2,
    "replicas=1 tensor=2 route=native": 2,
    "replicas=1 shard=2 zero=1 route=native": 2,
    "replicas=1 shard=2 zero=2 route=native": 2,
    "replicas=1 shard=2 zero=3 route=native": 2,
    "replicas=1 shard=4 zero=3 route=native": 4,
    "replicas=1 shard=2 zero=3 pipeline=2 route=native": 4,
}
SHORT = tuple(LAYOUTS)[1:6]
IN_TURN = [text if text in SHORT else soak_param(text) for text in LAYOUTS]
CELLS = [
    pytest.param(text, model, marks=[pytest.mark.soak] * (text not in SHORT or model not in models))
    for text in LAYOUTS
    for models in [MODELS if "zero=3" in text else ("light",)]
    for model in MODELS
]
"""Layouts with models; the suite has the eager one where parameters are cut."""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Life]]:
    """Each strategy and model is trained once."""

    @cache
    def find(strategy: str, model: str) -> list[Life]:
        return run_ranks(live, LAYOUTS[strategy], strategy, model, str(tmp_path_factory.mktemp("run")))

    return find


def in_steps(strategy: str, life: Life) -> int:
    """The closed form between two steps: parameters, two moments, the sums of gradients, what moves them.

    One replica on one rank sums nothing, so that its gradients are the sums. With zero=1 there is a buffer
    through which updated parameters are gathered. Gradients of the modules stay until the next step where
    they are not the sums themselves; with zero=2 and zero=3 there are none, and three buckets through which
    they leave.
    """
    parts = Strategy.parse(strategy)
    moments, gradients = 2 * life.updates, life.computes
    if parts.zero >= 2:
        parameters = life.updates if parts.zero == 3 else life.computes
        own_sums, buckets = life.updates, min(3 * (life.largest + BUCKET_BYTES), 3 * life.computes)
        return parameters + moments + own_sums + buckets + 2 * life.shared
    if parts.shard > 1:
        buckets, own_sums = life.computes, life.updates
        parameters = life.computes + life.computes
        return parameters + moments + gradients + buckets + own_sums + life.shared
    return life.computes + moments + gradients + life.shared


@pytest.mark.capability("A11", "D1")
@pytest.mark.parametrize(("strategy", "model"), CELLS)
def test_a_rank_holds_its_part_from_the_build_to_the_last_save(
    strategy: str, model: str, lives: Callable[[str, str], list[Life]]
) -> None:
    parts = Strategy.parse(strategy)
    found = lives(strategy, model)
    for life in found:
        at_rest = life.updates if parts.zero == 3 else life.computes
        gathered = life.computes if parts.zero in (1, 2) else 0
        buckets = life.computes if parts.shard > 1 or parts.replicas == 2 else 0
        assert 0.95 * at_rest <= life.placed_bytes <= 1.05 * (at_rest + gathered) + SMALL_BYTES
        assert life.built <= 1.05 * (at_rest + gathered + buckets) + SMALL_BYTES
        for size in (*life.steps, *life.saved):
            assert size <= 1.05 * in_steps(strategy, life) + SMALL_BYTES
        assert life.steps[-1] <= 1.05 * life.steps[1] + SMALL_BYTES  # nothing piles up
        for written in life.written:  # parameters and two moments
            assert written <= 1.1 * 3 * life.updates + SMALL_BYTES
    if parts.replicas == 1:
        twice = sum(life.shared for life in found) // 2 // parts.shard  # what two stages hold
        updated = sum(life.updates for life in found) - twice
        copies = parts.tensor if parts.tensor > 1 else 1
        assert found[0].whole <= updated <= copies * found[0].whole


@pytest.mark.capability("A11")
@pytest.mark.parametrize("strategy", IN_TURN)
def test_a_model_without_memory_is_never_whole_where_it_is_cut(
    strategy: str, lives: Callable[[str, str], list[Life]]
) -> None:
    """While it is placed, a rank has its part, and of what it makes at most two tensors."""
    for life in lives(strategy, "light"):
        cut = Strategy.parse(strategy).ranks_per_replica > 1 and Strategy.parse(strategy).zero not in (1, 2)
        at_rest = life.updates if "zero=3" in strategy else life.computes
        gathered = life.computes if Strategy.parse(strategy).zero in (1, 2) else 0
        assert 0.9 * at_rest <= life.placing <= at_rest + gathered + 2 * life.largest + SMALL_BYTES
        if cut:
            assert life.placing < life.whole


@pytest.mark.capability("A11")
def test_a_shard_of_the_state_is_smaller_than_the_whole(lives: Callable[[str, str], list[Life]]) -> None:
    """What sharding is for: a rank that shares its state holds less between steps than one that does not."""
    alone = lives("replicas=2 route=native", "light")[0]
    for life in lives("replicas=1 shard=2 zero=3 route=native", "light"):
        assert max(life.steps) < 0.95 * max(alone.steps)


def files_of(cluster: Cluster, strategy: str) -> list[tuple[int, int]]:
    """Number and place of the file in which each parameter lies, as the kernel maps it; after two steps."""
    recipe = Recipe(task="sum", steps=2, batch={"size": 8, "shards": 4}, strategy=Strategy.parse(strategy))
    session = build_test_session(cluster, recipe, light_gpt)
    list(session.rounds())
    found = []
    for p in session.runner.sharded_model.computes.values():
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= p.data_ptr() < last:
                found.append((int(inode), int(offset, 16) + p.data_ptr() - first))
    session.close()
    return found


@pytest.mark.capability("A11")
def test_on_one_host_parameters_lie_once_for_all_ranks() -> None:
    """The same bytes of the same file on every rank: a host holds them once, a rank its share."""
    first, second = run_ranks(files_of, 2, "replicas=1 shard=2 zero=3")
    assert first == second
    assert all(inode for inode, _ in first) and len(set(first)) == len(first)
    first, second = run_ranks(files_of, 2, "replicas=1 shard=2 zero=2")
    assert not any(inode for inode, _ in (*first, *second))
