"""Messages between two ranks, whenever one of them is ready: no collectives."""

from paceline.comm.channel.arrivals import InOrder
from paceline.comm.channel.channel import FRAME_LENGTHS, Channel, Message, copied_bytes, kept_bytes
from paceline.comm.channel.sockets import SocketChannel

__all__ = ["FRAME_LENGTHS", "Channel", "InOrder", "Message", "SocketChannel", "copied_bytes", "kept_bytes"]
