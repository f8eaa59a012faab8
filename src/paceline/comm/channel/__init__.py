"""Point-to-point messages between two ranks, whenever one of them is ready; no collectives."""

from paceline.comm.channel.message_channel import (
    FRAME_LENGTHS,
    ChannelMessage,
    MessageChannel,
)
from paceline.comm.channel.replay_channel import ReplayChannel
from paceline.comm.channel.socket_channel import SocketChannel

__all__ = [
    "FRAME_LENGTHS",
    "ChannelMessage",
    "MessageChannel",
    "ReplayChannel",
    "SocketChannel",
]
