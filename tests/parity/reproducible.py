"""The small run that tests of reproducible runs share."""

from __future__ import annotations

from functools import partial

from tests.recipes import recipe_of

reproducible_recipe = partial(
    recipe_of,
    task="digits",
    options={"model": "convnet", "channels": 4, "dropout": 0.2},
    steps=8,
    batch={"size": 29, "shards": 6},
    optimizer={"name": "adamw", "lr": 3e-3, "clip_norm": 0.5},
    reproducible=True,
)
