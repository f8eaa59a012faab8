"""The forms in which values travel: a file for each, and a line in `recipe/words.py`."""

from paceline.comm.codecs.codec import Codec, Keys

__all__ = ["Codec", "Keys", "no_codec"]


def no_codec(argument: str) -> None:
    """The word `fp32`: values travel as they are."""
