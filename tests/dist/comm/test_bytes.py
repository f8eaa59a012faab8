"""Bytes of real training steps: every call in the ledger, and all of them as the closed form says."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm.reduction.bucket_buffers import plan_buckets
from paceline.comm.tally import tally_bytes
from paceline.recipe import BatchRecipe, Recipe, RuntimeRecipe, Strategy
from paceline.session import build_session
from paceline.state.slot import trained_parameters
from paceline.task import Loss, Task
from paceline.testing import run_ranks

NUM_STEPS, BUCKET_BYTES = 3, 512
METRICS = ("absolute", "items")


def make_model() -> nn.Module:
    """With statistics that the tally carries, and one layer that is never used."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1)
    )
    model.unused = nn.Linear(3, 3)
    return model


def squared_error(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    x, y = batch
    error = x
    for layer in list(model)[:5]:
        error = layer(error)
    error = error - y
    return Loss(
        error.square().sum(), len(x), {"absolute": error.detach().abs().sum(), "items": float(len(x))}
    )


def make_task() -> Task:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    return Task(make_model(), TensorDataset(x, x.sum(1, keepdim=True)), squared_error)


def train(cluster, shards: int, bucket_bytes: int, route: str = "native") -> dict[str, Any]:
    """Some steps; the rows of the ledger, what each step's record says, and the number of buckets."""
    recipe = Recipe(
        task="in memory",
        steps=NUM_STEPS,
        strategy=Strategy(route=route),
        batch=BatchRecipe(size=32, shards=shards),
        runtime=RuntimeRecipe(device="cpu", deadline_seconds=20.0, bucket_bytes=bucket_bytes),
    )
    session = build_session(recipe, make_task(), cluster, torch.device("cpu"))
    sent = [stats.sent_bytes for stats in session.rounds()]
    rows = {row: (e.calls, e.payload_bytes, e.sent_bytes) for row, e in session.net.ledger.rows.items()}
    waits = [e.exposed_seconds for e in session.net.ledger.rows.values()]
    return {"rows": rows, "sent": sent, "waits": waits}


def expected_rows(world: int, bucket_bytes: int) -> dict[tuple[str, str], tuple[int, int, float]]:
    """The closed form, from the shapes of the model alone."""
    model = make_model()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    gradients = sum(p.numel() * p.element_size() for p in parameters)
    num_values = sum(b.numel() for b in buffers)
    tally = tally_bytes(2, len(parameters), num_values)
    state = [*parameters, *buffers]
    state_bytes = sum(t.numel() * t.element_size() for t in state)
    calls = NUM_STEPS * len(plan_buckets(trained_parameters(model), bucket_bytes))
    return {
        ("broadcast", "world"): (
            len({t.dtype for t in state}),
            state_bytes,
            (world - 1) / world * state_bytes,
        ),
        ("all_reduce", "replica"): (
            calls,
            NUM_STEPS * gradients,
            2 * (world - 1) / world * NUM_STEPS * gradients,
        ),
        ("all_reduce", "world"): (NUM_STEPS, NUM_STEPS * tally, 2 * (world - 1) / world * NUM_STEPS * tally),
    }


@pytest.mark.capability("G14")
@pytest.mark.parametrize("world, bucket_bytes", [(2, BUCKET_BYTES), (3, 1 << 20), (4, BUCKET_BYTES)])
def test_training_steps_cost_gradients_and_a_tally_and_nothing_else(world: int, bucket_bytes: int) -> None:
    expected = expected_rows(world, bucket_bytes)
    assert expected["all_reduce", "replica"][0] >= NUM_STEPS * (2 if bucket_bytes == BUCKET_BYTES else 1)
    for found in run_ranks(train, world, 8, bucket_bytes):
        agreed = found["rows"].pop(("all_gather", "world"))[
            2
        ]  # before the first step: which metrics there are
        assert found["rows"].keys() == expected.keys()
        for row, (calls, payload_bytes, sent_bytes) in expected.items():
            assert found["rows"][row][:2] == (calls, payload_bytes), row
            assert found["rows"][row][2] == pytest.approx(sent_bytes, rel=1e-12), row
        model, *parts = (expected[row][2] for row in expected)
        start, steps = model + agreed, sum(parts)
        assert found["sent"] == pytest.approx([start + steps * (i + 1) / NUM_STEPS for i in range(NUM_STEPS)])
        assert all(seconds > 0.0 for seconds in found["waits"])


@pytest.mark.capability("G14")
def test_sums_in_memory_are_counted_as_sums_on_a_wire() -> None:
    """Beside them the ranks tell each other once where they are: a length, and some text."""
    native, memory = (run_ranks(train, 2, 8, BUCKET_BYTES, route)[1]["rows"] for route in ("native", "auto"))
    calls, payload_bytes, _ = memory.pop(("all_gather", "replica"))
    assert calls == 2 and payload_bytes < 200
    assert memory == native


@pytest.mark.capability("A10", "G14")
def test_accumulation_costs_no_more_than_one_micro_batch_per_rank() -> None:
    many, one = (run_ranks(train, 2, shards, BUCKET_BYTES)[0]["rows"] for shards in (16, 2))
    assert many == one


@pytest.mark.capability("G14")
def test_one_process_puts_nothing_on_a_wire() -> None:
    (found,) = run_ranks(train, 1, 8, BUCKET_BYTES)
    assert found["rows"] == {}
    assert found["sent"] == [0.0] * NUM_STEPS
