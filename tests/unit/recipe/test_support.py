"""What runs is said to run, what does not is refused with its reason and what does."""

from __future__ import annotations

import json
import random
from math import prod
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.errors import StrategyError
from paceline.parallel.pipeline.stage_partition import partition_at
from paceline.parallel.pipeline.strategy_schedule import make_schedule
from paceline.recipe import PRESETS, Strategy, list_strategies, resolve_strategy, support
from paceline.recipe.registry import CodecSpec, RouteSpec, ScheduleSpec, SyncSpec, known_specs
from paceline.recipe.registry.route_specs import ChannelSpec
from paceline.recipe.support import SupportResult, list_layouts, num_ranks
from tests.marks import soak_param
from tests.unit.recipe.test_strategy import draw

NOT_BUILT: dict[str, Any] = {"route": "server"}


def each(words: str, before: str = "") -> set[str]:
    return {before + word for word in words.split()}


WORKS = (
    each("ddp fsdp hsdp zero1 zero2 zero3 mirrored multi-worker-mirrored local-sgd diloco pipedream gpipe")
    | each("1f1b 3d parameter-server central-storage hogwild tensor=2 context=2 lanes=2")
    | each("every-step local:8 diloco:50 federated:1 hogwild gossip:2 auto:every-step,diloco:8", "sync=")
    | each("server-async server bounded:2 backup:1 actors", "servers=1 sync=")
    | each("socket grpc", "servers=1 sync=server channel=")
    | each("gpipe 1f1b interleaved zero-bubble file:schedule.csv", "pipeline=2 schedule=")
    | each("fp32 bf16 fp16 int8 int4 int2 fixed:8 sign topk:0.01 dgc:0.01:0.9 randomk:0.01", "codec=")
    | each("lowrank:2 lossless auto", "codec=")
    | each("auto native ring tree recursive-doubling grid shared-memory mpi", "route=")
    | {"replicas=4 route=hierarchical", "replicas=1 pipeline=2 sync=pipedream"}
)
COMBINATIONS = {  # what runs on as many processes, or the reason why not
    "shard=2 zero=1": (4, ""),
    "shard=2 zero=2": (4, ""),
    "pipeline=2 shard=2 zero=2": (4, ""),
    "tensor=2 shard=2 zero=2": (4, ""),
    "shard=2 zero=2 lanes=2": (4, ""),
    "shard=2 zero=2 sync=diloco:4": (4, ""),
    "shard=2 zero=2 sync=diloco:4 codec=int8": (4, ""),
    "shard=2 zero=2 sync=diloco:4 codec=auto": (4, "name one in place of auto"),
    "shard=2 zero=2 sync=gossip:2": (4, "must be whole on one rank"),
    "tensor=2 sync=auto:every-step,diloco:8": (4, "in place of @straggler or auto"),
    "replicas=1 shard=3 zero=1 codec=int8": (3, ""),
    "sync=diloco:4 codec=int8": (2, ""),
    "sync=local:2": (3, ""),
    "sync=federated:1": (3, ""),
    "shard=2 zero=1 sync=federated:1": (4, "trains the whole model on one rank"),
    "replicas=1 pipeline=2 sync=federated:1": (2, "no layout may split a replica"),
    "sync=federated:1 codec=int8": (3, ""),
    "sync=federated:1 codec=lowrank:2": (2, "encodes its update alone"),
    "sync=federated:1 lanes=2": (2, "lanes need an exact sync"),
    "servers=1 sync=federated:1": (3, "leave out servers"),
    "sync=every-step@4,federated:1": (2, "name federated alone"),
    "route=mpi codec=int8": (2, "no messages that a codec could encode"),
    "route=mpi lanes=2": (2, "this route in another"),
    "shard=2": (2, "shard without zero shares nothing"),
    "zero=1": (2, "add shard=2"),
    "shard=2 zero=1 sync=diloco:4": (4, ""),
    "servers=1": (3, "leave out servers"),
    "sync=server-async": (3, "add servers=1"),
    "servers=1 sync=server-async": (3, ""),
    "servers=1 sync=actors": (3, ""),
    "servers=2 sync=actors": (4, "one rank learns"),
    "servers=1 sync=actors lanes=2": (3, "the learner is one lane"),
    "servers=1 sync=actors codec=int8": (3, "leave out codec"),
    "servers=1 sync=backup:2": (3, "one must be left"),
    "servers=1 sync=server-async codec=int8": (3, ""),
    "replicas=2 pipeline=2": (4, ""),
    "replicas=1 pipeline=3 sync=pipedream": (3, ""),
    "replicas=2 pipeline=2 sync=pipedream": (4, "a rule of one pipeline"),
    "pipeline=2 codec=int8": (2, ""),
    "pipeline=2 shard=2 zero=1": (4, ""),
    "pipeline=2 shard=2 zero=3": (8, ""),
    "shard=2 zero=3": (4, ""),
    "replicas=1 shard=2 zero=3 lanes=2": (2, "leave out lanes, or tensor and zero=3"),
    "tensor=2": (4, ""),
    "tensor=2 pipeline=2 schedule=1f1b": (8, ""),
    "tensor=2 shard=2 zero=1": (4, ""),
    "tensor=2 shard=2 zero=3 pipeline=2": (8, ""),
    "tensor=2 lanes=2": (4, "leave out lanes, or tensor and zero=3"),
    "tensor=2 sync=local:2": (4, ""),
    "tensor=2 sync=hogwild": (4, "must be whole on one rank"),
    "servers=1 sync=server-async tensor=2": (5, "a server holds a whole model"),
    "replicas=1 pipeline=2 tensor=2 sync=pipedream": (4, "without shard, tensor or"),
    "replicas=1 pipeline=2 sync=pipedream schedule=1f1b": (2, "leave out schedule"),
    "pipeline=2 lanes=2 schedule=1f1b": (2, ""),
    "codec=topk:0.3": (2, ""),
    "sync=diloco:4 codec=topk:0.3": (2, ""),
    "codec=int8+topk:0.1": (2, "in a chain of codecs topk or randomk comes first"),
    "codec=topk:0.01+int4": (2, ""),
    "codec=topk:100+int4:stochastic+lossless": (2, ""),
    "codec=int8+lossless": (2, ""),
    "codec=lossless+int8": (2, "in a chain of codecs"),
    "codec=topk:0.1+randomk:0.1": (2, "in a chain of codecs"),
    "codec=topk:0.1+lowrank:2": (2, "in a chain of codecs"),
    "codec=fp32+lossless": (2, "in a chain of codecs"),
    "route=tree": (3, ""),
    "route=tree codec=topk:0.3": (3, ""),
    "lanes=2 route=tree": (4, "leave out lanes or route"),
    "servers=1 sync=backup:1 route=tree": (4, "leave out route"),
    "sync=gossip:1 channel=grpc": (2, ""),
    "channel=grpc": (2, "leave out channel"),
    "sync=hogwild channel=grpc": (2, "leave out channel"),
    "sync=hogwild:2 codec=int8": (2, "leave out codec"),
    "servers=1 sync=every-step@4,server channel=grpc": (3, ""),
    "route=shared-memory codec=int8": (2, "leave out codec or route"),
    "servers=1 sync=backup:1 route=shared-memory": (3, "leave out route"),
    "schedule=1f1b": (2, "add pipeline=2"),
    "pipeline=2 schedule=zero-bubble": (4, ""),
    "pipeline=2 shard=2 zero=2 schedule=interleaved:2": (4, ""),
    "pipeline=2 lanes=2 schedule=interleaved:2": (2, "run gpipe or 1f1b"),
    "pipeline=2 lanes=2 schedule=own.csv": (2, "run gpipe or 1f1b"),
    "lanes=2": (3, ""),
    "shard=2 zero=1 lanes=2": (4, ""),
    "pipeline=2 lanes=2": (2, ""),
    "replicas=1 shard=2 zero=1 pipeline=3 lanes=3": (2, ""),
    "replicas=8 pipeline=2 lanes=2": (8, ""),
    "replicas=2 pipeline=2 lanes=2": (4, "replicas=2 needs 2 processes"),
    "pipeline=3 lanes=2": (2, "set lanes equal to pipeline"),
    "pipeline=2 lanes=2 codec=int8": (2, "leave out lanes"),
    "sync=local:2 lanes=2": (2, "leave out lanes"),
    "lanes=2 route=hierarchical": (4, "leave out lanes or route"),
    "lanes=3": (3, "start at most 2 processes"),
    "replicas=1 lanes=9": (1, "take fewer lanes"),
    "replicas=4 route=hierarchical": (4, ""),
    "replicas=1 shard=4 zero=1 route=hierarchical": (4, ""),
    "replicas=4 pipeline=2 route=hierarchical": (8, ""),
    "sync=local:2 route=hierarchical": (4, ""),
    "codec=int8 route=hierarchical": (4, ""),
    "codec=topk:0.3 route=hierarchical": (4, ""),
    "servers=1 sync=backup:1 route=hierarchical": (4, "leave out route"),
    "replicas=1 pipeline=2 sync=pipedream route=hierarchical": (2, "leave out route"),
}


@pytest.mark.capability("B1")
@pytest.mark.parametrize("processes", range(1, 9))
def test_replicas_fill_the_processes(processes: int) -> None:
    answer = support(Strategy(), processes=processes, shards=8)
    assert answer == (True, "", Strategy(replicas=processes))
    assert support(Strategy(replicas=processes), processes=processes, shards=8) == answer


@pytest.mark.capability("B1")
@pytest.mark.parametrize("field", NOT_BUILT)
def test_what_is_not_built_is_refused_by_name(field: str) -> None:
    answer = support(Strategy(**{field: NOT_BUILT[field]}), processes=4, shards=8)
    assert not answer.ok
    assert f"{field}={NOT_BUILT[field]} is not built yet, only {field}=" in answer.reason
    assert answer.nearest == Strategy(replicas=4)


@pytest.mark.capability("B1", "Z1")
@pytest.mark.parametrize("text", COMBINATIONS)
def test_a_combination_runs_or_is_refused_with_its_reason(text: str) -> None:
    processes, reason = COMBINATIONS[text]
    answer = support(Strategy.parse(text), processes=processes, shards=8)
    assert answer.ok == (not reason)
    assert reason in answer.reason


@pytest.mark.capability("B1")
@pytest.mark.parametrize(
    ("text", "processes", "reason"),
    [
        ("replicas=3", 4, "replicas=3 needs 3 processes, and there are 4"),
        ("replicas=4", 3, "replicas=4 needs 4 processes, and there are 3"),
    ],
)
def test_degrees_that_do_not_fit_the_processes_are_refused(text: str, processes: int, reason: str) -> None:
    answer = support(Strategy.parse(text), processes=processes, shards=8)
    assert answer == (False, reason, Strategy(replicas=processes))


def test_the_product_of_all_degrees_and_the_servers_is_counted() -> None:
    strategy = Strategy.parse("replicas=2 shard=3 tensor=5 pipeline=7 context=11 servers=13")
    reason = support(strategy, processes=4, shards=8).reason
    product = "replicas=2 x shard=3 x tensor=5 x pipeline=7 x context=11 + servers=13"
    assert f"{product} needs 2323 processes, and there are 4" in reason
    assert "processes" not in support(strategy, processes=2323, shards=8).reason
    reason = support(Strategy(tensor=2), processes=3, shards=8).reason
    assert "replicas=1 x tensor=2 needs 2 processes" in reason


@pytest.mark.capability("B1")
def test_more_replicas_than_shards_are_refused() -> None:
    answer = support(Strategy(), processes=5, shards=4)
    assert not answer.ok
    assert "replicas=5 is more than batch.shards=4" in answer.reason
    assert answer.nearest == Strategy(replicas=4)


def runs(answer: SupportResult, shards: int) -> bool:
    """Whether the nearest is filled in, and works as it stands on as many processes as it says."""
    nearest = answer.nearest
    return support(nearest, processes=num_ranks(nearest), shards=shards) == (True, "", nearest)


@pytest.mark.capability("B1")
@pytest.mark.parametrize("seed", [*range(40), *map(soak_param, range(40, 100))])
def test_the_nearest_of_any_strategy_runs_on_these_processes_or_on_fewer(seed: int) -> None:
    rng = random.Random(seed)
    processes, shards = rng.randint(1, 16), rng.randint(1, 16)
    answer = support(draw(rng), processes=processes, shards=shards)
    assert runs(answer, shards)
    assert num_ranks(answer.nearest) <= processes
    assert support(answer.nearest, processes=processes, shards=shards).ok == (
        num_ranks(answer.nearest) == processes
    )


# What is not built is given up, and not much else: 16 processes, of which 8 can have shards of their own.
ASKED = (
    "shard=2 zero=2 pipeline=2 schedule=interleaved:2 route=server",
    "pipeline=2 schedule=zero-bubble route=server",
)


@pytest.mark.capability("B1")
@pytest.mark.parametrize("text", ASKED)
def test_the_nearest_keeps_the_processes_and_what_is_asked_for(text: str) -> None:
    asked = Strategy.parse(text)
    answer = support(asked, processes=16, shards=8)
    assert "route=server is not built yet" in answer.reason
    assert num_ranks(answer.nearest) == 16 and runs(answer, 8)
    replicas = 16 // asked.ranks_per_replica
    assert answer.nearest == asked.replace(replicas=replicas, route="auto")


@pytest.mark.capability("B1")
@pytest.mark.parametrize(
    ("text", "processes", "nearest"),
    [
        ("context=2 lanes=2", 4, "replicas=2 context=2"),
        ("pipeline=2 lanes=2 schedule=interleaved:2", 4, "replicas=4 pipeline=2 lanes=2"),
        ("shard=2 zero=3 lanes=2", 4, "replicas=2 shard=2 zero=3"),
        ("servers=1 sync=backup:1 route=tree", 4, "replicas=3 servers=1 sync=backup:1"),
        ("replicas=2 sync=diloco:4", 3, "replicas=3 sync=diloco:4"),
        ("replicas=2 shard=2 zero=1", 6, "replicas=3 shard=2 zero=1"),
    ],
)
def test_the_nearest_gives_up_what_does_not_go(text: str, processes: int, nearest: str) -> None:
    answer = support(Strategy.parse(text), processes=processes, shards=8)
    assert not answer.ok and answer.nearest == Strategy.parse(nearest)


@pytest.mark.capability("B1")
def test_resolve_returns_the_strategy_or_raises_with_reason_and_nearest() -> None:
    assert resolve_strategy(Strategy.parse("ddp"), processes=2, shards=8) == Strategy(replicas=2)
    with pytest.raises(StrategyError) as caught:
        resolve_strategy(Strategy.parse("zero2 route=server"), processes=4, shards=2)
    assert "route=server is not built yet" in caught.value.what
    assert (
        caught.value.where
        == 'strategy "replicas=all shard=2 zero=2 sync=every-step route=server" on 4 processes'
    )
    assert (
        caught.value.next_step
        == 'the nearest supported strategy is "replicas=1 shard=2 zero=2 tensor=2 sync=every-step"'
        " on 4 processes"
    )


@pytest.mark.capability("B1")
def test_the_table_answers_for_every_word_that_can_be_written() -> None:
    rows = {row.name: row for row in list_strategies()}
    written = {term for name in rows for term in name.split()}
    for kind in (SyncSpec, CodecSpec, RouteSpec, ChannelSpec, ScheduleSpec):
        assert {f"{kind.choice}={spec.example}" for spec in known_specs(kind).values()} <= written
    assert set(PRESETS) <= set(rows)
    works = {name for name, row in rows.items() if row.support.ok}
    assert works == WORKS
    for row in rows.values():
        assert "processes, and there are" not in row.support.reason  # their number is never why
        assert row.strategy == Strategy.parse(row.name)
    assert (rows["3d"].processes, rows["fsdp"].processes, rows["parameter-server"].processes) == (8, 2, 3)
    alone = {row.name for row in list_strategies(shards=1) if row.support.ok}
    # of the rest replicas are two; ranks that act share no batch
    assert alone == {"pipedream", "replicas=1 pipeline=2 sync=pipedream", "servers=1 sync=actors"}


DEGREES = ("replicas", "shard", "tensor", "context", "pipeline")


@pytest.mark.capability("E1")
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 4 + 3), (8, 20 + 3 * 15), (6, 16 + 3 * 9)])
def test_every_way_to_make_the_ranks_is_there_once(ranks: int, count: int) -> None:
    rows = list_layouts(ranks)
    assert len({row.strategy for row in rows}) == len({row.name for row in rows}) == len(rows) == count
    for row in rows:
        assert prod(getattr(row.strategy, name) for name in DEGREES) == num_ranks(row.strategy) == ranks
        assert row.support == support(row.strategy, processes=ranks, shards=ranks)
        assert row.support.ok != bool(row.support.reason)


def test_the_command_lists_them_with_their_reasons() -> None:
    told = CliRunner().invoke(build_app(["strategies"]), ["strategies", "--ranks", "8"])
    lines = told.stdout.splitlines()
    rows = list_layouts(8)
    assert told.exit_code == 0 and len(lines) == len(rows) + 1
    refused = [row for row in rows if not row.support.ok]
    assert lines[-1] == f"65 layouts of 8 ranks, {len(refused)} of them refused"
    for line, row in zip(lines, rows, strict=False):
        assert line.startswith(row.name) and line.endswith(row.support.reason or "runs")
    told = CliRunner().invoke(build_app(["strategies"]), ["strategies", "--ranks", "8", "--json"])
    assert [one["strategy"] for one in json.loads(told.stdout)] == [str(row.strategy) for row in rows]


@pytest.mark.parametrize(
    ("preset", "processes", "resolved"),
    [
        ("fsdp", 4, "replicas=1 shard=4 zero=3 sync=every-step"),
        ("fsdp tensor=2", 8, "replicas=1 shard=4 zero=3 tensor=2 sync=every-step"),
        (
            "central-storage",
            3,
            "replicas=1 shard=3 zero=3 storage=central sync=every-step route=shared-memory",
        ),
        ("pipedream", 4, "replicas=1 pipeline=4 sync=pipedream"),
        ("fsdp shard=2", 2, "replicas=1 shard=2 zero=3 sync=every-step"),
        ("replicas=2 shard=all zero=1", 6, "replicas=2 shard=3 zero=1 sync=every-step"),
    ],
)
def test_a_preset_of_one_replica_takes_all_processes(preset: str, processes: int, resolved: str) -> None:
    strategy = Strategy.parse(preset)
    assert str(resolve_strategy(strategy, processes=processes, shards=8)) == resolved
    # A recipe stores the text, which a resumed run on other processes reads.
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if name != "parameter-server"])
def test_every_preset_runs_on_four_processes(preset: str) -> None:
    answer = support(Strategy.parse(preset), processes=4, shards=8)
    assert answer.ok, answer.reason
    assert num_ranks(answer.nearest) == 4


def test_auto_is_refused_until_a_planner_exists() -> None:
    with pytest.raises(StrategyError, match="no planner chooses a strategy"):
        Strategy.parse("auto")


def test_a_single_number_of_modules_or_parts_is_text() -> None:
    assert Strategy.parse("pipeline=2 stages=3").stage_lengths == [3]
    assert partition_at([3], [1] * 5, 2) == [range(3), range(3, 5)]
    assert Strategy.parse("pipeline=2 rechunk=2").rechunk == "2"
    assert Strategy.model_validate({"pipeline": 2, "stages": 3}).stages == "3"
    table = make_schedule(Strategy.parse("pipeline=2 schedule=interleaved"))(2, 4)
    assert table.orders == make_schedule(Strategy.parse("pipeline=2 schedule=interleaved:2"))(2, 4).orders
