"""The forms in which values travel."""

from paceline.comm.codecs.codec import Codec
from paceline.comm.codecs.int8 import Int8
from paceline.comm.codecs.top_k import TopK

__all__ = ["Codec", "Int8", "TopK"]
