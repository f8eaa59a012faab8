"""The context in which the constructor of a route builds a collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.collectives.collective_protocol import AllToAllCollective, Collective
from paceline.comm.net import Net
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import RankGroup

if TYPE_CHECKING:
    from paceline.comm.routes.route_by_size import RouteForecast


@dataclass(frozen=True)
class RouteContext:
    """Where a collective is made.

    Args:
        world: all ranks.
        device: where gradients lie.
        warn: is told of a route that is another one here.
        close_callbacks: what a session calls when it is closed.
        apply_codec: puts a codec on a path; the path itself where values travel as they are.
        is_coded: whether it does.
        is_ordered: sums have one order, so nothing is left to what is measured.
        record: is told of what was chosen, for the run folder.
        largest_bytes: of a buffer of gradients.
        link_profile: a file that says what links are like; None: they are measured.
        route_forecasts: what was measured before, by ranks.
    """

    cluster: Cluster
    world: RankGroup
    net: Net
    device: torch.device
    warn: Callable[[str], None]
    close_callbacks: list[Callable[[], None]]
    apply_codec: Callable[[AllToAllCollective], Collective]
    is_coded: bool
    is_ordered: bool = False
    record: Callable[[str, Mapping[str, Any]], None] = lambda name, record: None
    largest_bytes: int = 1 << 24
    link_profile: str | None = None
    route_forecasts: dict[tuple[int, ...], RouteForecast] = field(default_factory=dict)


def require_cpu(context: RouteContext, word: str, instead: str) -> None:
    if context.device.type != "cpu":
        raise StrategyError(
            f"route={word} is built for processors, and this rank trains on {context.device.type}",
            next_step=f"leave it out: {instead}",
        )
