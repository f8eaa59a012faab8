"""What it means that a call of gRPC has failed: an error that names who cannot talk to whom, or nothing."""

from __future__ import annotations

import grpc

from paceline.comm.channel.grpc_calls import GONE
from paceline.comm.channel.lost import gone
from paceline.errors import CommunicationError


def refused(error: grpc.RpcError, rank: int, hub_rank: int, whom: str) -> CommunicationError | None:
    """What the other side has said no to; None: it has not, so the call may be made again.

    Args:
        rank: of who has called.
        hub_rank, whom: who was called, as a rank and in words.
    """
    code, found = error.code(), None
    if code is grpc.StatusCode.UNAUTHENTICATED:
        found = another_token(rank, whom)
    elif code is grpc.StatusCode.FAILED_PRECONDITION and error.details() == GONE:
        found = gone(hub_rank)
    elif code is grpc.StatusCode.ALREADY_EXISTS:
        found = CommunicationError(
            f"Rank {rank} has already joined {whom}.",
            next_step="give each node its own --node-rank; a node that comes late needs a new job",
        )
    if found is not None:
        found.peer = hub_rank
    return found


def another_token(rank: int, whom: str) -> CommunicationError:
    """A caller and who is called know other keys."""
    return CommunicationError(
        f"Rank {rank} has another token than {whom}: it belongs to another job.",
        next_step="give all nodes of one job the same key: --token-file, or PACELINE_TOKEN",
    )


def is_of_certificates(error: grpc.RpcError) -> bool:
    """Whether it is what gRPC says where one side does not take the other's certificate."""
    why = error.details() or ""
    return "Socket closed" in why or "handshake failed" in why


def out_of_reach(error: grpc.RpcError, rank: int, whom: str) -> CommunicationError:
    """Nobody answers, or the encryption cannot begin."""
    why = error.details() or ""
    if is_of_certificates(error):
        return CommunicationError(
            f"rank {rank} and {whom} do not have one certificate, or one of both encrypts and one does not:"
            f" {why}",
            next_step="give all nodes of one job the same security.tls and security.certificate",
        )
    return CommunicationError(
        f"rank {rank} cannot reach {whom}: {why}",
        next_step="check that the nodes reach each other on all ports",
    )
