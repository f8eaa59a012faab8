"""Keys of a recipe that are set and cannot act here: what only the task and the number of processes can tell.

Invariant: each is named in a sentence of its own, and nothing about the run changes. What the recipe alone
can tell is an error of the recipe (`recipe.acting`).
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.layout.synced_norm import norms_of
from paceline.mesh import Mesh
from paceline.recipe import Recipe
from paceline.recipe.acting import HELD_OUT, HERE, default_at, value_at
from paceline.task import Task


def idle_keys(recipe: Recipe, task: Task, mesh: Mesh, num_nodes: int = 1) -> Iterator[str]:
    """A sentence for every key that is set and cannot act.

    Args:
        recipe: with the strategy as it runs.
    """
    for key, why in _idle(recipe, task, mesh, num_nodes):
        if value_at(recipe, key) != default_at(Recipe, key):
            yield f"{key} = {value_at(recipe, key)} has no effect: {why}"


def _idle(recipe: Recipe, task: Task, mesh: Mesh, num_nodes: int) -> Iterator[tuple[str, str]]:
    rule, sharers = recipe.strategy.rule, mesh.axes["tensor"].size
    if not norms_of(task.model):
        yield "batch.sync_batchnorm", "the model has no BatchNorm"
    if num_nodes == 1 and not recipe.strategy.servers:
        yield "security.tls", "there is one node, and no server"
    if sharers == 1:
        yield "tensor", "no tensors are cut: the strategy has no tensor"
    if task.held_out is None:
        no_data = "the task has no held-out data, Task(held_out=...)"
        yield from ((key, no_data) for key, acts in HERE.items() if acts == HELD_OUT)
    if rule.sums and mesh.data.size == 1:
        alone = "one rank runs all samples, so no gradient is sent"
        summed = "strategy.codec", "runtime.bucket_bytes", "runtime.bucket_latency", "runtime.link_profile"
        yield from ((key, alone) for key in summed)
        if sharers == 1:
            yield "strategy.route", alone
    if mesh.replica.size == 1:
        yield "strategy.balance", "one replica runs all shards"
    if rule.agrees == "replica" and mesh.replica.size == 1 and not rule.reads:
        yield "strategy.sync", "one replica has nobody to average with"
