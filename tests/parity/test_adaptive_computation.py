"""Layer drop, the same blocks on ranks that run one micro-batch, and early exits with counted FLOPs."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPTConfig, LayerDrop, evaluate_early_exit, set_micro_batch_key
from paceline.models import dropout as dropout_module
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.recipes import recipe_of

OPTIONS = {"context": 16, "layers": 4, "heads": 2, "width": 16, "train_tokens": 4000, "held_out_tokens": 500}
BATCH = {"size": 16, "shards": 4}


def gpt(strategy: str, steps: int = 4, drop: float = 0.5) -> Recipe:
    options = OPTIONS | {"layer_drop": drop}
    return recipe_of(strategy, task="byte-gpt", steps=steps, batch=BATCH, options=options)


LAYOUTS = {
    1: ("replicas=1",),
    2: ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 tensor=2", "replicas=1 pipeline=2"),
    3: ("replicas=1 shard=3 zero=3",),
    4: ("replicas=2 shard=2 zero=1", "replicas=2 tensor=2", "replicas=1 pipeline=4"),
}


@pytest.mark.capability("J20")
@pytest.mark.parametrize("num_ranks", [soak_param(1), soak_param(2), 3, 4])
def test_layer_drop_is_that_of_one_process_under_every_layout(num_ranks: int) -> None:
    def verify(cluster: Cluster) -> list[str]:
        found = []
        for layout in LAYOUTS[num_ranks]:
            report = compare_with_oracle(gpt(layout), make_task(gpt(layout)), cluster, CPU, 4)
            found.append("" if report.ok and report.steps == 4 else str(conclusion_lines(report)))
        return found

    for found in run_ranks(verify, num_ranks):
        assert found == [""] * len(LAYOUTS[num_ranks])


@pytest.mark.capability("J20")
def test_blocks_that_ranks_choose_for_themselves_are_found() -> None:
    """The mutation twin: each rank draws from its own number in place of the key of the micro-batch."""

    def verify(cluster: Cluster) -> bool:
        def own_choice(module: LayerDrop) -> bool:
            return (cluster.global_rank + int(module.name.split(".")[1])) % 2 == 0

        recipe = gpt("replicas=2", steps=1)
        with patch.object(dropout_module, "_keeps_block", own_choice):
            return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 1).ok

    assert run_ranks(verify, 2) == [False, False]


def test_the_share_of_skipped_blocks_is_p_and_none_is_skipped_in_evaluation() -> None:
    model = GPT(GPTConfig(vocab=8, context=4, layers=4, heads=1, width=4, layer_drop=0.3))
    drops = [module for module in model.modules() if isinstance(module, LayerDrop)]
    skipped = 0
    for micro_batch in range(200):
        set_micro_batch_key(model, micro_batch)
        choices = [drop.skips() for drop in drops]
        assert choices == [drop.skips() for drop in drops]
        skipped += sum(choices)
    assert abs(skipped / 800 - 0.3) < 0.05
    model.eval()
    assert not any(drop.skips() for drop in drops)
    assert not any(isinstance(module, LayerDrop) for module in GPT(GPTConfig()).modules())


@pytest.mark.capability("J20")
def test_a_lower_threshold_exits_earlier_and_needs_fewer_flops() -> None:
    """Counted FLOPs and depths: nothing exits above 1, everything after one block at 0."""
    session = build_test_session(Cluster.single(), gpt("replicas=1", steps=30, drop=0.2))
    list(session.rounds())
    model = session.state.model
    assert isinstance(model, GPT)
    batches = [torch.stack([session.task.held_out[i] for i in range(8)])]
    evaluate = partial(evaluate_early_exit, model, batches)
    never, always = evaluate(1.1), evaluate(0.0)
    middle = evaluate(0.05)
    session.close()
    assert never.exits == (0, 0, 0, 0, 8) and always.exits == (0, 8, 0, 0, 0)
    assert never.flops == never.full_flops > 3 * always.flops / 2
    assert always.flops <= middle.flops and sum(middle.exits) == 8
    # With all blocks the loss is that of the model itself.
    logits = model.eval()(batches[0][:, :-1]).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(logits, batches[0][:, 1:].flatten())
    assert never.loss == pytest.approx(float(right), rel=1e-5)
    with pytest.raises(TaskError, match="least_blocks = 5 of a GPT with 4 blocks"):
        evaluate(0.5, least_blocks=5)
    with pytest.raises(TaskError, match="no batch"):
        evaluate_early_exit(model, [], 0.5)
