"""Tensor parallelism: attention by heads, plans, and tensor ranks beside other axes, held against the oracle.

Few groups of ranks, each warm for many cases. Each way to be wrong has a mutation twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Task
from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.parallel.tensor import attention_heads, mappings, tensor_plan
from paceline.recipe import Recipe
from paceline.session import checkpointing, fit
from paceline.state.slot import join_runs
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from tests.marks import soak_param
from tests.parity import tensor_models
from tests.recipes import recipe_of
from tests.texts import SMALL_TEXT

GPT = {"layers": 2, "width": 48, "heads": 3, "context": 16, "dropout": 0.1, "sample_tokens": 0}
DATA = {"text": SMALL_TEXT, "train_tokens": 20_000, "held_out_tokens": 200}


recipe = partial(
    recipe_of,
    task="byte-gpt",
    options={**GPT, **DATA},
    steps=8,
    batch={"size": 14, "shards": 3},
    optimizer={"name": "adamw", "lr": 3e-3, "clip_norm": 0.1, "weight_decay": 0.1},
)


SAME: Mapping[str, str] = {}


def wrong_with(report: VerificationReport) -> str:
    return "" if report.ok else f"{report.failure} {report.diagnosis}"


def verified(
    cluster: Cluster, build: Callable[[], Task] | None = None, steps: int = 3, *, checks: bool = True
) -> VerificationReport:
    """On as many tensor ranks as there are."""
    settings = recipe(f"replicas=1 tensor={cluster.world_size}", debug={"check": checks})
    return compare_with_oracle(settings, build() if build else make_task(settings), cluster, CPU, steps)


def calls_of_a_step(
    cluster: Cluster, build: Callable[[], Task] | None = None, plan: Mapping[str, str] = SAME
) -> dict[str, int]:
    """Collectives of the tensor ranks in the forward and backward of one micro-batch, by operation."""
    one = {"batch": {"size": 4, "shards": 1}, "tensor": dict(plan)}
    session = build_test_session(
        cluster, recipe(f"replicas=1 tensor={cluster.world_size} route=native", **one), build
    )

    def calls() -> Counter[str]:
        rows = session.net.ledger.rows.items()
        return Counter({op: row.calls for (op, group), row in rows if group == "tensor"})

    before, counted = calls(), []
    for _, _ in zip(range(3), session.rounds(), strict=False):
        counted.append(calls() - before)
        before = calls()
    session.close()
    assert counted[1] == counted[2]
    return dict(counted[2])


WHOLE = {"all_reduce": 2 * 2 * 2 + 3, "all_gather": 1}
"""Two blocks of two branches, with a sum a direction each. One sum of the embedding, one of the gradients
before the logits, one of the losses, whose largest logits are gathered."""


@pytest.mark.capability("C4", "C5", "J10", "Z1", "Z2")
def test_three_heads_on_two_ranks_are_those_of_one_process() -> None:
    """One sum a branch and direction, and those of the vocabulary."""

    def found(cluster: Cluster) -> tuple[str, dict[str, int]]:
        return wrong_with(verified(cluster)), calls_of_a_step(cluster)

    for wrong, calls in run_ranks(found, 2):
        assert wrong == ""
        assert calls == WHOLE


def one_run(runs: Any, width: int) -> Any:
    """The classic mistake: a fused projection cut as if it were one."""
    pairs = [(start, a, b) for start, (a, b) in runs]
    own = sum(b - a for _, a, b in pairs)
    first = sum(a for _, a, _ in pairs)
    return join_runs([(first * width, (first + own) * width)])


def unsummed(ctx: Any, grad: torch.Tensor) -> Any:
    return grad, None, None


TWINS = {
    "a fused projection cut as one": (attention_heads, "_rows", one_run),
    "gradients of what came in not summed": (mappings._CopyToRegion, "backward", staticmethod(unsummed)),
    "outputs not summed": (
        mappings._ReduceFromRegion,
        "forward",
        staticmethod(lambda ctx, x, collective, key: x * 1.0),
    ),
}


@pytest.mark.capability("Z2")
def test_broken_heads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twins."""

    def found(cluster: Cluster) -> dict[str, bool]:
        oks = {}
        for twin, (place, name, broken) in TWINS.items():
            with monkeypatch.context() as patch:
                patch.setattr(place, name, broken)
                oks[twin] = verified(cluster, steps=1).ok
        return oks

    assert run_ranks(found, 2)[0] == dict.fromkeys(TWINS, False)


OTHERS: dict[str, Callable[[], Task]] = {
    "GPT-2, 3 heads on 2 ranks": lambda: tensor_models.gpt2(3),
    "Llama, 6 heads that share 3": lambda: tensor_models.llama(6, 3),
    "Llama, 5 heads that share 1": lambda: tensor_models.llama(5, 1),
}


@pytest.mark.capability("C5", "Z1", "Z2")
@pytest.mark.parametrize("names", [[*OTHERS][::2], soak_param([*OTHERS])], ids=["some", "all"])
def test_models_of_others_run_by_the_plans_that_ship(names: list[str]) -> None:
    pytest.importorskip("transformers")

    def wrong_of(cluster: Cluster) -> dict[str, str]:
        wrong = {name: wrong_with(verified(cluster, OTHERS[name], 2)) for name in names}
        for name in names[:-1]:
            wrong[f"calls of {name}"] = str(
                Counter(calls_of_a_step(cluster, OTHERS[name])) - Counter(WHOLE) or ""
            )
        transform = tensor_plan.plan_tensor_transform
        with pytest.MonkeyPatch.context() as patch:  # the twin
            unsummed = {"summed": frozenset()}
            patch.setattr(
                "paceline.parallel.tensor.tensor_plan.plan_tensor_transform",
                lambda *args: type(transform(*args))(**(vars(transform(*args)) | unsummed)),
            )
            # The check before the first step would find these gradients and sum them.
            if verified(cluster, OTHERS["Llama, 5 heads that share 1"], 1, checks=False).ok:
                wrong["twin"] = "gradients of repeated keys are not summed, and nobody sees it"
        return wrong

    assert not any(run_ranks(wrong_of, 2)[0].values())


@pytest.mark.capability("N3")
def test_a_checkpoint_by_heads_is_that_of_one_process_and_back(tmp_path: Path) -> None:
    """Two ranks, then one process, then two ranks."""

    def go_on(cluster: Cluster, strategy: str, steps: int) -> tuple[dict[str, torch.Tensor], ...]:
        session = build_test_session(cluster, recipe(strategy, steps=steps))
        if steps > 2:
            checkpointing.restore_checkpoint(session, StorageFolder(str(tmp_path / "checkpoints")))
            assert session.state.step == steps - 2
        begins = {name: t.clone() for name, t in session.snapshot().tensors().items()}
        fit(session, tmp_path)
        return begins, {name: t.clone() for name, t in session.snapshot().tensors().items()}

    ends: dict[str, torch.Tensor] = {}
    for strategy, ranks, steps in (
        ("replicas=1 tensor=2", 2, 2),
        ("replicas=1", 1, 4),
        ("replicas=1 tensor=2", 2, 6),
    ):
        found = run_ranks(go_on, ranks, strategy, steps)
        for begins, _ in found:
            assert not ends or begins.keys() == ends.keys()
            assert all(torch.equal(begins[name], value) for name, value in ends.items())
        ends = found[0][1]


@pytest.mark.capability("C9")
def test_halves_learn_as_floats_do_and_all_ranks_leave_out_an_overflow() -> None:
    """Weights stay float32; a scale that overflows is halved on all ranks in the same steps."""

    def losses(cluster: Cluster, **precision: Any) -> tuple[list[float], int, set[torch.dtype]]:
        session = build_test_session(cluster, recipe("replicas=1 tensor=2", steps=20, precision=precision))
        found = [stats.loss for stats in session.rounds()]
        return (
            found,
            session.state.num_updates,
            {p.dtype for p in session.runner.sharded_model.updates.values()},
        )

    def both(cluster: Cluster) -> list[tuple[list[float], int, set[torch.dtype]]]:
        high = {"compute": "fp16", "init_scale": 2.0**24}
        return [losses(cluster, compute="fp32"), losses(cluster, compute="bf16"), losses(cluster, **high)]

    first, second = run_ranks(both, 2)
    (floats, updates, _), (halves, _, types), (_, scaled, _) = first
    assert updates == 20 and types == {torch.float32}
    assert max(abs(a / b - 1) for a, b in zip(halves, floats, strict=True)) < 0.02
    assert 0 < scaled < 20 and [one[1] for one in second] == [one[1] for one in first]


def test_a_whole_copy_of_a_cut_model_is_the_model_as_it_was() -> None:
    """What is sampled from, or given to the user, runs on one rank alone."""

    def logits(cluster: Cluster, strategy: str) -> torch.Tensor:
        session = build_test_session(cluster, recipe(strategy))
        model = session.complete().eval()
        found = torch.zeros(0)
        if cluster.global_rank == 0:
            with torch.no_grad():
                found = model(torch.arange(12).view(1, 12))
        assert isinstance(found, torch.Tensor)
        return found

    cut, whole = run_ranks(logits, 2, "replicas=1 tensor=2")[0], run_ranks(logits, 1, "replicas=1")[0]
    assert cut.shape == (1, 12, 256) and torch.allclose(cut, whole, atol=1e-6)


FOURS = {
    "replicas": "replicas=2 tensor=2",
    "shard, zero=1": "replicas=1 shard=2 zero=1 tensor=2",
    "shard, zero=2": "replicas=1 shard=2 zero=2 tensor=2",
    "shard, zero=3": "replicas=1 shard=2 zero=3 tensor=2",
    "shard, zero=3, native": "replicas=1 shard=2 zero=3 tensor=2 route=native",
    "stages": "replicas=1 tensor=2 pipeline=2",
    "stages, 1f1b": "replicas=1 tensor=2 pipeline=2 schedule=1f1b",
    "stages of replicas": "replicas=2 pipeline=2",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "recompute": {"memory": {"recompute": "blocks"}},
    "learned positions": {"options": {**GPT, **DATA, "positions": "learned"}},
    "frozen": {},
    "by position": {"tensor": {"blocks.*": "sequence"}},
}
PAIRS = [
    ("replicas", "by position"),
    ("shard, zero=2", "recompute"),
    ("shard, zero=3", "frozen"),
    ("stages", "bf16"),
    ("stages of replicas", "clip"),
]


def task_of(settings: Recipe, cell: str) -> Task:
    """Frozen: the embedding, which is the output layer too, and the queries of a block."""
    task = make_task(settings)
    if cell == "frozen":
        for name in ("embed.weight", "blocks.1.attention.qkv.weight", "blocks.0.attention_norm.weight"):
            for own, p in task.model.named_parameters():
                if own == name:
                    p.requires_grad_(False)
    return task


def wrong_in(cluster: Cluster, cells: list[tuple[str, str]], steps: int) -> dict[str, str]:
    found = {}
    for layout, cell in cells:
        settings = recipe(FOURS[layout], batch={"size": 15, "shards": 4}, **SETTINGS[cell])
        report = compare_with_oracle(settings, task_of(settings, cell), cluster, CPU, steps)
        found[f"{layout} x {cell}"] = wrong_with(report)
    return found


@pytest.mark.capability("E1", "J11", "Z1", "Z2")
@pytest.mark.parametrize("pairs", [PAIRS[::2], soak_param(PAIRS[1::2])], ids=["some", "the others"])
def test_pairs_of_layouts_and_settings_are_those_of_one_process(pairs: list[tuple[str, str]]) -> None:
    for found in run_ranks(wrong_in, 4, pairs, 2):
        assert not any(found.values()), found


@pytest.mark.soak
@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("layout", FOURS)
def test_every_cell_is_that_of_one_process(layout: str) -> None:
    cells = [
        (layout, cell)
        for layout, cell in product([layout], SETTINGS)
        if cell != "by position" or "pipeline" not in FOURS[layout]
    ]
    for found in run_ranks(wrong_in, 4, cells, 4):
        assert not any(found.values()), found


@pytest.mark.soak
@pytest.mark.capability("E3", "J11", "N3")
def test_two_by_two_by_two_ends_where_one_process_does(tmp_path: Path) -> None:
    """Twenty steps of AdamW with a clip and a schedule; the checkpoint is read by others."""

    def trained(cluster: Cluster, strategy: str, steps: int, resumes: bool) -> dict[str, torch.Tensor]:
        schedule = {"warmup_steps": 4, "decay": "cosine"}
        settings = recipe(strategy, steps=steps, schedule=schedule, batch={"size": 14, "shards": 4})
        session = build_test_session(cluster, settings)
        folder = tmp_path / ("one" if cluster.world_size == 1 and not resumes else "eight")
        if resumes:
            checkpointing.restore_checkpoint(session, StorageFolder(str(folder / "checkpoints")))
        else:
            fit(session, folder)
        return {name: t.clone() for name, t in session.snapshot().tensors().items()}

    (one,) = run_ranks(trained, 1, "replicas=1", 20, False)
    eight = run_ranks(trained, 8, "replicas=2 tensor=2 pipeline=2", 20, False)[0]
    for then, ranks in (("replicas=1", 1), ("replicas=4", 4), ("replicas=1 tensor=2", 2)):
        for back in run_ranks(trained, ranks, then, 20, True):
            assert all(torch.equal(back[name], value) for name, value in eight.items()), then
    weights = {name: value for name, value in one.items() if name.startswith("model/")}
    assert max(float((eight[name] - value).abs().max()) for name, value in weights.items()) <= 1e-5
