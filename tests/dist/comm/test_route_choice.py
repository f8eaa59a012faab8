"""`route=auto` over links: sums take the path of their size, all ranks choose alike, and it is told why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paceline.comm import NativeCollective, Net
from paceline.comm.link_benchmark import build_route_candidates, measure_links, measure_routes
from paceline.comm.link_profile import LinkProfile
from paceline.comm.routes import MessageCollective
from paceline.comm.routes.native import build_native
from paceline.comm.routes.route_by_size import RouteChoice, SizeRoutedCollective, critical_path_cost
from paceline.comm.routes.route_context import RouteContext
from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe import Recipe, Strategy
from paceline.testing.rank_processes import run_ranks
from paceline.tuning import route_choice
from paceline.tuning.bucket_choice import choose_buckets


def site_of(
    cluster: Cluster, group: RankGroup, net: Net, said: list[str], told: list[Any], **more: Any
) -> RouteContext:
    return RouteContext(
        cluster,
        group,
        net,
        torch.device("cpu"),
        said.append,
        [],
        lambda path: path,
        is_coded=False,
        record=lambda name, record: told.append((name, record)),
        largest_bytes=1 << 16,
        **more,
    )


def told_to(told: list[Any]) -> Callable[[str, Mapping[str, Any]], None]:
    return lambda name, record: told.append((name, record))


def chosen(group: RankGroup, site: RouteContext) -> Any:
    """As on several hosts: the ranks of a test share a host."""
    with mock.patch.object(route_choice, "shared_or_native", build_native):
        return route_choice.build_auto_route(group, site)


@pytest.mark.capability("G9", "Z4")
def test_every_sum_takes_the_path_of_its_size_and_is_right() -> None:
    def run(cluster: Cluster) -> tuple[list[str], dict[str, float]]:
        group, net, wrong = Mesh.build(cluster, {"replica": 3}).replica, Net(60.0), []
        found = build_route_candidates(net, group)
        found.paths.pop("hierarchical", None)
        limits = ((64, "tree"), (256, "recursive-doubling"), (1024, "ring"))
        others = {"reduce_scatter": "ring", "all_gather": "recursive-doubling", "broadcast": "tree"}
        choices = {"all_reduce": RouteChoice(limits, "native")}
        choices |= {op: RouteChoice(((64, route),), "native") for op, route in others.items()}
        path = SizeRoutedCollective(found.paths, choices)
        handles = []
        for n in (0, 1, 16, 17, 64, 65, 256, 257, 5000):  # all under way at a time
            x = torch.arange(float(n)) + group.rank
            handles.append((n, x, path.all_reduce(x, str(n))))
        for n, x, handle in handles:
            right = 3 * torch.arange(float(n)) + 3
            if not (torch.equal(handle.wait(), right) and torch.equal(x, right)):
                wrong.append(f"{n}")
        for n in (2, 100):  # of the routes above, and native
            rows = path.all_gather(torch.full((n,), float(group.rank)), "g").wait()
            own = path.reduce_scatter(torch.arange(3.0).repeat_interleave(n).view(3, n), "s").wait()
            x = path.broadcast(torch.full((n,), float(group.rank)), "b", 1).wait()
            right = [[float(rank)] * n for rank in range(3)], [3.0 * group.rank] * n, [1.0] * n
            if (rows.tolist(), own.tolist(), x.tolist()) != right:
                wrong.append(f"the others, {n}")
        net.ledger.require_expected_bytes()
        found.close()
        sent = {f"{op} {name}": row.sent_bytes for (op, name), row in net.ledger.rows.items()}
        return wrong, sent

    for wrong, sent in run_ranks(run, 3):
        assert wrong == []
        assert sent["send replica-messages"] > 0
        assert all(
            sent[f"{op} replica"] > 0 for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        )


@pytest.mark.capability("G9", "G13")
def test_a_session_measures_once_chooses_alike_and_says_why(tmp_path: Path) -> None:
    def run(cluster: Cluster) -> Any:
        group, net = Mesh.build(cluster, {"replica": 2}).replica, Net(60.0)
        said: list[str] = []
        told: list[Any] = []
        site = site_of(cluster, group, net, said, told)
        first, again = chosen(group, site), chosen(group, site)
        x = torch.ones(100) * (1 + group.rank)
        total = float(first.all_reduce(x, "x").wait()[0])
        profile = measure_links(Net(60.0), group, "here")
        file = tmp_path / f"links-{group.rank}.json"
        profile.save(file)
        others = [tmp_path / "none.json"]
        if group.rank == 0:
            replace(profile, hosts=("a", "b", "c")).save(tmp_path / "other.json")
        by_file = chosen(group, site_of(cluster, group, net, said, told, link_profile=str(file)))
        refused = []
        for place in (*others, tmp_path / "other.json"):
            try:
                chosen(group, site_of(cluster, group, net, said, told, link_profile=str(place)))
            except DataError as error:
                refused.append(str(error))
        asked = Recipe(task="none", steps=1, runtime={"bucket_latency": 0.05, "link_profile": str(file)})
        for route in ("native", "auto"):  # the ranks of a test share a host
            choose_buckets(
                asked,
                Strategy(route=route),
                cluster,
                torch.device("cpu"),
                warn=said.append,
                note=told_to(told),
            )
        ordered = chosen(group, site_of(cluster, group, net, said, told, is_ordered=True))
        kinds = [type(path).__name__ for path in (first, again, by_file)]
        for close in site.close_callbacks:
            close()
        return told, said, total, kinds, refused, isinstance(ordered, NativeCollective)

    (told, said, total, kinds, refused, is_native), other = run_ranks(run, 2)
    assert total == 3.0 and is_native and set(kinds) <= {"NativeCollective", "SizeRoutedCollective"}
    assert [record["choice"] for _, record in told[:-1]] == [record["choice"] for _, record in other[0][:-1]]
    assert told == other[0] or other[3] == kinds
    assert [record["source"] for _, record in told[:2]] == ["measured", "measured before"]
    assert told[0][1]["choice"] == told[1][1]["choice"] and told[2][1]["source"].endswith("links-0.json")
    assert said[0].startswith("route: ") and "a sum of 65,536 bytes takes" in said[0]
    assert all(f"{route} " in said[0] for route in ("native", "ring", "tree", "recursive-doubling"))
    name, buckets = told[-1]
    assert name == "buckets" and buckets["bucket_bytes"] == other[0][-1][1]["bucket_bytes"]
    assert buckets["source"].endswith("links-0.json")
    assert said[-2].startswith(f"buckets: {buckets['bucket_bytes']:,} bytes (") and "no effect" in said[-1]
    assert len(refused) == 2 and "has 2" in refused[1] and other[4][0] == refused[0]


@pytest.mark.capability("G13", "G5", "G6", "G7")
def test_a_trial_has_a_line_for_every_route_equal_on_all_ranks() -> None:
    def run(cluster: Cluster) -> Any:
        group, net = Mesh.build(cluster, {"replica": 4}).replica, Net(60.0)
        found = build_route_candidates(net, group)
        forecast = measure_routes(found, net, group, (256, 4096))
        messages = [word for word, path in found.paths.items() if isinstance(path, MessageCollective)]
        found.close()
        return forecast, messages

    results = run_ranks(run, 4)
    forecast, messages = results[0]
    assert all(found == forecast for found, _ in results)
    assert messages == ["ring", "tree", "recursive-doubling", "grid"] and [*forecast.lines] == [
        "native",
        *messages,
    ]
    for route, line in forecast.lines.items():
        first = line.points[0]
        assert first.sent_bytes == critical_path_cost(route, 256, 4).sent_bytes and first.seconds > 0


def test_a_profile_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"format": 1, "hosts": [], "pairs": [], "all_reduce": {}}')
    with pytest.raises(DataError, match="format 1, expected 2"):
        LinkProfile.load(tmp_path / "old.json")
