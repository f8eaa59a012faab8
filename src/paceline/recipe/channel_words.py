"""The words of what carries messages between two ranks: one line of registration each."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipe.specs import Spec, SyncSpec

PLAIN = "socket"


@dataclass(frozen=True, kw_only=True)
class ChannelSpec(Spec):
    """What carries messages. `build(setting, num_ranks) -> Channel`, collective.

    It connects every one of the first `num_ranks` with all ranks after it; what it makes keeps
    `paceline.testing.contracts.ChannelContract`.

    Args:
        takes_certificate: it shows the certificate of `security.certificate`, and asks for it.
    """

    choice = "channel"

    takes_certificate: bool = False


CHANNELS = (
    ChannelSpec(
        word=PLAIN,
        summary="plain sockets: the fastest, and a connection that breaks is a rank that is lost",
        build="paceline.training.channels:socket",
        with_terms="servers=1 sync=server",
    ),
    ChannelSpec(
        word="grpc",
        summary="calls of gRPC, made again until they succeed: a link may be gone for a while",
        build="paceline.training.channels:grpc",
        takes_certificate=True,
        with_terms="servers=1 sync=server",
    ),
)


def has_channel(rule: SyncSpec) -> bool:
    """Whether ranks send each other messages under a rule."""
    return rule.sends or rule.needs_server > 0
