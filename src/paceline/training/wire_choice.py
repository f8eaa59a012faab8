"""What is left to measurement of how gradients travel, before a session is built: the codec, then buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.task import Task
from paceline.training.bucket_choice import choose_buckets
from paceline.training.codec_choice import choose_codec


def choose_wire(
    recipe: Recipe,
    strategy: Strategy,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Recipe and strategy with what was chosen; collective. See `choose_codec` and `choose_buckets`."""
    recipe, strategy = choose_codec(recipe, strategy, task, cluster, device, warn=warn, note=note)
    return choose_buckets(recipe, strategy, cluster, device, warn=warn, note=note), strategy
