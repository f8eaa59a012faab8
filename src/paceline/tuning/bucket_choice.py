"""`runtime.bucket_latency`: buckets as small as the links allow, since small ones leave backward earlier.

The sum of a bucket takes alpha for each round and beta for each byte. In a small bucket most of that is
latency, which more buckets pay more often; a large one leaves late, and less of its sum is hidden. Invariant:
ranks decide from equal numbers, by a pure function, so they fill equal buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from paceline.comm.collective_cost import native_cost
from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.link_benchmark import measure_all_reduce
from paceline.comm.link_profile import LinkModel
from paceline.comm.net import Net
from paceline.comm.routes.host_links import host_id
from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.tuning.route_choice import read_link_profile

MIN_BUCKET_BYTES = 1 << 16
"""Smaller buckets cost more calls than they hide."""


class BucketChoice(NamedTuple):
    """How many bytes of gradients are sent together, and why."""

    bucket_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"buckets: {self.bucket_bytes:,} bytes, as {self.reason}"


def choose_bucket_bytes(line: LinkModel, world: int, share: float, most: int) -> BucketChoice:
    """The smallest power of two whose sum is latency to at most `share`; from `MIN_BUCKET_BYTES` to `most`. Pure.

    Args:
        line: alpha and beta of the sums of so many ranks.
        share: above 0, below 1.
    """
    way = native_cost("all_reduce", 1 << 20, world)
    latency = way.rounds * line.alpha_seconds
    per_byte = way.sent_bytes / (1 << 20) * line.beta_seconds_per_byte
    found, size = most, MIN_BUCKET_BYTES
    while size < most:
        if latency <= share * (latency + size * per_byte):
            found = size
            break
        size *= 2
    part = latency / (latency + found * per_byte) if latency + found * per_byte else 0.0
    return BucketChoice(
        found,
        f"{part:.1%} of the {1e3 * (latency + found * per_byte):.3g} ms of such a sum is latency:"
        f" {1e3 * line.alpha_seconds:.3g} ms a round, and {line.bits_per_second / 1e6:.4g} Mbit/s"
        f" (bucket_latency = {share:g}, bucket_bytes = {most:,} at most)",
    )


def choose_buckets(
    recipe: Recipe,
    strategy: Strategy,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> Recipe:
    """The recipe with the bucket size of these links in place of `runtime.bucket_latency`; collective.

    Raises:
        DataError: the link profile cannot be read, or is of another number of ranks.
    """
    runtime = recipe.runtime
    assert runtime.bucket_latency is not None
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(runtime.deadline_seconds)
    if why := _why_not_measured(strategy, device, group, net):
        warn(f"runtime.bucket_latency has no effect: {why}")
        return recipe
    began = time.perf_counter()
    known = runtime.link_profile is not None
    line = _read_all_reduce_line(recipe, group, net, device) if known else measure_all_reduce(net, group)
    took = f"measured in {time.perf_counter() - began:.1f} s"
    choice = choose_bucket_bytes(line, group.size, runtime.bucket_latency, runtime.bucket_bytes)
    warn(f"{choice} ({runtime.link_profile or took})")
    note("buckets", {**choice._asdict(), "source": runtime.link_profile or "measured"})
    return _with_bucket_bytes(recipe, strategy, choice.bucket_bytes)


def _with_bucket_bytes(recipe: Recipe, strategy: Strategy, bucket_bytes: int) -> Recipe:
    """The recipe with the choice alone: a run that goes on keeps to it."""
    profile = recipe.runtime.link_profile if strategy.route == "auto" else None
    told = {"bucket_bytes": bucket_bytes, "bucket_latency": None, "link_profile": profile}
    return recipe.replace(runtime=recipe.runtime.replace(**told))


def _why_not_measured(strategy: Strategy, device: torch.device, group: RankGroup, net: Net) -> str:
    """Why there are no links to measure; empty: there are."""
    if device.type != "cpu":
        return "this job computes on GPUs, whose links are not measured"
    hosts = set(all_gather_texts(host_id(), group, net))
    if strategy.path.in_memory and len(hosts) == 1 and hosts != {""}:
        return "the ranks share the memory of one host"
    return ""


def _read_all_reduce_line(recipe: Recipe, group: RankGroup, net: Net, device: torch.device) -> LinkModel:
    place = str(recipe.runtime.link_profile)
    profile = read_link_profile(place, group, net, device)
    if len(profile.hosts) != group.size:
        raise DataError(
            f"this link profile is of {len(profile.hosts)} ranks, and the job has {group.size}",
            where=place,
            next_step=f"paceline bench link -n {group.size} --out {place} on these hosts",
        )
    return profile.all_reduce
