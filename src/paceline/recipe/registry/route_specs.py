"""The words of what carries messages between two ranks: one line of registration each."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipe.registry.word_spec import SyncSpec, WordSpec

DEFAULT_CHANNEL = "socket"


@dataclass(frozen=True, kw_only=True)
class ChannelSpec(WordSpec):
    """What carries messages. `build(setting, num_ranks) -> Channel`, collective.

    It connects every one of the first `num_ranks` with all ranks after it; what it makes keeps
    `paceline.testing.contracts.ChannelContract`.

    Args:
        uses_certificate: it shows the certificate of `security.certificate`, and asks for it.
    """

    choice = "channel"

    uses_certificate: bool = False


CHANNEL_SPECS = (
    ChannelSpec(
        word=DEFAULT_CHANNEL,
        summary="plain sockets: the fastest, and a connection that breaks is a rank that is lost",
        build="paceline.comm.channel.channel_builders:build_socket_channel",
        with_terms="servers=1 sync=server",
    ),
    ChannelSpec(
        word="grpc",
        summary="calls of gRPC, made again until they succeed: a link may be gone for a while",
        build="paceline.comm.channel.channel_builders:build_grpc_channel",
        uses_certificate=True,
        with_terms="servers=1 sync=server",
    ),
)


def uses_channel(rule: SyncSpec) -> bool:
    """Whether ranks send each other messages under a rule."""
    return rule.sends or rule.needs_server > 0
