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
    """The context in which a collective is built.

    Args:
        world: all ranks.
        device: device of the gradients.
        warn: called with a text if the route is another one than was requested.
        close_callbacks: called when the session is closed; constructors append to it.
        apply_codec: puts a codec on a route; returns the route itself if values are sent as they are.
        is_coded: whether there is a codec.
        is_ordered: sums have one order, so no choice may depend on measurements.
        record: called with a name and what was chosen, for the run folder.
        largest_bytes: bytes of the largest buffer of gradients.
        link_profile: a file with a profile of the links; None: they are measured.
        route_forecasts: earlier measurements, by ranks.
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
    """Raise an error if gradients are on a GPU, for which this route is not built.

    Raises:
        StrategyError: the device is not the CPU.
    """
    # Message routes use tags and host memory, which NCCL does not have.
    if context.device.type != "cpu":
        raise StrategyError(
            f"route={word} needs a CPU, but this rank trains on {context.device.type}",
            next_step=f"remove it: {instead}",
        )
