"""Attention over ranks is that of the whole sequence, forward and backward, and sends its closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.comm import Net
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.models import KeyedDropout, positions
from paceline.parallel.context import ring_attention as ring_module
from paceline.parallel.context.context_attention import (
    AttentionSizes,
    ContextParallelMode,
    is_ulysses_cheaper,
    ring_bytes,
    ulysses_bytes,
)
from paceline.parallel.context.ring_attention import BlockInputs, FlashCpuKernel, MatmulKernel
from paceline.parallel.context.sequence_split import SequencePart, split_positions
from paceline.testing import run_ranks

SHAPES = {  # B, heads of queries, of keys, positions, width
    "as many heads as ranks": (2, 6, 6, 13, 8),
    "one head": (1, 1, 1, 7, 4),
    "grouped queries": (2, 6, 2, 16, 4),
    "grouped, by heads": (1, 12, 6, 9, 4),
}
TYPES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    b, h, g, t, d = shape
    sizes = ((b, h, t, d), (b, g, t, d), (b, g, t, d), (b, h, t, d))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def attend(xs: list[Tensor], causal: bool) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    q, k, v, grad = xs
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def over_ranks(
    cluster: Cluster, net: Net, mesh: Mesh | None = None
) -> tuple[SequencePart, ContextParallelMode]:
    group = (mesh or Mesh.build(cluster, {"context": cluster.world_size})).axes["context"]
    part = SequencePart(group.size, group.rank)
    return part, ContextParallelMode(part, group, net)


def farthest(cluster: Cluster) -> list[tuple[str, float, float]]:
    """For each case the distance from the whole, of what is allowed; bytes by the ledger and by the form."""
    torch.set_num_threads(1)
    found, mesh = [], Mesh.build(cluster, {"context": cluster.world_size})
    for name, shape in SHAPES.items():
        for dtype, allowed in TYPES.items():
            for causal in (True, False):
                xs = tensors(shape, dtype)
                whole = [x.double() for x in attend([x.double() for x in xs], causal)]
                net = Net()
                part, mode = over_ranks(cluster, net, mesh)
                own = [part(x, 2) for x in xs]
                with mode:
                    mine = attend(own, causal)
                off = max(
                    float((part.take(a, 2) - b.double()).abs().max() / a.abs().max())
                    for a, b in zip(whole, mine, strict=True)
                )
                found.append(
                    (
                        f"{name}, {dtype}, causal={causal}",
                        off / allowed,
                        sent_too_much(cluster, net, part, xs),
                    )
                )
    return found


def sent_too_much(cluster: Cluster, net: Net, part: SequencePart, xs: list[Tensor]) -> float:
    (b, h, _, d), g, item = xs[0].shape, xs[1].shape[1], xs[0].element_size()
    call, rank = AttentionSizes(b, h, g, d, d, item, max(4, item)), cluster.global_rank
    form = ulysses_bytes if is_ulysses_cheaper(call, part.runs) else ring_bytes
    return net.ledger.rows["exchange", "context"].sent_bytes - sum(form(call, part.runs, rank))


@pytest.mark.capability("Z1")
@pytest.mark.parametrize(
    "num_ranks", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_attention_over_ranks_is_that_of_the_whole(num_ranks: int) -> None:
    """Also its bytes: those of the closed form, by the ledger."""
    for cases in run_ranks(farthest, num_ranks):
        assert [case for case in cases if case[1] > 1.0 or case[2] != 0] == []


def test_the_way_is_chosen_by_bytes() -> None:
    runs = {ranks: split_positions(1024, ranks) for ranks in (2, 3, 4, 8)}
    many = AttentionSizes(1, 8, 8, 64, 64, 4, 4)
    assert is_ulysses_cheaper(many, runs[2]) and is_ulysses_cheaper(many, runs[8])
    assert not is_ulysses_cheaper(many, runs[3])  # 8 heads do not go into 3 ranks
    few = AttentionSizes(1, 32, 2, 64, 64, 2, 4)  # few keys are cheaper to pass on than many queries
    assert not is_ulysses_cheaper(few, runs[2]) and not is_ulysses_cheaper(few, runs[4])
    forward, backward = ring_bytes(few, runs[2], 0)
    assert (forward, backward) == (512 * 2 * 128 * 2, 512 * 2 * 128 * (2 + 4))
    assert ulysses_bytes(many, runs[4], 1) == ((256 * 4 * 8 * 64 * 3 // 4) * 4,) * 2


BLOCK = ring_module.AttentionRing.block


def without_a_block(self: Any, step: int) -> Any:
    found = BLOCK(self, step)
    return found._replace(keys=slice(0, 0)) if step == 1 else found


TWINS: dict[str, tuple[Any, str, Any]] = {
    "a block is left out": (ring_module.AttentionRing, "block", without_a_block),
    "gradients of keys stay where they were made": (
        *(ring_module._GradientReturn, "home"),
        lambda self: self._own,
    ),
}


@pytest.mark.capability("Z2")
def test_a_broken_ring_is_found() -> None:
    """The mutation twins."""

    def unseen(cluster: Cluster) -> list[str]:
        found, xs = [], tensors(SHAPES["one head"], torch.float32)
        whole = attend(xs, True)
        for name, twin in TWINS.items():
            part, mode = over_ranks(cluster, Net())
            own = [part(x, 2) for x in xs]
            with patch.object(*twin), mode:
                mine = attend(own, True)
            if all(torch.allclose(part.take(a, 2), b, atol=1e-4) for a, b in zip(whole, mine, strict=True)):
                found.append(name)
        return found

    assert run_ranks(unseen, 2) == [[], []]


MULTI_HEAD = torch.nn.MultiheadAttention(4, 2, batch_first=True)


def test_a_multi_head_layer_needs_no_change() -> None:
    """What PyTorch hides in one function is seen; also in evaluation, where it has another path."""

    def off(cluster: Cluster) -> float:
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p).cos())
        x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(2))
        part, mode = over_ranks(cluster, Net())
        own, worst = part(x, 1), 0.0
        for training in (True, False):
            layer.train(training)
            for causal in (True, False):
                masks = [torch.nn.Transformer.generate_square_subsequent_mask(n) for n in (7, own.shape[1])]
                whole, mine = (mask if causal else None for mask in masks)
                with torch.no_grad():
                    right = layer(x, src_mask=whole, is_causal=causal)
                    with mode:
                        found = layer(own, src_mask=mine, is_causal=causal)
                worst = max(worst, float((part.take(right, 1) - found).abs().max()))
        return worst

    assert max(run_ranks(off, 2)) < 1e-5


def alone(length: int = 6) -> tuple[SequencePart, ContextParallelMode]:
    """The first of two ranks, which nobody hears."""
    part = SequencePart(2, 0)
    part(torch.zeros(2, length), 1)
    mesh = Mesh.build(Cluster.single(), {})
    return part, ContextParallelMode(part, mesh.axes["context"], Net())


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(3, 3)), "a mask of shape"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "dropout_p=0.1"),
        (lambda x: F.scaled_dot_product_attention(x, x[:, :, :2], x[:, :, :2]), r"\[3, 2, 2\]"),
        (lambda x: MULTI_HEAD(x[0], x[0], x[0]), "should return attention weights"),
        (torch.rand_like, "rand_like draws a number for each position"),
        (lambda x: F.dropout(x[0, 0, 0]), "cannot find this rank's 3 positions"),
        (lambda x: positions(x, 3), r"dimension 3 of a tensor of shape \(2, 2, 3, 4\)"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call: Callable[[Tensor], Any], why: str) -> None:
    _, mode = alone()
    with mode, pytest.raises(TaskError, match=why):
        call(torch.zeros(2, 2, 3, 4))


def test_random_masks_are_those_of_the_whole_sequence() -> None:
    x, (part, mode) = torch.ones(2, 6, 5), alone()
    keyed = KeyedDropout(0.4)
    keyed.take_key(3)
    for draw in (keyed, lambda y: F.dropout(y, 0.4, True)):
        torch.manual_seed(7)
        whole = draw(x)
        torch.manual_seed(7)
        with mode:
            mine = draw(part.take(x, 1))
        assert torch.equal(mine, part.take(whole, 1)) and not torch.equal(mine, whole[:, :3])


def test_sequences_of_two_lengths_are_refused() -> None:
    part = SequencePart(2, 0)
    part(torch.zeros(2, 6), 1)
    with pytest.raises(TaskError, match="sequences of 6 and of 7 positions"):
        part(torch.zeros(2, 7), 1)


def test_both_kernels_agree() -> None:
    q, k, v, grad = (x.detach() for x in tensors((2, 3, 3, 9, 8), torch.float32))
    block = BlockInputs(q, k, v, causal=True, scale=0.3)
    fused, plain = (kernel.forward(block) for kernel in (FlashCpuKernel(), MatmulKernel()))
    assert torch.allclose(fused.out, plain.out, atol=1e-6) and torch.allclose(fused.lse, plain.lse, atol=1e-6)
    found = [kernel.backward(grad, block, plain) for kernel in (FlashCpuKernel(), MatmulKernel())]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
