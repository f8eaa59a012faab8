"""What is planned beside servers that code, and of messages that have come: by the code that allocates it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.comm import Codec
from paceline.comm.channel import FRAME_LENGTHS, ChannelMessage, copied_message_bytes, retained_message_bytes
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.recipe import Strategy
from paceline.state.slot import TensorSlot
from paceline.sync.server.parameter_transfer import CodedTransfer, residual_bytes
from paceline.sync.server.server_memory import coding_workspace_bytes

SIZES = [(1_300_001, 4), (700_000, 4), (257, 4)]
WORDS = ("int8", "int2:stochastic", "topk:0.01", "lossless", "sign", "int8+lossless")


def codec_of(word: str) -> Codec:
    codec = build_codec(Strategy.parse(f"replicas=1 servers=1 sync=server codec={word}"))
    assert codec is not None
    return codec


def rows() -> dict[TensorSlot, Tensor]:
    """Of which the first is all zeros: a ragged row of it is short."""
    tensors = [torch.rand(num_values) * min(k, 1) for k, (num_values, _) in enumerate(SIZES)]
    return {TensorSlot.whole(f"{k}", x): x for k, x in enumerate(tensors)}


@pytest.mark.capability("L3", "L4")
@pytest.mark.parametrize("word", WORDS)
def test_what_coding_takes_of_large_tensors_is_planned_from_smaller_ones(word: str) -> None:
    codec, grads = codec_of(word), rows()
    worker, server = (CodedTransfer(codec, 3, grads) for _ in range(2))
    there = [x.clone() for x in grads.values()]
    for version in range(2):
        worker.take(server.ticket(0, [*rows().values()], version), there, 0, version)
        server.pushed(worker.push(grads, (version, 0)), grads, (version, 0))
        worker.settle(dropped=False)
    planned = coding_workspace_bytes(codec, {*SIZES})
    for real, plan in zip((worker.workspace_bytes, server.workspace_bytes), planned, strict=True):
        assert real - 2**12 <= plan <= 1.02 * real + 2**12, (plan, real)


@pytest.mark.capability("L3", "L4")
@pytest.mark.parametrize("word", WORDS)
def test_payloads_and_what_was_lost_have_a_closed_form_whatever_the_values(word: str) -> None:
    codec, grads = codec_of(word), rows()
    worker = CodedTransfer(codec, 3, grads)
    for step in range(3):
        worker.push(grads, (step, 0))
        assert worker._payloads.num_bytes == sum(codec.num_bytes(x.numel()) for x in grads.values())
        worker.settle(dropped=False)
    lost = [x for of in (worker._kept, worker._spare) for x in of.values()]
    assert sum(x.nbytes for x in lost) == 2 * sum(residual_bytes(codec, x.numel()) for x in grads.values())


@pytest.mark.capability("L3")
@pytest.mark.parametrize("sizes", [[4], [100] * 20, [1000, 10, 20, 500], [8, 72, 8], [1000, 100, 100]])
def test_a_message_that_has_come_keeps_what_is_planned(sizes: Sequence[int]) -> None:
    sent = ChannelMessage("push", {}, [torch.zeros(size, dtype=torch.uint8) for size in sizes])
    head, bodies = sent.encode()
    body = torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.uint8)
    found = ChannelMessage.decode(head[FRAME_LENGTHS.size :], body, 1)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found.tensors}
    own = storages.pop(body.untyped_storage()._cdata, 0)
    assert sum(storages.values()) == copied_message_bytes(sizes)
    assert own + sum(storages.values()) == retained_message_bytes(sizes)
