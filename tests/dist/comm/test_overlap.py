"""Communication hidden behind backward: measured by the ledger, on a net with 10 ms of added latency.

The latency is injected: `SlowNet` is a net whose all_reduce is complete, for the waiting caller and for the
ledger alike, no earlier than 10 ms after the real one, on a thread of its own. The backward pass is made
long by layers that sleep, so that the result does not depend on how many processors the ranks share.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.comm import BucketReducer, NativeCollective, Net
from paceline.comm.reduction import UnorderedSum
from paceline.data import LoadedBatch, MicroBatch
from paceline.job.mesh import Mesh, RankGroup
from paceline.observe import PhaseTimer
from paceline.parallel import MixedPrecision, ReplicatedRunner
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.sharded_model import unsharded_model
from paceline.task import Loss
from paceline.testing import run_ranks

LATENCY_SECONDS, LAYER_SECONDS = 10e-3, 20e-3  # a busy machine adds some milliseconds to each
LONG_LATENCY_SECONDS = 40e-3  # more than a busy machine keeps a rank from waiting
NUM_LAYERS, WIDTH, NUM_STEPS = 8, 16, 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class LateWork:
    """A collective that is complete some seconds after the one inside it."""

    def __init__(self, inner: Any, latency_seconds: float) -> None:
        self._inner, self._latency_seconds = inner, latency_seconds
        self._done, self._future = threading.Event(), torch.futures.Future()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._inner.wait()
        time.sleep(self._latency_seconds)
        self._future.set_result(None)
        self._done.set()

    def wait(self, limit: timedelta) -> None:
        if not self._done.wait(limit.total_seconds()):
            raise RuntimeError("Wait timed out")
        self._thread.join()

    def get_future(self) -> torch.futures.Future:
        return self._future


class SlowNet(Net):
    """A net on which every call to the backend has the latency."""

    latency_seconds = LATENCY_SECONDS

    def _call(self, op: str, group: RankGroup, call: Callable[[], Any]) -> Any:
        return LateWork(super()._call(op, group, call), self.latency_seconds)


class Lazy(torch.autograd.Function):
    """The identity; its backward takes a while."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        time.sleep(LAYER_SECONDS)
        return grad


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(Lazy.apply(x)))
        return x


class AtTheEnd(BucketReducer):
    """The twin: the same buckets, launched after the backward pass."""

    def _launch_full(self) -> None:
        return None

    def close(self) -> None:
        super().close()
        super()._launch_full()


def step_often(
    cluster, kind: type[BucketReducer], bucket_bytes: int, latency_seconds: float = LATENCY_SECONDS
) -> dict[str, Any]:
    """Backward passes of one micro-batch on each rank: what the ledger says, the last gradients."""
    mesh, net = Mesh.build(cluster, {"replica": 2}), SlowNet(20.0)
    net.latency_seconds = latency_seconds
    runner = ReplicatedRunner(
        unsharded_model(Layers()),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
        MetricNames(()),
        precision=MixedPrecision("fp32", "cpu"),
        phases=PhaseTimer(),
    )
    sharded_model = runner.sharded_model
    sums = UnorderedSum(NativeCollective(net, mesh.axes["shard"]), NativeCollective(net, mesh.replica))
    reducer = kind(sharded_model.computes, sharded_model.parts, sums, bucket_bytes)
    x = torch.full((4, WIDTH), 1.0 + mesh.replica.rank, requires_grad=True)
    for step in range(NUM_STEPS):
        reducer.begin()
        runner.run([LoadedBatch(MicroBatch(step, 0, np.arange(4), key=step), x)], 1, reducer, 1.0)
        reducer.close()
        grads = reducer.finish()
    entry = net.ledger.rows["all_reduce", "replica"]
    return {
        "hidden": entry.hidden_fraction,
        "busy": entry.busy_seconds,
        "calls": entry.calls,
        "grads": [g.clone() for slot in sharded_model.slots if (g := grads.tensors[slot]) is not None],
    }


@pytest.mark.capability("G10")
def test_most_of_the_communication_is_hidden_and_the_result_is_the_same() -> None:
    overlapped = run_ranks(step_often, 2, BucketReducer, LAYER_BYTES)
    at_the_end = run_ranks(step_often, 2, AtTheEnd, LAYER_BYTES)
    for found, twin in zip(overlapped, at_the_end, strict=True):
        assert found["calls"] == twin["calls"] == NUM_STEPS * NUM_LAYERS
        assert found["busy"] >= NUM_STEPS * LATENCY_SECONDS  # the injected latency is in the account
        assert found["hidden"] > 0.5
        assert all(torch.equal(a, b) for a, b in zip(found["grads"], twin["grads"], strict=True))  # parity


@pytest.mark.capability("G10")
def test_communication_that_only_begins_after_backward_is_not_called_hidden() -> None:
    """Eight calls under way at once are not eight times as much time: somebody waits for nearly all of it."""
    for found in run_ranks(step_often, 2, AtTheEnd, LAYER_BYTES, LONG_LATENCY_SECONDS):
        assert found["hidden"] < 0.5


@pytest.mark.capability("G10")
@pytest.mark.parametrize("layers_per_bucket, launches", [(2, 4), (NUM_LAYERS, 1)])
def test_larger_buckets_are_fewer_and_give_the_same_sums(layers_per_bucket: int, launches: int) -> None:
    small, _ = run_ranks(step_often, 2, BucketReducer, LAYER_BYTES)
    large, _ = run_ranks(step_often, 2, BucketReducer, layers_per_bucket * LAYER_BYTES)
    assert (small["calls"], large["calls"]) == (NUM_STEPS * NUM_LAYERS, NUM_STEPS * launches)
    for a, b in zip(small["grads"], large["grads"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
