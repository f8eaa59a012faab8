"""`route=auto`: memory within a host, else the route that is best for the size of a buffer on these links.

The links are measured in the first moments of a session, or read from the profile that `runtime.link_profile`
names. Every rank of a group knows the same times, so all choose alike; the choice is printed with its reason
and kept among the events of the run. Where sums have one order it is not asked: there the route is native.
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
from paceline.errors import DataError
from paceline.job.mesh import RankGroup

_ALL_BUFFERS = 1 << 30


def build_auto_route(group: RankGroup, site: RouteContext) -> Collective:
    """The collective of `route=auto`; collective over the group."""
    path = shared_or_native(group, site)
    if site.link_profile is not None and not isinstance(path, NativeCollective):
        site.warn(f"runtime.link_profile = {site.link_profile} has no effect: ranks share memory of one host")
    if site.is_coded or site.is_ordered or not isinstance(path, NativeCollective) or group.size == 1:
        return path
    if site.device.type != "cpu":
        return path  # NCCL chooses by itself
    found = build_route_candidates(site.net, group)
    began = time.perf_counter()
    forecast, source = _forecast(found, group, site)
    choices = choose_routes(forecast)
    site.record("route", _choice_record(group, forecast, choices, source))
    site.warn(
        _choice_sentence(group, forecast, choices, site.largest_bytes, source, time.perf_counter() - began)
    )
    if all(choice.routes == ["native"] for choice in choices.values()):
        found.close()
        return path
    site.close_callbacks.append(found.close)
    return SizeRoutedCollective(found.paths, choices)


def _forecast(found: RouteCandidates, group: RankGroup, site: RouteContext) -> tuple[RouteForecast, str]:
    """What sums take, and where that is known from."""
    known = site.route_forecasts.get(group.ranks)
    if _all_ranks_have(known is not None, group, site) and known is not None:
        return known, "measured before"
    if site.link_profile is None:
        sizes = [size for size in ROUTE_TRIAL_SIZES if size <= max(site.largest_bytes, ROUTE_TRIAL_SIZES[1])]
        forecast, source = measure_routes(found, site.net, group, sizes), "measured"
    else:
        forecast, source = _read_forecast(site.link_profile, found, group, site), site.link_profile
    site.route_forecasts[group.ranks] = forecast
    return forecast, source


def _all_ranks_have(mine: bool, group: RankGroup, site: RouteContext) -> bool:
    """Whether it holds on every rank: one that has joined knows nothing of what was measured before."""
    flag = torch.tensor([int(mine)])
    return bool(site.net.all_reduce(flag, group, "min").wait().item())


def _read_forecast(place: str, found: RouteCandidates, group: RankGroup, site: RouteContext) -> RouteForecast:
    """What a profile says of the routes of a group.

    Raises:
        DataError: it cannot be read, or is of another group of ranks.
    """
    profile = read_link_profile(place, group, site.net, site.device)
    lines = {route: profile.routes[route] for route in found.paths if route in profile.routes}
    if len(profile.hosts) != group.size or "native" not in lines:
        raise DataError(
            f"this link profile is of {len(profile.hosts)} ranks with routes {', '.join(lines) or 'none'},"
            f" and group '{group.name}' has {group.size}",
            where=place,
            next_step=f"paceline bench link -n {group.size} --out {place} on these hosts, or leave"
            " runtime.link_profile out",
        )
    return RouteForecast(group.size, found.ranks_per_host, lines)


def read_link_profile(place: str, group: RankGroup, net: Net, device: torch.device) -> LinkProfile:
    """A profile, by the file of the group's first rank; collective.

    Raises:
        DataError: it cannot be read.
    """
    said = ""
    if group.rank == 0:
        try:
            said = json.dumps(LinkProfile.load(Path(place)).record())
        except DataError as error:
            said = json.dumps({"error": str(error)})
    record = json.loads(broadcast_text(said, group, net, device))
    if "error" in record:
        raise DataError(record["error"], next_step="paceline bench link --out FILE")
    return LinkProfile.read(record)


def _choice_record(
    group: RankGroup, forecast: RouteForecast, choices: Mapping[str, RouteChoice], source: str
) -> Mapping[str, Any]:
    """What is kept of a choice."""
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
    others = explain_predicted_choices(forecast, choices, "native")
    return (
        f"route: {choices['all_reduce']} over group '{group.name}', as a sum of {size:,} bytes takes"
        f" {explain_route_times(forecast, size)} ({took}); {f'{others}; ' if others else ''}route=NAME in the strategy"
        " chooses another"
    )
