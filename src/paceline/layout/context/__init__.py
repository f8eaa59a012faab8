"""Context: sequences are split over ranks by positions, and attention goes over all of them."""

from paceline.layout.context.sequences import SplitSequences, Trial

__all__ = ["SplitSequences", "Trial"]
