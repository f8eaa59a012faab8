"""Context: sequences are split over ranks by positions, and attention goes over all of them."""

from paceline.parallel.context.context_attention import SequenceSplitter, TrialBatch

__all__ = ["SequenceSplitter", "TrialBatch"]
