"""Context parallelism against the oracle, which never splits a sequence: also in stages and in an own loop.

Mutation twins: positions that begin at 0 on every rank, a loss that is counted on every rank. Those of the
ring are in tests/dist/test_ring_attention.py."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.errors import RecipeError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.models import positions
from paceline.parallel.context import context_attention
from paceline.parallel.context.context_attention import ContextParallelMode
from paceline.parallel.placement import ContextTransform, TensorPlacement
from paceline.recipe import Recipe, Strategy
from paceline.session import OwnLoop, build_session, evaluate, partition_check
from paceline.session.fit_loop import fitting
from paceline.task import Loss, PositionSlicer, Task
from paceline.tasks.byte_gpt import next_token_loss
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.texts import SMALL_TEXT

STEPS = 20


def recipe(strategy: str, **options: Any) -> Recipe:
    """21 positions, which no number of ranks here divides."""
    settings: dict[str, Any] = {
        "task": "byte-gpt",
        "options": {"layers": 2, "width": 48, "heads": 6, "context": 21, "dropout": 0.1, "sample_tokens": 0}
        | {"text": SMALL_TEXT, "train_tokens": 20_000, "held_out_tokens": 400}
        | options,
        "steps": STEPS,
        "batch": {"size": 9, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.1, "weight_decay": 0.1},
        "schedule": {"decay": "cosine", "warmup_steps": 4},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**settings)


def verified(cluster: Cluster, of: Recipe) -> str:
    report = compare_with_oracle(of, make_task(of), cluster, CPU, of.steps or 0)
    return "" if report.ok and report.steps == of.steps else f"{report.failure} {report.diagnosis}"


def score(cluster: Cluster, of: Recipe) -> tuple[float, float]:
    found = evaluate(build_test_session(cluster, of))
    assert found is not None
    return found.loss, found.num_items


TWO = {"rotary, by heads": {}, "learned, around the ring": {"positions": "learned", "heads": 3}}


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("which", ["rotary, by heads", soak_param("learned, around the ring")])
def test_two_ranks_train_as_one_process(which: str) -> None:
    """Losses, gradients, norm and parameters of 20 AdamW steps, and an evaluation; and what is refused."""

    def both(cluster: Cluster) -> tuple[str, tuple[float, float]]:
        found = verified(cluster, recipe("replicas=1 context=2", **TWO[which]))
        return found, score(cluster, recipe("replicas=1 context=2"))

    loss, items = score(Cluster.single(), recipe("replicas=1"))
    for found, (mine, counted) in run_ranks(both, 2):
        assert found == ""
        assert counted == items and abs(mine - loss) <= 1e-6 * loss


PRODUCTS = {
    "replicas=1 context=3": 3,
    "replicas=1 context=4": 4,
    "replicas=2 context=2": 4,
    "replicas=1 context=2 tensor=2": 4,
    "replicas=1 context=2 shard=2 zero=1": 4,
    "replicas=1 context=2 shard=2 zero=2": 4,
    "replicas=1 context=2 shard=2 zero=3": 4,
    "replicas=1 context=2 shard=2 zero=3 route=native": 4,
    "replicas=2 context=2 shard=2 zero=2": 8,
    "replicas=1 context=2 shard=2 zero=1 tensor=2": 8,
    "replicas=1 context=2 pipeline=2 schedule=interleaved:2": 4,
    "replicas=1 context=2 pipeline=2 schedule=zero-bubble": 4,
    "replicas=1 context=2 pipeline=4 schedule=1f1b": 8,
    "replicas=2 context=2 pipeline=2": 8,
    "replicas=1 context=2 pipeline=2 tensor=2 schedule=1f1b": 8,
    "replicas=1 context=2 pipeline=2 shard=2 zero=1": 8,
    "replicas=1 context=2 pipeline=2 shard=2 zero=2 schedule=zero-bubble": 8,
    "replicas=1 context=2 pipeline=2 shard=2 zero=3 route=native": 8,
}


@pytest.mark.soak
@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("strategy", PRODUCTS)
@pytest.mark.parametrize("options", TWO.values(), ids=list(TWO))
def test_products_train_as_one_process(strategy: str, options: dict[str, Any]) -> None:
    assert run_ranks(verified, PRODUCTS[strategy], recipe(strategy, **options)) == [""] * PRODUCTS[strategy]


@pytest.mark.soak
@pytest.mark.capability("Z1", "C3", "J1")
@pytest.mark.parametrize("changes", [{"memory": {"recompute": "blocks"}}, {"precision": {"compute": "bf16"}}])
def test_recomputed_and_in_bf16(changes: dict[str, Any]) -> None:
    assert run_ranks(verified, 2, recipe("replicas=1 context=2").replace(**changes)) == ["", ""]


def llama() -> Task:
    """Four heads of queries share two of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.1}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)

    def pairs(tokens: Tensor, part: PositionSlicer) -> dict[str, Tensor]:
        places = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        return {"in": part(tokens[:, :-1], 1), "out": part(tokens[:, 1:], 1), "at": part(places, 1)}

    def loss(model: nn.Module, batch: Any) -> Loss:
        b = batch if isinstance(batch, dict) else pairs(batch, lambda x, dim: x)
        mask = torch.ones_like(b["in"])  # without one positions with a gap are taken for two sequences
        logits = model(input_ids=b["in"], position_ids=b["at"], attention_mask=mask, use_cache=False).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), b["out"].flatten(), reduction="sum")
        return Loss(total, b["out"].numel())

    data = torch.randint(0, 64, (40, 22), generator=torch.Generator().manual_seed(1))
    return Task(LlamaForCausalLM(config), list(data), loss, sequence=pairs)


@pytest.mark.soak
@pytest.mark.capability("Z1")
def test_a_llama_trains_as_one_process() -> None:
    pytest.importorskip("transformers")

    def run(cluster: Cluster) -> str:
        of = recipe("replicas=1 context=2").replace(task="own", options={}, steps=6)
        report = compare_with_oracle(of, llama(), cluster, CPU, 6)
        return "" if report.ok and report.steps == 6 else str(report.failure)

    assert run_ranks(run, 2) == ["", ""]


def begins_at_zero(self: ContextParallelMode, x: Tensor, dim: int) -> Tensor:
    """The positions of a model that does not know that it sees a part."""
    return torch.arange(x.shape[dim], device=x.device)


def counted_on_both(model: nn.Module, batch: Any) -> Loss:
    """A loss whose every part counts the items of the whole."""
    found = next_token_loss(model, batch)
    return Loss(found.total, found.count * (2 if isinstance(batch, tuple) else 1))


def all_begin_at_zero() -> Any:
    return patch.dict(context_attention._INSTEAD, {positions: begins_at_zero})


def nobody_asks() -> Any:
    """What a model returns on parts of a sequence is not compared before the first step."""
    return patch.object(partition_check, "_compare_values", lambda *args: None)


@pytest.mark.capability("Z2")
def test_broken_twins_are_found() -> None:
    """Before the first step, and by verification if nobody had asked then."""

    def broken(cluster: Cluster) -> list[bool]:
        of, found = recipe("replicas=1 context=2", positions="learned").replace(steps=2), list[bool]()
        task = make_task(of)
        for mistake, loss, why in (
            (all_begin_at_zero(), task.loss, "returns other values on parts of a sequence"),
            (nullcontext(), counted_on_both, "the count of the loss of the first sample"),
        ):
            with mistake:
                with pytest.raises(TaskError, match=why):
                    build_session(of, replace(make_task(of), loss=loss), cluster, CPU)
                twin = replace(make_task(of), loss=loss)
                with nobody_asks():
                    found.append(compare_with_oracle(of, twin, cluster, CPU, 2).ok)
        return found

    assert run_ranks(broken, 2) == [[False, False]] * 2


class Mixed(nn.Module):
    """Looks at the position before in another way than by attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(256, 8), how
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mT
        if self.how in ("again", "anew"):
            return self.head(checkpoint(self.attend, x.mT, use_reentrant=self.how == "again"))
        return self.head((self.norm if self.how == "norm" else self.conv)(x).mT)

    def attend(self, x: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


def test_a_model_that_mixes_positions_is_refused_by_name() -> None:
    def refused(cluster: Cluster) -> list[str]:
        found = []
        of = recipe("replicas=1 context=2")
        for how in ("norm", "conv", "again", "anew", "nothing"):
            task = replace(make_task(of), model=Mixed(how), initialize=None, stages=None)
            if how == "nothing":
                task = replace(task, sequence=None)
            with pytest.raises((TaskError, StrategyError)) as caught:
                build_session(of, task, cluster, CPU)
            found.append(caught.value.what)
        return found

    for norm, conv, again, anew, nothing in run_ranks(refused, 2):
        assert "changes the buffer 'norm.running_mean'" in norm
        assert "returns other values on parts of a sequence" in conv
        assert all("the model uses torch.utils.checkpoint" in own for own in (again, anew))
        assert "the task does not say where the positions" in nothing


def test_reproducible_is_refused_for_what_the_cut_says_of_itself() -> None:
    with pytest.raises(
        RecipeError, match="context=1 with reproducible, found context=2: sums over the positions"
    ):
        Recipe(**{**recipe("replicas=1 context=2").model_dump(), "reproducible": True})


STAGES = "replicas=1 context=2 pipeline=2 schedule=1f1b"


def summed_by_itself(self: ContextTransform, held: TensorPlacement, coordinate: int) -> TensorPlacement:
    """A cut that forgets to sum over the ranks that run other positions."""
    return replace(held, counts=held.counts and coordinate == 0)


@pytest.mark.capability("Z1", "Z2", "E2", "J11")
def test_stages_train_on_parts_of_sequences_as_one_process() -> None:
    """Tied weights, clip, dropout, micro-batches in turn, blocks recomputed; and an evaluation.

    Mutation twins: gradients summed over the wrong axes; positions that begin at 0 on every rank, which are
    refused before the first step, and found if nobody had asked then.
    """
    of = recipe(STAGES, positions="learned", heads=3).replace(steps=6)
    again = recipe(STAGES).replace(steps=4, memory={"recompute": "blocks"})

    def run(cluster: Cluster) -> tuple[list[str], tuple[float, float], list[bool]]:
        right, found = [verified(cluster, of), verified(cluster, again)], list[bool]()
        with patch.object(ContextTransform, "cut", summed_by_itself):
            found.append(compare_with_oracle(of, make_task(of), cluster, CPU, 1).ok)
        with all_begin_at_zero():
            with pytest.raises(TaskError, match="returns other values on parts of a sequence"):
                build_session(of, make_task(of), cluster, CPU)
            with nobody_asks():
                found.append(compare_with_oracle(of, make_task(of), cluster, CPU, 1).ok)
        return right, score(cluster, of), found

    loss, items = score(Cluster.single(), of.replace(strategy="replicas=1"))
    for right, (mine, counted), found in run_ranks(run, 4):
        assert right == ["", ""]
        assert counted == items and abs(mine - loss) <= 1e-6 * loss
        assert found == [False, False]


def by_hand(own: Any) -> None:
    """A user's own loop; it gets what `Task.sequence` gives, or the whole batch in one process."""
    for batch in own.batches():
        own.backward(next_token_loss(own.model, batch))
        own.step()


def looped(cluster: Cluster, of: Recipe) -> float:
    """The loss that an own loop finds inside its body, after two steps."""
    losses = []
    session = build_test_session(cluster, of)
    with fitting(session, None, ()) as found:
        loop = OwnLoop(session, found)
        for batch in loop.batches():
            loop.backward(next_token_loss(loop.model, batch))
            if loop.step() is not None:
                evaluation = loop.evaluate()
                losses.append(evaluation.loss if evaluation else 0.0)
        loop.end()
    return losses[-1]


@pytest.mark.capability("Z1", "Z2")
def test_an_own_loop_gets_its_positions() -> None:
    """Verified step by step; and an evaluation in the body of the loop, where both see their positions."""
    of = recipe("replicas=1 context=2", positions="learned", heads=6).replace(steps=3)

    def run(cluster: Cluster) -> tuple[str, float]:
        report = compare_with_oracle(of, make_task(of), cluster, CPU, 3, loop=by_hand)
        wrong = "" if report.ok and report.steps == 3 else f"{report.failure} {report.diagnosis}"
        return wrong, looped(cluster, of)

    right = looped(Cluster.single(), of.replace(strategy="replicas=1"))
    for wrong, loss in run_ranks(run, 2):
        assert wrong == ""
        assert abs(loss - right) <= 1e-5 * right
