"""Choose the bucket size by `runtime.bucket_latency`: as small as the links allow.

The sum of a bucket takes alpha seconds for each round and beta for each byte. Small buckets leave backward
earlier, so more of their sum is hidden behind it, but they pay the latency alpha more often. Invariant:
ranks decide from equal numbers with a pure function, so they fill equal buckets.
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
from paceline.errors import DataError, format_count
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.tuning.route_choice import read_link_profile

MIN_BUCKET_BYTES = 1 << 16
"""Smaller buckets cost more in calls than they hide."""


class BucketChoice(NamedTuple):
    """Bytes of gradients that are sent together, with the reason."""

    bucket_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"buckets: {self.bucket_bytes:,} bytes ({self.reason})"


def choose_bucket_bytes(link: LinkModel, world_size: int, share: float, most_bytes: int) -> BucketChoice:
    """Return the smallest power of two whose sum is latency to at most `share`; pure.

    Args:
        link: alpha and beta of an all_reduce over the ranks.
        share: above 0, below 1.
        most_bytes: upper limit of the result; the lower one is `MIN_BUCKET_BYTES`.
    """
    cost = native_cost("all_reduce", 1 << 20, world_size)
    latency = cost.rounds * link.alpha_seconds
    per_byte = cost.sent_bytes / (1 << 20) * link.beta_seconds_per_byte
    chosen, size = most_bytes, MIN_BUCKET_BYTES
    while size < most_bytes:
        if latency <= share * (latency + size * per_byte):
            chosen = size
            break
        size *= 2
    seconds = latency + chosen * per_byte
    return BucketChoice(
        chosen,
        f"latency is {latency / seconds if seconds else 0.0:.1%} of the {1e3 * seconds:.3g} ms of their sum:"
        f" {1e3 * link.alpha_seconds:.3g} ms a round at {link.bits_per_second / 1e6:.4g} Mbit/s;"
        f" bucket_latency = {share:g}, bucket_bytes = {most_bytes:,} at most",
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
    """Return the recipe with a bucket size for these links in place of `runtime.bucket_latency`; collective.

    Args:
        recipe: with `runtime.bucket_latency`, for a job of at least two ranks.
        warn: receives the choice with its reason.
        note: receives the event `buckets`.
    Raises:
        DataError: the link profile cannot be read, or has another number of ranks.
    """
    runtime = recipe.runtime
    assert runtime.bucket_latency is not None
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(runtime.deadline_seconds)
    if reason := _why_not_measured(strategy, device, group, net):
        warn(f"warning: runtime.bucket_latency has no effect: {reason}")
        return recipe
    begin = time.perf_counter()
    if runtime.link_profile is not None:
        link, source = _read_all_reduce_line(recipe, group, net, device), runtime.link_profile
    else:
        link = measure_all_reduce(net, group)
        source = f"measured in {time.perf_counter() - begin:.1f} s"
    choice = choose_bucket_bytes(link, group.size, runtime.bucket_latency, runtime.bucket_bytes)
    warn(f"{choice}, {source}")
    note("buckets", {**choice._asdict(), "source": runtime.link_profile or "measured"})
    # The profile stays in the recipe only where another chooser reads it: a resumed run keeps these buckets.
    profile = runtime.link_profile if strategy.route_spec.chooses else None
    changes = {"bucket_bytes": choice.bucket_bytes, "bucket_latency": None, "link_profile": profile}
    return recipe.replace(runtime=runtime.replace(**changes))


def _why_not_measured(strategy: Strategy, device: torch.device, group: RankGroup, net: Net) -> str:
    """Return why there are no links to measure; empty if there are; collective."""
    if device.type != "cpu":
        return "this job computes on GPUs, whose links are not measured"
    hosts = set(all_gather_texts(host_id(), group, net))
    if strategy.route_spec.in_memory and len(hosts) == 1 and hosts != {""}:
        return "the ranks share the memory of one host"
    return ""


def _read_all_reduce_line(recipe: Recipe, group: RankGroup, net: Net, device: torch.device) -> LinkModel:
    path = str(recipe.runtime.link_profile)
    profile = read_link_profile(path, group, net, device)
    if len(profile.hosts) != group.size:
        raise DataError(
            f"this link profile was measured with {format_count(len(profile.hosts), 'rank')}, but the job"
            f" has {group.size}",
            where=path,
            next_step=f"paceline bench link -n {group.size} --out {path} on these hosts",
        )
    return profile.all_reduce
