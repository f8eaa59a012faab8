"""Every schedule gives the answer of one process, keeps what was proven of it, and over any transport."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import GradientSink
from paceline.comm.routes import host_links
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.pipeline import HostMemoryTransport, MultiHostTransport, NetTransport, PipelineRunner
from paceline.parallel.pipeline.forward_backward import ChunkExecutor, InFlightMicroBatch
from paceline.parallel.pipeline.strategy_schedule import build_checked_table
from paceline.parallel.state_hash import state_sha256
from paceline.pipeline_schedule import (
    PipelineAction,
    interleaved,
    simulate_schedule,
    write_schedule_csv,
    zero_bubble,
)
from paceline.recipe import Recipe, Strategy
from paceline.state.slot import TensorSlot
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from paceline.verification import VerificationReport
from tests.marks import soak_param
from tests.parity.test_strategy_combinations import gpt, verify
from tests.texts import SMALL_TEXT

SHAPE = {"layers": 4, "width": 32, "heads": 2, "context": 16, "dropout": 0.1, "sample_tokens": 0}
TWO = ["1f1b", "interleaved:2", "zero-bubble"]
FOUR = [
    "replicas=1 shard=2 zero=2 pipeline=2 schedule=interleaved:2",
    "replicas=2 pipeline=2 schedule=zero-bubble",
    "replicas=1 shard=2 zero=3 pipeline=2 schedule=zero-bubble route=native",
    "replicas=1 tensor=2 pipeline=2 schedule=interleaved:2",
    "replicas=1 tensor=2 pipeline=2 schedule=zero-bubble",
    "replicas=1 pipeline=4 schedule=zero-bubble",
]


def deep(strategy: str, **changes: Any) -> Recipe:
    """Four blocks, embedding and output layer tied, five shards of unequal size."""
    options = {**SHAPE, "text": SMALL_TEXT, "train_tokens": 20_000, "held_out_tokens": 200}
    return gpt(strategy, **({"options": options, "batch": {"size": 21, "shards": 5}} | changes))


def all_reports(cluster: Cluster, strategies: Sequence[str]) -> dict[str, VerificationReport]:
    return {text: verify(cluster, deep(text)) for text in strategies}


def rows_of(path: Path) -> str:
    """A file with an order that has no name: the first stage halves its backwards, the second does not."""
    table = zero_bubble(2, 5)
    whole = [a for a in table.orders[1] if a.kind != "W"]
    write_schedule_csv(simulate_schedule(type(table)([table.orders[0], whole]), 5), path)
    return f"replicas=1 pipeline=2 schedule={path}"


@pytest.mark.capability("D4", "D5", "D11", "Z1", "Z2")
def test_every_step_under_every_schedule_is_that_of_the_oracle(tmp_path: Path) -> None:
    strategies = [f"replicas=1 pipeline=2 schedule={word}" for word in TWO] + [rows_of(tmp_path / "own.csv")]
    for reports in run_ranks(all_reports, 2, strategies, deadline=300):
        for text, report in reports.items():
            assert report.ok, (text, report.failure, report.diagnosis)


@pytest.mark.soak
@pytest.mark.capability("D4", "D5", "Z1", "Z2")
def test_under_every_product_too() -> None:
    for reports in run_ranks(all_reports, 4, FOUR, deadline=600):
        for text, report in reports.items():
            assert report.ok, (text, report.failure, report.diagnosis)


def bits(cluster: Cluster, strategies: Sequence[str]) -> list[str]:
    found = []
    for text in strategies:
        session = build_test_session(cluster, deep(text, steps=3, reproducible=True))
        list(session.rounds())
        found.append(state_sha256(session.snapshot().tensors()))
        session.close()
    return found


@pytest.mark.capability("D5", "I10")
def test_the_bits_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    strategies = [f"replicas=1 pipeline=2 schedule={word}" for word in TWO[1:]]
    (right,) = run_ranks(bits, 1, ["replicas=1"])
    for found in run_ranks(bits, 2, strategies, deadline=300):
        assert found == right * len(strategies)


def life(cluster: Cluster, word: str) -> tuple[int, list[tuple[str, int]]]:
    """The most flights at a time; and in what order backwards of chunks began and gradients left."""
    session = build_test_session(cluster, deep(f"replicas=1 pipeline=2 schedule={word}", steps=2))
    stage, heard = session.runner, list[tuple[str, int]]()
    hand_on, backward = GradientHooks._hand_on, ChunkExecutor.backward

    def hear(self: GradientHooks, slot: TensorSlot, sink: GradientSink) -> None:
        heard.append(("leaves", stage.cut.chunk_of(slot.name)))
        hand_on(self, slot, sink)

    def hear_backward(
        self: ChunkExecutor, in_flight_batch: InFlightMicroBatch, *args: Any, **kwargs: Any
    ) -> Any:
        heard.append(("backward", in_flight_batch.action.chunk))
        return backward(self, in_flight_batch, *args, **kwargs)

    with (
        patch.object(GradientHooks, "_hand_on", hear),
        patch.object(ChunkExecutor, "backward", hear_backward),
    ):
        list(session.rounds())
    session.close()
    return stage.peak_in_flight, heard[len(heard) // 2 :]


@pytest.mark.capability("D5", "D7", "D11")
def test_a_stage_keeps_what_was_proven_and_gradients_leave_early() -> None:
    found = run_ranks(life, 2, "interleaved:2")
    proof = simulate_schedule(interleaved(2, 5, 2), 5)
    assert [peak for peak, _ in found] == [2 * n for n in proof.in_flight]
    for _, heard in found:
        last_of_first = max(n for n, event in enumerate(heard) if event == ("backward", 0))
        assert heard.index(("leaves", 1)) < last_of_first < heard.index(("leaves", 0))


def test_what_does_not_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    def said(cluster: Cluster) -> list[str]:
        found = []
        for word in (str(tmp_path / "few.csv"), "interleaved:4"):
            try:
                build_test_session(cluster, deep(f"replicas=1 pipeline=2 schedule={word}"))
            except (StrategyError, TaskError) as error:
                found.append(str(error))
        return found

    write_schedule_csv(simulate_schedule(zero_bubble(2, 4), 4), tmp_path / "few.csv")
    for few, many in run_ranks(said, 2):
        assert "for 2 stages and 4 micro-batches, but a rank has 5" in few
        assert "--stages 2 --micro 5 --csv FILE" in few
        assert "the model's chain has only 6 modules with parameters" in many
    shuffled = [[PipelineAction("F", k) for k in range(3)] + [PipelineAction("B", k) for k in (1, 0, 2)]] * 2
    write_schedule_csv(simulate_schedule(type(zero_bubble(2, 2))(shuffled), 3), tmp_path / "own.csv")
    recipe = deep(
        f"replicas=1 pipeline=2 schedule={tmp_path / 'own.csv'}",
        reproducible=True,
        batch={"size": 9, "shards": 3},
    )

    with pytest.raises(StrategyError, match="neither in ascending nor in descending order"):
        build_checked_table(recipe, 3)
    assert build_checked_table(recipe.replace(reproducible=False), 3).num_stages == 2


ARRIVED = ChunkExecutor._receive_inputs


def off_by_one(self: ChunkExecutor, action: PipelineAction, *samples: int) -> Any:
    """The first two micro-batches of a step take each other's activations."""
    if not torch.is_grad_enabled():
        return ARRIVED(self, action, *samples)
    k = action.micro_batch
    return ARRIVED(self, action._replace(micro_batch={0: 1, 1: 0}.get(k, k)), *samples)


TWINS: dict[str, tuple[Any, str, Any, str]] = {
    "gradients of weights forgotten": (
        InFlightMicroBatch,
        "backward_weights",
        lambda self: None,
        "zero-bubble",
    ),
    # Where all forwards come first, nobody waits.
    "off by one": (ChunkExecutor, "_receive_inputs", off_by_one, "gpipe"),
}


@pytest.mark.capability("D11", "Z2")
@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_schedule_is_found(twin: str) -> None:
    """The mutation twins."""
    owner, name, broken, schedule = TWINS[twin]

    def found(cluster: Cluster) -> VerificationReport:
        with patch.object(owner, name, broken):
            return verify(cluster, deep(f"replicas=1 pipeline=2 schedule={schedule}"))

    for report in run_ranks(found, 2):
        assert not report.ok


def test_a_strategy_keeps_the_name_of_its_file() -> None:
    strategy = Strategy.parse("pipeline=2 schedule=rows/own.csv")
    assert strategy.schedule == "file:rows/own.csv" and Strategy.parse(str(strategy)) == strategy
    assert torch.is_grad_enabled()


SCHEDULES = ("schedule=gpipe", "schedule=1f1b", "schedule=zero-bubble", "sync=pipedream")
INTERLEAVED = "schedule=interleaved:2"


def digits(words: str, stages: int) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 20, 16, 12, 16, 20, 24], "dropout": 0.1},
        "steps": 4,
        "batch": {"size": 23, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "strategy": Strategy.parse(f"replicas=1 pipeline={stages} {words}"),
    }
    return Recipe(**settings)


def num_maps() -> int:
    """Of messages."""
    return Path("/proc/self/maps").read_text().count("paceline-messages")


def ends(cluster: Cluster, words: str) -> tuple[str, list[Tensor], int]:
    """What carries messages, the state of this rank after a few steps, and whether memory was mapped."""
    session = build_test_session(cluster, digits(words, cluster.world_size))
    assert isinstance(session.runner, PipelineRunner)
    list(session.rounds())
    wire, maps = type(session.runner._transport).__name__, num_maps()
    tensors = [t.clone() for _, t in sorted(session.state.tensors().items())]
    session.close()
    assert num_maps() == 0
    return wire, tensors, maps


def other_than(right: tuple[str, list[Tensor], int], found: tuple[str, list[Tensor], int], wire: type) -> str:
    """What is wrong with an end; empty: nothing."""
    if not all(map(torch.equal, right[1], found[1])):
        return "other bits"
    name, is_mapped = wire.__name__, wire is not NetTransport
    return "" if (found[0], found[2] > 0) == (name, is_mapped) else f"{found[0]}, {found[2]} maps"


def both(cluster: Cluster, schedules: tuple[str, ...]) -> list[str]:
    """What is wrong, by schedule; also where stages are on hosts of their own, and where four are on two."""
    found, right = [], {words: ends(cluster, f"{words} route=native") for words in schedules}
    for words in schedules:
        found += [other_than(right[words], right[words], NetTransport)]
        found += [other_than(right[words], ends(cluster, words), HostMemoryTransport)]
    halves = max(1, cluster.world_size // 2)
    for here, wire in ((1, NetTransport), *((n, MultiHostTransport) for n in {halves} - {1})):
        with patch.object(host_links, "host_id", lambda n=here: f"host {cluster.global_rank // n}"):
            found += [other_than(right[words], ends(cluster, words), wire) for words in schedules[:here]]
    return found


@pytest.mark.capability("D1", "D2", "D4", "D5", "D6")
@pytest.mark.parametrize("stages", [2, soak_param(4)])
def test_stages_of_one_host_have_the_bits_that_a_backend_gives(stages: int) -> None:
    schedules = (*SCHEDULES, INTERLEAVED) if stages == 2 else ("schedule=1f1b", "sync=pipedream")
    for wrong in run_ranks(both, stages, schedules):
        assert not any(wrong)
