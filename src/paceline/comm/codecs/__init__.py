"""The forms in which values travel."""

from paceline.comm.codecs.codec import Codec
from paceline.comm.codecs.int8 import Int8
from paceline.comm.codecs.top_k import TopK

__all__ = ["Codec", "Int8", "TopK", "int8", "no_codec", "top_k"]


def no_codec(argument: str) -> None:
    """Values travel as they are."""


def int8(argument: str) -> Codec:
    """Eight bits a value."""
    return Int8()


def top_k(argument: str) -> Codec:
    """The largest share of the values."""
    return TopK(float(argument))
