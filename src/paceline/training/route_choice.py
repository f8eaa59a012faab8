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

from paceline.comm import Collective, NativeCollective, Net
from paceline.comm.link_profile import LinkProfile
from paceline.comm.routes.by_size import BySize
from paceline.comm.routes.forecast import Choice, Forecast, choose_all, explain, say_others
from paceline.comm.routes.trial import SIZES, Candidates, candidates, try_routes
from paceline.comm.text import share_text
from paceline.errors import DataError
from paceline.mesh import Group
from paceline.training.routes import Site, shared_or_native

_ALL_BUFFERS = 1 << 30


def by_size(group: Group, site: Site) -> Collective:
    """The collective of `route=auto`; collective over the group."""
    path = shared_or_native(group, site)
    if site.link_profile is not None and not isinstance(path, NativeCollective):
        site.warn(f"runtime.link_profile = {site.link_profile} has no effect: ranks share memory of one host")
    if site.is_coded or site.is_ordered or not isinstance(path, NativeCollective) or group.size == 1:
        return path
    if site.device.type != "cpu":
        return path  # NCCL chooses by itself
    found = candidates(site.net, group)
    began = time.perf_counter()
    forecast, source = _forecast(found, group, site)
    choices = choose_all(forecast)
    site.told("route", _record(group, forecast, choices, source))
    site.warn(_sentence(group, forecast, choices, site.largest_bytes, source, time.perf_counter() - began))
    if all(choice.routes == ["native"] for choice in choices.values()):
        found.close()
        return path
    site.closers.append(found.close)
    return BySize(found.paths, choices)


def _forecast(found: Candidates, group: Group, site: Site) -> tuple[Forecast, str]:
    """What sums take, and where that is known from."""
    known = site.forecasts.get(group.ranks)
    if _all_have(known is not None, group, site) and known is not None:
        return known, "measured before"
    if site.link_profile is None:
        sizes = [size for size in SIZES if size <= max(site.largest_bytes, SIZES[1])]
        forecast, source = try_routes(found, site.net, group, sizes), "measured"
    else:
        forecast, source = _read(site.link_profile, found, group, site), site.link_profile
    site.forecasts[group.ranks] = forecast
    return forecast, source


def _all_have(mine: bool, group: Group, site: Site) -> bool:
    """Whether it holds on every rank: one that has joined knows nothing of what was measured before."""
    flag = torch.tensor([int(mine)])
    return bool(site.net.all_reduce(flag, group, "min").wait().item())


def _read(place: str, found: Candidates, group: Group, site: Site) -> Forecast:
    """What a profile says of the routes of a group.

    Raises:
        DataError: it cannot be read, or is of another group of ranks.
    """
    profile = read_profile(place, group, site.net, site.device)
    lines = {route: profile.routes[route] for route in found.paths if route in profile.routes}
    if len(profile.hosts) != group.size or "native" not in lines:
        raise DataError(
            f"this link profile is of {len(profile.hosts)} ranks with routes {', '.join(lines) or 'none'},"
            f" and group '{group.name}' has {group.size}",
            where=place,
            next_step=f"paceline bench link -n {group.size} --out {place} on these hosts, or leave"
            " runtime.link_profile out",
        )
    return Forecast(group.size, found.ranks_per_host, lines)


def read_profile(place: str, group: Group, net: Net, device: torch.device) -> LinkProfile:
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
    record = json.loads(share_text(said, group, net, device))
    if "error" in record:
        raise DataError(record["error"], next_step="paceline bench link --out FILE")
    return LinkProfile.read(record)


def _record(
    group: Group, forecast: Forecast, choices: Mapping[str, Choice], source: str
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


def _sentence(
    group: Group,
    forecast: Forecast,
    choices: Mapping[str, Choice],
    largest: int,
    source: str,
    seconds: float,
) -> str:
    took = f"{source} in {seconds:.1f} s" if source == "measured" else source
    size = min(largest, _ALL_BUFFERS)
    others = say_others(forecast, choices, "native")
    return (
        f"route: {choices['all_reduce']} over group '{group.name}', as a sum of {size:,} bytes takes"
        f" {explain(forecast, size)} ({took}); {f'{others}; ' if others else ''}route=NAME in the strategy"
        " chooses another"
    )
