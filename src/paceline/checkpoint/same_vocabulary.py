"""Weights and data that mean the same pieces of text by the same numbers, as far as both say it."""

from __future__ import annotations

from paceline.errors import CheckpointError

VOCABULARY = "vocabulary"
"""In the manifest of a checkpoint and in the header of an export: see `Task.vocabulary`."""


def refuse_other_vocabulary(own: str, theirs: str, place: str) -> None:
    """Compare two hashes; an empty one says nothing.

    Raises:
        CheckpointError: both are known, and differ.
    """
    if own and theirs and own != theirs:
        raise CheckpointError(
            "the task's tokenizer is not the one that these weights were trained with: the same numbers stand"
            " for other pieces of text",
            where=place,
            next_step="name the tokenizer.json of the weights (options.tokenizer of byte-gpt), or begin from"
            " weights of this vocabulary",
        )
