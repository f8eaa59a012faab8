"""Checkpoints: the training state on disk."""

from paceline.checkpoint.store import Checkpoint, latest, load, name_of, save

__all__ = ["Checkpoint", "latest", "load", "name_of", "save"]
