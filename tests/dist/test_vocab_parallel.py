"""A cut vocabulary gives the losses and gradients of a whole one, and nobody ever has all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm import NativeCollective, Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel.placement import even_span
from paceline.parallel.tensor.vocab_parallel import VocabParallelLogits, VocabularyPartition
from paceline.testing import run_ranks

SIZE, ROWS = 101, 24

pytestmark = pytest.mark.capability("Z1", "Z2")


def parts(cluster: Cluster) -> VocabularyPartition:
    mesh = Mesh.build(cluster, {"tensor": cluster.world_size})
    spans = [even_span(SIZE, cluster.world_size, rank) for rank in range(cluster.world_size)]
    return VocabularyPartition(spans, NativeCollective(Net(60.0), mesh.axes["tensor"]), "head")


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, ROWS // 4, SIZE, generator=generator) * 30  # a sum without its maximum overflows
    logits[0, 0, 7] = 200.0
    targets = torch.randint(SIZE, (ROWS,), generator=generator)
    targets[3] = -100
    return logits, targets


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda x, t: F.cross_entropy(x.flatten(0, 1).float(), t, reduction="sum"),
    "mean": lambda x, t: F.cross_entropy(x.view(-1, SIZE), t),
    "none": lambda x, t: F.cross_entropy(x.reshape(ROWS, SIZE), t, reduction="none").square().sum(),
    "class": lambda x, t: nn.CrossEntropyLoss(ignore_index=5)(x[:, :, :].flatten(0, 1), t.clamp(min=5)),
    "later ones": lambda x, t: F.cross_entropy(x[..., 1:, :].contiguous().view(-1, SIZE), t[:20] % SIZE),
    "smooth, of all": lambda x, t: F.cross_entropy(x.flatten(0, 1), t, label_smoothing=0.1),
    "by hand, of all": lambda x, t: -torch.log_softmax(x / 2.0, -1)[..., 3].sum(),
    "transposed, of all": lambda x, t: F.cross_entropy(x.transpose(1, 2), t.view(4, -1)),
}


def differences(cluster: Cluster) -> dict[str, float]:
    """Largest relative difference of loss and gradient from those of whole logits."""
    vocabulary, (whole, targets) = parts(cluster), drawn()
    found = {}
    for name, loss in LOSSES.items():
        right = whole.clone().requires_grad_()
        loss(right, targets).backward()
        own = whole[..., slice(*vocabulary.own)].clone().requires_grad_()
        value = loss(VocabParallelLogits(own, vocabulary), targets)
        value.backward()
        assert right.grad is not None and own.grad is not None
        wrong = (own.grad - right.grad[..., slice(*vocabulary.own)]).abs().max() / right.grad.abs().max()
        found[name] = max(float(wrong), float((value / loss(whole, targets) - 1).abs()))
    return found


def test_losses_and_gradients_are_those_of_whole_logits() -> None:
    for found in run_ranks(differences, 3):
        assert max(found.values()) < 1e-5, found


class _Largest(TorchDispatchMode):
    """How many values the largest tensor has that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            self.numel = max(self.numel, one.numel() if torch.is_tensor(one) else 0)
        return found


def test_no_rank_ever_has_all_logits() -> None:
    def largest(cluster: Cluster) -> tuple[int, int, int]:
        vocabulary, (whole, targets) = parts(cluster), drawn()
        own = whole[..., slice(*vocabulary.own)].clone().requires_grad_()
        seen = []
        for name in ("sum", "smooth, of all"):
            with _Largest() as mode:
                LOSSES[name](VocabParallelLogits(own, vocabulary), targets).backward()
            seen.append(mode.numel)
        return own.numel(), *seen

    for own, cut_loss, whole_loss in run_ranks(largest, 2):
        assert cut_loss == own and whole_loss >= ROWS * SIZE


def test_a_token_that_is_none_is_an_error() -> None:
    vocabulary = parts(Cluster.single())
    with pytest.raises(IndexError, match="a token is not in the vocabulary of 101"):
        F.cross_entropy(VocabParallelLogits(torch.zeros(1, SIZE), vocabulary), torch.tensor([SIZE]))
    with pytest.raises(IndexError, match="vocabulary of 101"):
        vocabulary.place(torch.tensor([-1]))


TWINS: dict[str, tuple[str, Any]] = {
    "the largest logit of this rank only": (
        "vocab_parallel._largest",
        lambda part, vocabulary: part.amax(-1),
    ),
    "targets of others are counted": (
        "vocab_parallel.VocabularyPartition.place",
        lambda self, tokens: ((tokens - self.own[0]).clamp(0, self.own[1] - self.own[0] - 1), tokens < -1),
    ),
}


@pytest.mark.capability("Z2")
def test_a_broken_cross_entropy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twins."""

    def found(cluster: Cluster) -> dict[str, bool]:
        wrong = {}
        for twin, (name, broken) in TWINS.items():
            with monkeypatch.context() as patch:
                patch.setattr(f"paceline.parallel.tensor.{name}", broken)
                wrong[twin] = not max(differences(cluster).values()) < 1e-5
        return wrong

    assert run_ranks(found, 2)[0] == dict.fromkeys(TWINS, True)
