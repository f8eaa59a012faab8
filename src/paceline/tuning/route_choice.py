"""Choose the route of `route=auto`: shared memory within a host, else the best route for each buffer size.

The links are measured when the session starts, or read from the file `runtime.link_profile`. Every rank of
a group has the same times, so all choose alike; the choice is printed with its reason and recorded as an
event of the run. In an ordered run nothing is measured, because sums have one order: there the route is
native.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.group_collectives import broadcast_text
from paceline.comm.link_benchmark import (
    ROUTE_TRIAL_SIZES,
    RouteCandidates,
    build_route_candidates,
    measure_routes,
)
from paceline.comm.link_profile import LinkProfile
from paceline.comm.net import Net
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.route_by_size import (
    RouteChoice,
    RouteForecast,
    SizeRoutedCollective,
    choose_routes,
    explain_predicted_choices,
    explain_route_times,
)
from paceline.comm.routes.route_context import RouteContext
from paceline.comm.routes.shared_memory import shared_or_native
from paceline.errors import DataError, format_count
from paceline.job.mesh import RankGroup
from paceline.recipe.registry.route_specs import NATIVE_ROUTE

_ALL_BUFFERS = 1 << 30


def build_auto_route(group: RankGroup, site: RouteContext) -> Collective:
    """Return the collective of `route=auto` for a group; collective over the group."""
    path = shared_or_native(group, site)
    if site.link_profile is not None and not isinstance(path, NativeCollective):
        site.warn(
            f"warning: runtime.link_profile = {site.link_profile} has no effect: the ranks share the"
            " memory of one host"
        )
    if site.is_coded or site.is_ordered or not isinstance(path, NativeCollective) or group.size == 1:
        return path
    if site.device.type != "cpu":
        return path  # NCCL chooses its own algorithm for each size
    candidates = build_route_candidates(site.net, group)
    began = time.perf_counter()
    forecast, source = _forecast(candidates, group, site)
    choices = choose_routes(forecast)
    site.record("route", _choice_record(group, forecast, choices, source))
    site.warn(
        _choice_sentence(group, forecast, choices, site.largest_bytes, source, time.perf_counter() - began)
    )
    if all(choice.routes == [NATIVE_ROUTE] for choice in choices.values()):
        candidates.close()
        return path
    site.close_callbacks.append(candidates.close)
    return SizeRoutedCollective(candidates.paths, choices)


def _forecast(candidates: RouteCandidates, group: RankGroup, site: RouteContext) -> tuple[RouteForecast, str]:
    """Return the times of each route, and their source; collective."""
    # After a switch of rules the group is built again; ranks that joined since then have no
    # measurement.
    known = site.route_forecasts.get(group.ranks)
    if _all_ranks_have(known is not None, group, site) and known is not None:
        return known, "measured before"
    if site.link_profile is None:
        sizes = [size for size in ROUTE_TRIAL_SIZES if size <= max(site.largest_bytes, ROUTE_TRIAL_SIZES[1])]
        forecast, source = measure_routes(candidates, site.net, group, sizes), "measured"
    else:
        forecast, source = _read_forecast(site.link_profile, candidates, group, site), site.link_profile
    site.route_forecasts[group.ranks] = forecast
    return forecast, source


def _all_ranks_have(mine: bool, group: RankGroup, site: RouteContext) -> bool:
    """Return whether it holds on every rank: a rank that has joined later has no earlier measurements."""
    flag = torch.tensor([int(mine)])
    return bool(site.net.all_reduce(flag, group, "min").wait().item())


def _read_forecast(
    path: str, candidates: RouteCandidates, group: RankGroup, site: RouteContext
) -> RouteForecast:
    """Read the times of a group's routes from a link profile; collective.

    Raises:
        DataError: the profile cannot be read, or was measured with other ranks or routes.
    """
    profile = read_link_profile(path, group, site.net, site.device)
    lines = {route: profile.routes[route] for route in candidates.paths if route in profile.routes}
    if len(profile.hosts) != group.size or NATIVE_ROUTE not in lines:
        raise DataError(
            f"this link profile was measured with {format_count(len(profile.hosts), 'rank')} and routes"
            f" {', '.join(lines) or 'none'}, but group '{group.name}' has {group.size} ranks",
            where=path,
            next_step=f"paceline bench link -n {group.size} --out {path} on these hosts, or remove"
            " runtime.link_profile",
        )
    return RouteForecast(group.size, candidates.ranks_per_host, lines)


def read_link_profile(path: str, group: RankGroup, net: Net, device: torch.device) -> LinkProfile:
    """Return the link profile that the group's first rank reads from its file; collective.

    Raises:
        DataError: it cannot be read.
    """
    text = ""
    if group.rank == 0:
        try:
            text = json.dumps(LinkProfile.load(Path(path)).record())
        except DataError as error:
            text = json.dumps({"error": str(error)})
    record = json.loads(broadcast_text(text, group, net, device))
    if "error" in record:
        raise DataError(record["error"], next_step="paceline bench link --out FILE")
    return LinkProfile.read(record)


def _choice_record(
    group: RankGroup, forecast: RouteForecast, choices: Mapping[str, RouteChoice], source: str
) -> Mapping[str, Any]:
    """Return the event `route` of a choice."""
    return {
        "group": group.name,
        "ranks": list(group.ranks),
        "choice": str(choices["all_reduce"]),
        "choices": {op: str(choice) for op, choice in choices.items()},
        "source": source,
        "routes": {route: asdict(line) for route, line in forecast.lines.items()},
    }


def _choice_sentence(
    group: RankGroup,
    forecast: RouteForecast,
    choices: Mapping[str, RouteChoice],
    largest: int,
    source: str,
    seconds: float,
) -> str:
    took = f"{source} in {seconds:.1f} s" if source == "measured" else source
    size = min(largest, _ALL_BUFFERS)
    others = explain_predicted_choices(forecast, choices, NATIVE_ROUTE)
    return (
        f"route: {choices['all_reduce']} over group '{group.name}' (a sum of {size:,} bytes takes"
        f" {explain_route_times(forecast, size)}, {took}); {f'{others}; ' if others else ''}set route=NAME"
        " in the strategy to use another"
    )
