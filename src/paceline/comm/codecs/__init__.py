"""Encodings of values on the wire: one file for each codec, and one line in
`recipe/registry/codec_specs.py`.
"""

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, values_of

__all__ = ["Codec", "CodecKeys", "bytes_of", "no_codec", "values_of"]


def no_codec(argument: None) -> None:
    """Return no codec, for the word `fp32`: values are sent as they are."""
