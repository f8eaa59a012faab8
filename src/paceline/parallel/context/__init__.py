"""Context parallelism: sequences are split over ranks by positions, and attention sees all positions."""

from paceline.parallel.context.context_attention import SequenceSplitter, TrialBatch

__all__ = ["SequenceSplitter", "TrialBatch"]
