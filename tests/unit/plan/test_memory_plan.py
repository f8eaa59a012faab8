"""What a plan of memory is made of: live bytes, closed forms, budgets. No process is started."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from paceline import Loss, Task
from paceline.cli.main import build_app
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.job.mesh import AXES
from paceline.models import GPTConfig
from paceline.parallel.placement import count_parameter_bytes
from paceline.plan import check_budget, model_state_bytes, nearest_that_fits, plan_memory
from paceline.plan.activation_memory import LiveBytes
from paceline.plan.micro_batch_memory import stages_on_host
from paceline.plan.simulated_ranks import simulate_ranks
from paceline.plan.zero_memory import gathered_bytes, waiting_partial_sums
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.tasks.byte_gpt import next_token_loss, next_token_sequence
from paceline.testing.parity import build_test_session
from tests.unit.plan.gpt_jobs import SMALL, gpt, recipe

LARGEST = GPTConfig(vocab=50257, context=2048, layers=96, heads=96, width=12288)
MOMENTS = "update", "backward"


def step(model: nn.Module, x: Tensor) -> tuple[int, int, dict[tuple[int, int], int]]:
    """Bytes that a forward keeps, its peak, and those of its backward."""
    live = LiveBytes()
    live.leave_out(model.parameters())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: live.complete(p.grad))
    with live:
        live.begin()
        loss = model(x).square().sum()
        kept, forward = live.now, live.peak
        live.begin()
        loss.backward()
    return kept, forward, live.peaks


@pytest.mark.capability("L3")
def test_fake_tensors_take_the_bytes_of_real_ones() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    real = step(model(), torch.zeros(16, 8))
    with FakeTensorMode():
        assert step(model(), torch.zeros(16, 8)) == real
    kept, forward, backward = real
    assert forward >= kept >= 4 * 16 * (32 + 32 + 4)  # what each layer gave
    assert max(done for _, done in backward) == 4 * (8 * 32 + 32 + 32 * 4 + 4)  # every gradient was complete


@pytest.mark.capability("L3")
def test_the_largest_gpt_3_has_350_gb_of_weights_and_2800_gb_of_state() -> None:
    assert model_state_bytes(175 * 10**9) == {"fp16 weights": 350 * 10**9, "Adam": 2800 * 10**9}
    task = gpt(LARGEST)
    held = simulate_ranks(recipe("replicas=1 shard=8 zero=3", size=8, shards=8), task, task.model, 8)
    sizes = [count_parameter_bytes(place.held.values(), dict.fromkeys(place.held, 4)) for place in held]
    updates = sum(one.updates for one in sizes)  # of all ranks: every value once
    assert updates == pytest.approx(4 * 175e9, rel=0.01)
    state = 4 * updates  # with a gradient and two moments
    assert state == pytest.approx(2.8e12, rel=0.01)
    assert max(one.updates for one in sizes) <= 1.05 * updates / 8


def test_sums_that_wait_for_others_are_those_of_the_tree() -> None:
    assert waiting_partial_sums(range(8)) == [1, 1, 2, 1, 2, 2, 3, 1]
    assert waiting_partial_sums(range(1, 4)) == [1, 2, 2]  # shard 1, then shards 2 and 3
    assert waiting_partial_sums([5, 4, 3, 2, 1, 0]) == [1, 1, 2, 2, 3, 2]  # 4 and 5 wait longer
    assert gathered_bytes([], 100, 2) == 100  # all of it, for a whole run
    assert gathered_bytes([10, 10], 5, 2) == 25
    assert gathered_bytes([10, 10], 5, 4) == 50  # Gloo takes as much again for what three ranks send


@pytest.mark.capability("L3")
def test_a_strategy_that_needs_more_than_the_budget_is_refused_with_the_nearest_that_fits() -> None:
    task = gpt()
    asked = recipe("replicas=2 route=native")
    needs = plan_memory(asked, task, 2).peak
    assert check_budget(asked.replace(memory={"budget": needs}), task, 2).refusal is None
    tight = asked.replace(memory={"budget": needs - 1, "recompute": "none"})
    error = check_budget(tight, task, 2).refusal
    assert isinstance(error, StrategyError)
    assert "in the backward" in error.what and "memory.budget is" in error.what
    assert 'the nearest that fits is "replicas=2' in error.next_step
    assert 'with memory.recompute = "blocks"' in error.next_step
    found = nearest_that_fits(plan_memory(tight, task, 2), task)
    assert found.peak < needs and found.recipe.memory.recompute == "blocks"


def test_where_nothing_fits_the_least_is_named() -> None:
    task = Task(nn.Linear(4, 1), list(torch.rand(16, 4)), lambda model, x: Loss(model(x).sum(), len(x)))
    error = check_budget(recipe("replicas=2", memory={"budget": 64}), task, 2).refusal
    assert error is not None and error.next_step.startswith("no layout of 2 processes fits; ")


@pytest.mark.capability("L3")
def test_a_run_that_does_not_fit_does_not_start() -> None:
    fits = {"task": "sum", "steps": 1, "memory": {"budget": "64MiB"}}
    build_test_session(Cluster.single(), Recipe.model_validate(fits)).close()
    with pytest.raises(StrategyError, match=r"memory\.budget is 100 B"):
        build_test_session(Cluster.single(), Recipe.model_validate(fits | {"memory": {"budget": 100}}))


def test_a_loss_that_asks_for_values_cannot_be_planned() -> None:
    def loss(model: nn.Module, x: Tensor) -> Loss:
        y = model(x)
        return Loss(y.sum() if y.sum() > 0 else -y.sum(), len(x))

    task = Task(nn.Linear(4, 1), list(torch.rand(16, 4)), loss)
    with pytest.raises(TaskError, match="cannot run on fake tensors"):
        plan_memory(recipe("replicas=1"), task, 1)


@pytest.mark.parametrize(
    ("written", "found"), [("2GiB", 2**31), ("1.5 kB", 1500), ("64MiB", 2**26), (4096, 4096), ("12b", 12)]
)
def test_sizes_are_written_as_people_do(written: object, found: int) -> None:
    assert recipe("replicas=1", memory={"budget": written}).memory.budget == found


@pytest.mark.parametrize("written", ["2", "two GiB", "", 0, True, 1.5, "-1GiB"])
def test_a_size_that_could_be_misread_is_an_error(written: object) -> None:
    with pytest.raises(Exception, match=r"memory\.budget"):
        Recipe(task="sum", steps=1, memory={"budget": written})


@pytest.mark.capability("L3")
def test_the_command_prints_a_table_and_json(tmp_path) -> None:
    path = tmp_path / "sum.toml"
    path.write_text('task = "sum"\nsteps = 1\nstrategy = "replicas=1 shard=2 zero=1"\n')
    words = ["plan", "memory", str(path)]
    done = CliRunner().invoke(build_app(words), words)
    assert done.exit_code == 0, done.output
    head, columns, *rows = done.output.splitlines()
    assert head.startswith('"replicas=1 shard=2 zero=1') and "on 2 processes" in head
    assert {"rank", "parameters", "moments", "peak"} <= set(columns.split()) and len(rows) == 2
    by_layer = CliRunner().invoke(build_app(words), [*words, "--layers"]).output.splitlines()[len(rows) + 2 :]
    assert by_layer[0].split() == ["rank", "layer", "parameters", "gradients", "moments", "activations"]
    assert len(by_layer) > 2 and all(line.split()[0] in "01" for line in by_layer[1:])
    words += ["--json", "--set", "memory.budget=100"]
    done = CliRunner().invoke(build_app(words), words)
    assert done.exit_code == StrategyError.exit_code
    record = json.loads(done.stdout[: done.stdout.rindex("}") + 1])
    assert not record["fits"] and record["budget_bytes"] == 100
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert load_recipe(path).memory.budget is None


@pytest.mark.capability("D9")
def test_a_stage_that_runs_a_quarter_at_a_time_keeps_a_quarter() -> None:
    """The last stage has the logits; the first keeps what it kept."""

    def activations(text: str) -> list[int]:
        found = plan_memory(recipe(f"replicas=1 pipeline=2 schedule=1f1b{text}", shards=2), gpt(), 2)
        return [rank.moments["backward"].activations for rank in found.ranks]

    whole, quarters = activations(""), activations(" rechunk=1,4")
    assert quarters[0] == whole[0]
    assert 0.24 * whole[1] <= quarters[1] <= 0.28 * whole[1]


@pytest.mark.capability("D1", "L3")
def test_messages_lie_in_memory_for_the_stages_of_one_host_only() -> None:
    """Of four stages on two hosts; the thread of a backend keeps a few of what it carries in backward."""

    def wires(nodes: int) -> tuple[list[int], list[int]]:
        plan = plan_memory(recipe("replicas=1 pipeline=4 schedule=1f1b"), gpt(), 4, nodes=nodes)
        update, backward = ([rank.moments[moment].wire for rank in plan.ranks] for moment in MOMENTS)
        return update, backward

    (none, _), (two_hosts, of_both), (one_host, in_memory) = (wires(nodes) for nodes in (4, 2, 1))
    assert two_hosts[0] == one_host[0] > none[0] and two_hosts[3] == one_host[3] > none[3]
    assert all(none[stage] < two_hosts[stage] < one_host[stage] for stage in (1, 2))
    late = [a - b for a, b in zip(of_both, in_memory, strict=True)]
    assert late[0] == late[3] == 0 and late[1] > two_hosts[1] - one_host[1]


@pytest.mark.capability("L3")
@pytest.mark.parametrize(
    ("rank", "per_host", "near"),
    [
        (5, 4, {2, 3}),
        (2, 4, {0, 1}),
        (9, 4, {0, 1}),
        (9, 16, {0, 1, 2, 3}),
        (6, 2, {3}),
        (6, 3, {3}),
        (0, 0, set()),
    ],
)
def test_stages_of_a_host_are_those_whose_ranks_it_has(rank: int, per_host: int, near: set[int]) -> None:
    """Two replicas of four stages of two tensor ranks."""
    degrees = dict.fromkeys(AXES, 1) | {"replica": 2, "pipeline": 4, "tensor": 2}
    assert stages_on_host(degrees, rank, per_host) == near


@pytest.mark.capability("L3")
def test_two_calls_of_attention_that_gloo_has_carried_are_planned() -> None:
    """Each is keys and values [B, T, width] as they went, and as they came."""
    words = recipe("replicas=1 context=2", shards=1)
    one_head = replace(SMALL, heads=1)
    task = replace(gpt(one_head), loss=next_token_loss, sequence=next_token_sequence)
    rank = plan_memory(words, task, 2).ranks[0]
    alone = plan_memory(recipe("replicas=2", shards=2), task, 2).ranks[0]  # the same sums of gradients
    message = 2 * 16 * (one_head.context // 2) * one_head.width * 4
    assert rank.moments["backward"].wire == alone.moments["backward"].wire + 2 * 2 * message


@pytest.mark.capability("L3")
@pytest.mark.parametrize(
    ("strategy", "unplanned"),
    [
        ("replicas=1 servers=1 sync=server", "sync=server"),
        ("replicas=2 sync=gossip:0", "sync=gossip:0"),
        ("replicas=2 sync=hogwild", "sync=hogwild"),
        ("replicas=1 pipeline=2 sync=pipedream", "sync=pipedream"),
        ("replicas=2 sync=every-step@2,local:1", "sync=every-step@2,local:1"),
        ("replicas=2 codec=int8", "codec=int8"),
        ("replicas=2 codec=lossless", "codec=lossless"),
        ("replicas=2 codec=auto", "codec=auto"),
        ("replicas=2 route=ring", "route=ring"),
        ("replicas=2 lanes=2", "lanes=2"),
        ("replicas=2 pipeline=2 lanes=2", "lanes=2"),
        ("replicas=2 codec=sign route=ring sync=local:1", "codec=sign and route=ring"),
    ],
)
def test_what_is_not_planned_is_refused_with_a_reason(strategy: str, unplanned: str) -> None:
    words, message = recipe(strategy, steps=4), f"the memory of {re.escape(unplanned)} is not planned"
    for plan in (plan_memory, check_budget):
        with pytest.raises(StrategyError, match=message) as error:
            plan(words, gpt(), 2)
        assert "leave memory.budget out" in error.value.next_step


@pytest.mark.capability("L3")
@pytest.mark.parametrize("planned", ["route=native", "reproducible", "pipeline"])
def test_automatic_routes_between_hosts_are_not_planned(planned: str) -> None:
    """Their buffers depend on what is measured; other routes, and stages that sum nothing, are planned."""
    with pytest.raises(StrategyError, match="the memory of route=auto between hosts is not planned"):
        plan_memory(recipe("replicas=2"), gpt(), 2, nodes=2)
    strategy = {"route=native": "replicas=2 route=native", "pipeline": "replicas=1 pipeline=2"}
    words = recipe(strategy.get(planned, "replicas=2"), reproducible=planned == "reproducible")
    assert plan_memory(words, gpt(), 2, nodes=2).peak > 0


@pytest.mark.capability("L3")
def test_a_run_with_a_budget_that_is_not_planned_does_not_start() -> None:
    words = {"task": "sum", "steps": 4, "strategy": Strategy.parse("replicas=1 sync=every-step@2,diloco:2")}
    build_test_session(Cluster.single(), Recipe.model_validate(words)).close()
    with pytest.raises(StrategyError, match="sync=every-step@2,diloco:2 is not planned"):
        build_test_session(Cluster.single(), Recipe.model_validate(words | {"memory": {"budget": "64MiB"}}))
