"""The routes of collectives and the channels of messages, and the classes of their specifications."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipe.registry.sync_specs import SyncSpec
from paceline.recipe.registry.word_spec import WordSpec

DEFAULT_CHANNEL = "socket"
NATIVE_ROUTE = "native"


@dataclass(frozen=True, kw_only=True)
class RouteSpec(WordSpec):
    """The specification of the path of collectives: `build(group, site) -> Collective`.

    Args:
        coded: how many buffers are coded and in flight at a time; 0: no codec applies; None: unknown.
        has_own_sum_order: it sums in an order of its own, which reproducible runs and lanes cannot have.
        is_default: it is what users get who name no route, or has the same effect.
        ring_bytes: an all_reduce of n bytes over P ranks sends 2 (P-1)/P n bytes per rank.
        in_memory: ranks of one host exchange data in shared memory.
        costs: `module:name` of the closed forms of its collectives between hosts; empty: it has none.
    """

    choice = "route"
    coded: int | None = None
    has_own_sum_order: bool = False
    is_default: bool = False
    ring_bytes: bool = False
    in_memory: bool = False
    costs: str = ""


@dataclass(frozen=True, kw_only=True)
class ChannelSpec(WordSpec):
    """The specification of what carries messages: `build(context, num_ranks) -> Channel`, collective.

    A channel connects each of the first `num_ranks` ranks with all ranks after it, and passes
    `paceline.testing.contracts.ChannelContract`.

    Args:
        uses_certificate: it presents the certificate of `security.certificate`, and demands it of its peers.
    """

    choice = "channel"
    uses_certificate: bool = False


_COSTS = "paceline.comm.routes.route_by_size"

ROUTE_SPECS = (
    RouteSpec(
        word="auto",
        summary="shared memory within a host, else the fastest for a buffer on the measured links",
        build="paceline.tuning.route_choice:build_auto_route",
        chooses=True,
        is_default=True,
        ring_bytes=True,
        in_memory=True,
        coded=2,
    ),
    RouteSpec(
        word=NATIVE_ROUTE,
        summary="the collectives of torch.distributed",
        build="paceline.comm.routes.native:build_native",
        costs=f"{_COSTS}:NATIVE_COSTS",
        is_default=True,
        ring_bytes=True,
        coded=2,
    ),
    RouteSpec(
        word="ring",
        summary="messages from each rank to the next",
        build="paceline.comm.routes.ring_route:build_ring",
        costs=f"{_COSTS}:RING_COSTS",
        has_own_sum_order=True,
        ring_bytes=True,
        coded=1,
    ),
    RouteSpec(
        word="tree",
        summary="up and down a binomial tree",
        build="paceline.comm.routes.tree_route:build_tree",
        costs=f"{_COSTS}:TREE_COSTS",
        has_own_sum_order=True,
        coded=1,
    ),
    RouteSpec(
        word="recursive-doubling",
        summary="between ranks whose numbers differ in one bit",
        build="paceline.comm.routes.recursive_doubling:build_recursive_doubling",
        costs=f"{_COSTS}:RECURSIVE_DOUBLING_COSTS",
        has_own_sum_order=True,
        coded=1,
    ),
    RouteSpec(
        word="grid",
        summary="along rows, then columns, then rows of a grid of ranks",
        build="paceline.comm.routes.grid_route:build_grid",
        costs=f"{_COSTS}:GRID_COSTS",
        has_own_sum_order=True,
        coded=1,
    ),
    RouteSpec(
        word="hierarchical",
        summary="inside nodes first",
        build="paceline.comm.routes.hierarchical:build_hierarchical",
        costs=f"{_COSTS}:HIERARCHICAL_COSTS",
        with_terms="replicas=4",
        has_own_sum_order=True,
    ),
    RouteSpec(
        word="shared-memory",
        summary="the memory of one host",
        build="paceline.comm.routes.shared_memory:build_shared_memory",
        coded=0,
        ring_bytes=True,
        in_memory=True,
    ),
    RouteSpec(
        word="mpi",
        summary="the collectives of an MPI library (mpi4py), for machines with a good MPI",
        build="paceline.comm.routes.mpi_route:build_mpi",
        has_own_sum_order=True,
        ring_bytes=True,
        coded=0,
    ),
    # Reserved: a word without `build` is refused as not implemented.
    RouteSpec(word="server"),
)

CHANNEL_SPECS = (
    ChannelSpec(
        word=DEFAULT_CHANNEL,
        summary="plain sockets: the fastest; a broken connection counts as a lost rank",
        build="paceline.comm.channel.channel_builders:build_socket_channel",
        with_terms="servers=1 sync=server",
    ),
    ChannelSpec(
        word="grpc",
        summary="gRPC calls that are repeated until they succeed, so a link may be down for a while",
        build="paceline.comm.channel.channel_builders:build_grpc_channel",
        uses_certificate=True,
        with_terms="servers=1 sync=server",
    ),
)


def uses_channel(spec: SyncSpec) -> bool:
    """Return whether ranks send each other messages under a sync rule, or clients of a network do."""
    return spec.sends or spec.needs_server > 0 or spec.trains_clients
