"""Codecs by their words."""

from __future__ import annotations

from paceline.comm import Codec
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.recipe import Strategy


def codec_of(word: str) -> Codec:
    """Build the codec that a strategy names."""
    found = build_codec(Strategy(codec=word))
    assert found is not None
    return found
