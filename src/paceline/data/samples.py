"""Samples to a batch without a loader: for a look at the data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from paceline.data.device import to_device
from paceline.task import Task


def collate_samples(task: Task, samples: list[Any], device: torch.device) -> Any:
    """A batch as the task's loss takes it."""
    return to_device((task.collate or default_collate)(samples), device)
