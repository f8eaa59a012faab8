"""Parts of micro-batches: messages are divided and joined by samples, and what cannot be divided is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import TaskError
from paceline.models import KeyedDropout
from paceline.parallel.model_runner import LossSums, MetricNames
from paceline.parallel.pipeline import partition_model
from paceline.parallel.pipeline.model_chain import WritableInput
from paceline.parallel.pipeline.rechunk import PartReceiver, slice_batch
from paceline.parallel.rng_state import RngStates, require_unchanged_rng
from paceline.pipeline_schedule import PipelineAction, part_samples

SAMPLES = 5


class Post:
    """A neighbour that has sent everything: samples are numbers."""

    def __init__(self, inbox_parts: Sequence[int], source: int, kind: str = "F", state: bool = False) -> None:
        parts = inbox_parts[source]
        key = PartReceiver(self, source, inbox_parts, 1).key
        self.taken = 0
        self.there = {
            key(PipelineAction(kind, 3, 0, part)): self._message(part_samples(SAMPLES, parts, part), state)
            for part in range(parts)
            if part_samples(SAMPLES, parts, part)
        }

    @staticmethod
    def _message(samples: range, state: bool) -> tuple[list[Tensor], float]:
        x = torch.tensor([float(i) for i in samples])
        return [x, x.view(-1, 1) + 10.0, *[torch.zeros(7)] * state], float(state)

    def receive(self, source: int, *, key: int = 0) -> tuple[list[Tensor], float]:
        self.taken += 1
        return self.there.pop(key)

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        raise AssertionError("nobody sends here")

    def flush(self, most: int = 0) -> None:
        raise AssertionError("nobody sends here")

    abort = flush


@pytest.mark.capability("D9")
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("own, theirs", [(1, 4), (4, 1), (2, 6), (6, 2), (3, 3), (8, 1), (1, 8), (12, 6)])
def test_a_stage_gets_its_own_samples_whatever_its_neighbour_sends(
    own: int, theirs: int, state: bool
) -> None:
    for kind, stage in (("F", 1), ("B", 0)):
        parts = [theirs, own] if stage else [own, theirs]
        post = Post(parts, 1 - stage, kind, state and kind == "F")
        inbox = PartReceiver(post, stage, parts, 1)
        for part in range(own):
            wanted = [float(i) for i in part_samples(SAMPLES, own, part)]
            if not wanted:
                continue
            (x, y, *rest), note = inbox.take(1 - stage, PipelineAction(kind, 3, 0, part), SAMPLES)
            assert x.tolist() == wanted and y.tolist() == [[i + 10.0] for i in wanted]
            assert len(rest) == int(note) == int(state and kind == "F")
        assert not post.there
        with pytest.raises(KeyError):  # nothing is kept
            inbox.take(1 - stage, PipelineAction(kind, 3, 0, own - 1), SAMPLES)


def test_what_an_aborted_step_has_left_is_forgotten() -> None:
    post = Post([1, 2], 0)
    inbox = PartReceiver(post, 1, [1, 2], 1)
    inbox.take(0, PipelineAction("F", 3, 0, 0), SAMPLES)
    inbox.abort()
    post.there = Post([1, 2], 0).there
    (x, _), _ = inbox.take(0, PipelineAction("F", 3, 0, 1), SAMPLES)
    assert post.taken == 2 and x.tolist() == [2.0, 3.0, 4.0]


def test_a_batch_is_divided_in_all_its_containers() -> None:
    x = torch.arange(4.0)
    found = slice_batch({"x": x, "more": (x.view(4, 1), [None, 3])}, range(1, 3), 4)
    assert found["x"].tolist() == [1.0, 2.0] and found["more"][0].tolist() == [[1.0], [2.0]]
    assert found["more"][1] == [None, 3]
    for wrong, says in (({"x": x[:3]}, r"\[3\] does not have 4 samples"), ([x, "names"], "contains str")):
        with pytest.raises(TaskError, match=says):
            slice_batch(wrong, range(1), 4)


def cut(links: Sequence[nn.Module], loss: Any = None, parts: Sequence[int] = (1, 2)) -> None:
    samples = [(torch.linspace(-1.0, k, 6), torch.tensor(k % 3)) for k in range(4)]
    task = Task(nn.Sequential(*links), samples, loss or cross_entropy)
    partition_model(task, task.model, 2, 0, lengths=[1, len(links) - 1], divided=parts)


def cross_entropy(model: nn.Module, batch: Any) -> Loss:
    x, labels = batch
    return Loss(nn.functional.cross_entropy(model(x), labels, reduction="sum"), len(labels))


def of_the_batch(model: nn.Module, batch: Any) -> Loss:
    """What a sample adds depends on how many there are."""
    logits = model(batch[0])
    return Loss(logits.square().sum() * len(logits), len(logits))


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def hooked() -> nn.Module:
    layer = nn.Linear(8, 3)
    layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    return layer


@pytest.mark.capability("D9")
@pytest.mark.parametrize(
    "middle, loss, says",
    [
        (Mixes(), None, "differs between two samples together and one by one"),
        (nn.BatchNorm1d(8), None, "changes the buffer 'running_mean'|changes the buffer '1.running_mean'"),
        (nn.Dropout(0.5), None, "differs between two samples together and one by one"),
        (nn.Identity(), of_the_batch, "the loss differs between two samples"),
    ],
    ids=["mixes", "batch norm", "own generator", "loss"],
)
def test_samples_that_see_each_other_are_refused(middle: nn.Module, loss: Any, says: str) -> None:
    torch.manual_seed(1)
    links = [nn.Linear(6, 8), middle, nn.Linear(8, 3)]
    cut(links, loss, parts=(1, 1))
    with pytest.raises(TaskError, match=says):
        cut(links, loss)


@pytest.mark.capability("D9")
def test_a_hook_that_waits_for_a_gradient_is_refused() -> None:
    with pytest.raises(TaskError, match="part by part"):
        cut([nn.Linear(6, 8), hooked()])


@pytest.mark.capability("D9")
def test_samples_that_do_not_see_each_other_are_not_refused() -> None:
    """Masks are those of both samples, and a norm over features is one over each sample's own."""
    links = [nn.Linear(6, 8), nn.LayerNorm(8), KeyedDropout(0.5), nn.Flatten(), nn.Linear(8, 3)]
    for parts in ((1, 2), (4, 2), (3, 3)):
        cut(links, parts=parts)
    assert all(m.micro_batch_key is None for m in links if isinstance(m, KeyedDropout))


@pytest.mark.capability("D9")
def test_who_draws_from_the_generator_of_pytorch_is_named() -> None:
    earlier_state = RngStates.current()
    require_unchanged_rng(None)
    require_unchanged_rng(earlier_state)
    torch.rand(1)
    with pytest.raises(TaskError, match=r"nn\.Dropout"):
        require_unchanged_rng(earlier_state)


@pytest.mark.capability("D9")
def test_a_mask_of_a_part_is_that_part_of_the_mask() -> None:
    dropout = KeyedDropout(0.5)
    dropout.name, dropout.micro_batch_key = "d", 7
    x = torch.ones(6, 5, 2)
    right = dropout(x)
    found = []
    for span in (range(1), range(1, 4), range(4, 6)):
        dropout.take_samples(span, 6)
        found.append(dropout(x[span.start : span.stop]))
        flat = dropout(x[span.start : span.stop].flatten(0, 1))  # every sample has five rows
        dropout.take_all()
        assert torch.equal(flat, dropout(x.flatten(0, 1))[5 * span.start : 5 * span.stop])
    assert torch.equal(torch.cat(found), right)
    dropout.take_samples(range(2, 4), 6)
    with pytest.raises(TaskError, match="3 rows for 2 samples"):
        dropout(x[:3])


@pytest.mark.capability("D9")
def test_a_mask_of_a_part_is_that_of_the_positions_that_are_here() -> None:
    """Tensor ranks may run a block by positions: a part of the samples, and a part of the positions."""
    dropout = KeyedDropout(0.5)
    dropout.name, dropout.micro_batch_key = "d", 7
    x = torch.ones(6, 5, 2)
    right = dropout(x)
    dropout.take_positions(LastPositions())
    dropout.take_samples(range(1, 4), 6)
    assert torch.equal(dropout(x[1:4, 3:]), right[1:4, 3:])


class LastPositions:
    length = 5

    def own(self) -> tuple[int, int]:
        return 3, 5


@pytest.mark.capability("D9")
def test_parts_are_one_micro_batch_of_the_sums() -> None:
    """Buffers of other stages move by the mean over micro-batches, so parts may not count as some."""
    sums = LossSums(MetricNames())
    for total, continues_micro_batch in ((1.0, False), (2.0, True), (4.0, True), (8.0, False)):
        sums.add(Loss(torch.tensor(total), 2, {"right": 1.0}), continues_micro_batch=continues_micro_batch)
    assert sums.micro_batches == 2
    assert sums.read() == (15.0, 8.0, {"right": 4.0})


@pytest.mark.capability("D9")
def test_a_part_may_be_written_to_while_the_backward_of_another_needs_it() -> None:
    """All lie in the memory of one message, and each is its own for autograd."""
    parts, samples = (2, 1), torch.arange(float(SAMPLES))
    inbox = PartReceiver(Post(parts, 1), 0, parts, 1)
    took = [inbox.take(1, PipelineAction("F", 3, 0, part), SAMPLES)[0][0] for part in range(2)]
    assert took[0].untyped_storage().data_ptr() == took[1].untyped_storage().data_ptr()
    first, second = (WritableInput.apply(x.requires_grad_()) for x in took)
    squares = first.square()
    second.zero_()
    squares.sum().backward()
    assert torch.equal(took[0].grad, 2 * samples[: len(first)])
    assert torch.equal(took[0], samples[: len(first)]) and not second.any()
