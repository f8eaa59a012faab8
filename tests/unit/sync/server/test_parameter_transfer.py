"""Gradients and parameters between a server and its workers, coded: nothing is lost for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm.codecs import CodecKeys
from paceline.comm.workspace import Workspace
from paceline.state.slot import TensorSlot
from paceline.sync.server import parameter_transfer
from paceline.sync.server.parameter_transfer import CodedTransfer
from tests.codecs import codec_of
from tests.peak import allocated

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


def shapes() -> dict[TensorSlot, Tensor]:
    tensors = {"w": torch.zeros(20, 30), "b": torch.zeros(20)}
    return {TensorSlot.whole(name, x): x for name, x in tensors.items()}


def grads(step: int) -> dict[TensorSlot, Tensor]:
    return grads_of(shapes(), step)


def grads_of(likes: Mapping[TensorSlot, Tensor], step: int) -> dict[TensorSlot, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {slot: torch.randn(x.shape, generator=g) for slot, x in likes.items()}


@pytest.mark.capability("H5", "H8")
@pytest.mark.parametrize("word", WORDS)
def test_what_arrives_and_what_is_kept_is_all_that_was_pushed(word: str) -> None:
    """A push that is dropped leaves what was kept as it was."""
    worker, server = (CodedTransfer(codec_of(word), 3, shapes()) for _ in range(2))
    total = {slot: torch.zeros_like(x) for slot, x in shapes().items()}
    for step in range(STEPS):
        worker.encode_push(grads(100 + step), (step, 9))
        worker.settle_push(dropped=True)
        arrived = server.decode_push(worker.encode_push(grads(step), (step, 1)), shapes(), (step, 1))
        worker.settle_push(dropped=False)
        for x, y in zip(total.values(), arrived, strict=True):
            x.add_(y)
    kept = {slot: value for _, slot, value in worker.residuals()}
    if codec_of(word).needs_error_feedback:
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
    server, worker = (CodedTransfer(codec_of(word), 3, shapes()) for _ in range(2))
    here, there = [*grads(1).values()], [*grads(2).values()]
    worker.decode_parameters(server.encode_parameters(1, here, 0), there, 1, 0)
    assert all(map(torch.equal, here, there))
    for x in here:
        x.add_(0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))
    first = distance(here, there)
    for version in range(1, 40):
        worker.decode_parameters(server.encode_parameters(1, here, version), there, 1, version)
        assert all(map(torch.equal, server._worker_parameters[1], there))
    assert distance(here, there) < 0.2 * first


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).view(-1) for x, y in zip(a, b, strict=True)]).norm())


class Fresh(Workspace):
    """Memory that nobody has had, full of bytes that say so."""

    def take(self, name: str, shape: Sequence[int], *rest: Any, room: int = 0) -> Tensor:
        found = Workspace().take(name, shape, *rest)
        found.view(-1).view(torch.uint8).fill_(0xA5)
        return found


def said(word: str, workspace: type[Workspace]) -> list[Tensor]:
    """What both ends send and find in some steps, one of which is dropped; read when a step has ended."""
    with patch.object(parameter_transfer, "Workspace", workspace):
        worker, server = (CodedTransfer(codec_of(word), 3, shapes()) for _ in range(2))
    found, there = list[Tensor](), [*grads(90).values()]
    worker.decode_parameters(server.encode_parameters(1, [*grads(91).values()], 0), there, 1, 0)
    for step in range(STEPS):
        pushed, place = worker.encode_push(grads(step), (step, 1)), (step, 1)
        ticket = server.encode_parameters(1, [*grads(50 + step).values()], step + 1)
        worker.decode_parameters(ticket, there, 1, step + 1)
        arrived = server.decode_push(pushed, shapes(), place)
        worker.settle_push(dropped=step == 1)
        kept = [x for _, _, x in worker.residuals()]
        found += [x.clone() for x in (*pushed, *ticket, *arrived, *there, *kept)]
    return found


@pytest.mark.capability("L4")
@pytest.mark.parametrize("word", [*WORDS, "topk:0.5"])
def test_memory_that_is_taken_again_changes_nothing(word: str) -> None:
    kept, fresh = said(word, Workspace), said(word, Fresh)
    assert len(kept) == len(fresh) > 0
    assert all(map(torch.equal, map(as_bytes, kept), map(as_bytes, fresh)))


@pytest.mark.capability("L4")
def test_bytes_of_one_tensor_in_the_place_of_another_are_found() -> None:
    """The mutation twin: what is sent of a gradient stays where the next one is coded."""

    def encode_in_place(coded: CodedTransfer, name: str, values: Tensor, keys: CodecKeys) -> Tensor:
        return coded._codec.encode(values, keys, coded._workspace)

    with patch.object(CodedTransfer, "_encode_apart", encode_in_place):
        wrong = said("int8", Workspace)
    right = said("int8", Workspace)
    assert not all(map(torch.equal, map(as_bytes, right), map(as_bytes, wrong)))


@pytest.mark.capability("L4")
@pytest.mark.parametrize("word", [word for word in WORDS if word != "lowrank:1"])
def test_a_steady_push_and_ticket_allocate_nothing(word: str) -> None:
    """But for factors of `lowrank`, and what a server reads of a push: several are added up."""
    worker, server = (CodedTransfer(codec_of(word), 3, large()) for _ in range(2))
    there = [*grads_of(large(), 1).values()]

    pushes, newest = ([grads_of(large(), start + number) for number in range(8)] for start in (0, 100))

    def step(number: int) -> None:
        worker.encode_push(pushes[number], (number, 1))
        worker.settle_push(dropped=number % 3 == 0)
        worker.decode_parameters(
            server.encode_parameters(1, [*newest[number].values()], number), there, 1, number
        )

    for number in range(7):
        step(number)
    assert not allocated(lambda: step(7))
    assert allocated(lambda: server.decode_push(worker.encode_push(pushes[0], (8, 1)), large(), (8, 1)))


def as_bytes(x: Tensor) -> Tensor:
    """What is not a number equals itself."""
    return x.contiguous().view(-1).view(torch.uint8)


def large() -> dict[TensorSlot, Tensor]:
    tensors = {"w": torch.zeros(150, 301), "b": torch.zeros(701)}
    return {TensorSlot.whole(name, x): x for name, x in tensors.items()}
