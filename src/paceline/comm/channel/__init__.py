"""Messages between two ranks, whenever one of them is ready: no collectives."""

from paceline.comm.channel.channel import FRAME_LENGTHS, Channel, Message, SocketChannel

__all__ = ["FRAME_LENGTHS", "Channel", "Message", "SocketChannel"]
