"""Gradients and parameters between a server and its workers, coded: nothing is lost for good."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.comm import Codec
from paceline.recipe import Strategy
from paceline.slot import Slot
from paceline.sync.traffic import Coded
from paceline.training.codecs import make_codec

WORDS = (
    "bf16",
    "int8",
    "int4:stochastic",
    "sign",
    "topk:0.1",
    "randomk:0.2",
    "lowrank:1",
    "topk:0.1+int4",
    "lossless",
)
STEPS = 5


def codec_of(word: str) -> Codec:
    found = make_codec(Strategy(codec=word))
    assert found is not None
    return found


def shapes() -> dict[Slot, Tensor]:
    tensors = {"w": torch.zeros(20, 30), "b": torch.zeros(20)}
    return {Slot.whole(name, x): x for name, x in tensors.items()}


def grads(step: int) -> dict[Slot, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {slot: torch.randn(x.shape, generator=g) for slot, x in shapes().items()}


@pytest.mark.capability("H5", "H8")
@pytest.mark.parametrize("word", WORDS)
def test_what_arrives_and_what_is_kept_is_all_that_was_pushed(word: str) -> None:
    """A push that is dropped leaves what was kept as it was."""
    worker, server = (Coded(codec_of(word), 3, shapes()) for _ in range(2))
    total = {slot: torch.zeros_like(x) for slot, x in shapes().items()}
    for step in range(STEPS):
        worker.push(grads(100 + step), (step, 9))
        worker.settle(dropped=True)
        arrived = server.pushed(worker.push(grads(step), (step, 1)), shapes(), (step, 1))
        worker.settle(dropped=False)
        for x, y in zip(total.values(), arrived, strict=True):
            x.add_(y)
    kept = {slot: value for _, slot, value in worker.lost()}
    if codec_of(word).loses:
        for slot, x in total.items():
            right = torch.stack([grads(step)[slot] for step in range(STEPS)]).sum(0)
            assert torch.allclose(x + kept[slot], right, atol=1e-4)
    elif word == "lossless":
        assert torch.allclose(
            total[next(iter(total))], sum(grads(s)[next(iter(total))] for s in range(STEPS))
        )


@pytest.mark.capability("H8")
@pytest.mark.parametrize("word", WORDS)
def test_a_worker_follows_the_servers_parameters(word: str) -> None:
    """Both ends agree on what the worker has, to the bit; where the parameters rest, it comes ever closer."""
    server, worker = (Coded(codec_of(word), 3, shapes()) for _ in range(2))
    here, there = [*grads(1).values()], [*grads(2).values()]
    worker.take(server.ticket(1, here, 0), there, 1, 0)
    assert all(map(torch.equal, here, there))
    for x in here:
        x.add_(0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))
    first = distance(here, there)
    for version in range(1, 40):
        worker.take(server.ticket(1, here, version), there, 1, version)
        assert all(map(torch.equal, server._known[1], there))
    assert distance(here, there) < 0.2 * first


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).view(-1) for x, y in zip(a, b, strict=True)]).norm())
