"""Checkpoints: the training state in a folder, whole or not there.

A checkpoint is a folder `step-NNNNNNNN`: a file of tensors and a report of each rank, and a manifest that is
written last. See `docs/checkpoints.md`.
"""

from paceline.checkpoint.files import Files
from paceline.checkpoint.manifest import MANIFEST, Manifest, Origin
from paceline.checkpoint.part import Patience
from paceline.checkpoint.publish import Keep
from paceline.checkpoint.reader import Loaded, ManifestReader, Stored, load, stored_at
from paceline.checkpoint.saver import Saver, Saving
from paceline.checkpoint.shelf import Shelf, name_of
from paceline.checkpoint.weights import Exported, export_weights, find_checkpoint, load_weights

__all__ = [
    "MANIFEST",
    "Exported",
    "Files",
    "Keep",
    "Loaded",
    "Manifest",
    "ManifestReader",
    "Origin",
    "Patience",
    "Saver",
    "Saving",
    "Shelf",
    "Stored",
    "export_weights",
    "find_checkpoint",
    "load",
    "load_weights",
    "name_of",
    "stored_at",
]
