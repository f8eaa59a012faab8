"""The forms in which values travel: a file for each, and a line in `recipe/registry/sync_specs.py`."""

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, values_of

__all__ = ["Codec", "CodecKeys", "bytes_of", "no_codec", "values_of"]


def no_codec(argument: str) -> None:
    """The word `fp32`: values travel as they are."""
