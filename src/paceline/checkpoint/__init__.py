"""Checkpoints: the training state in a folder, whole or not there.

A checkpoint is a folder `step-NNNNNNNN`: a file of tensors and a report of each rank, and a manifest that is
written last. See `docs/howto/checkpoints.md`.
"""

from paceline.checkpoint.claim import claim
from paceline.checkpoint.files import Files
from paceline.checkpoint.lock import LOCK, Lock
from paceline.checkpoint.manifest import MANIFEST, Manifest, Origin
from paceline.checkpoint.part import Patience, insist, refused
from paceline.checkpoint.pretrained import Taken, load_weights
from paceline.checkpoint.publish import Keep
from paceline.checkpoint.reader import Loaded, ManifestReader, Stored, load, stored_at
from paceline.checkpoint.same_vocabulary import VOCABULARY, refuse_other_vocabulary
from paceline.checkpoint.saver import Saver, Saving
from paceline.checkpoint.shelf import BEST, NEWEST, Shelf, has_published, name_of
from paceline.checkpoint.weights import (
    Exported,
    Weights,
    WeightsAlone,
    export_weights,
    find_checkpoint,
    weights_of,
    with_tied_names,
)
from paceline.checkpoint.writers import ByProcess, ByThreads, Writer

__all__ = [
    "BEST",
    "LOCK",
    "MANIFEST",
    "NEWEST",
    "VOCABULARY",
    "ByProcess",
    "ByThreads",
    "Exported",
    "Files",
    "Keep",
    "Loaded",
    "Lock",
    "Manifest",
    "ManifestReader",
    "Origin",
    "Patience",
    "Saver",
    "Saving",
    "Shelf",
    "Stored",
    "Taken",
    "Weights",
    "WeightsAlone",
    "Writer",
    "claim",
    "export_weights",
    "find_checkpoint",
    "has_published",
    "insist",
    "load",
    "load_weights",
    "name_of",
    "refuse_other_vocabulary",
    "refused",
    "stored_at",
    "weights_of",
    "with_tied_names",
]
