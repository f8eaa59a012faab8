"""What a recipe leaves to the machine: the number format of forward and backward, and the number of threads.

Invariant: all ranks come to the same answer, and it comes with its reason. A measured choice is made once,
when a run begins: its folder keeps the answer, so a run that goes on computes as it began. It costs one small
product, and nothing where the model's products are too small to gain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.comm.text import gather_texts
from paceline.cores import find_cores
from paceline.mesh import Mesh
from paceline.recipe import Recipe, num_micro_batches
from paceline.task import Task
from paceline.training.probe import GAIN, Product, few_threads, measure_gain
from paceline.training.threads import choose_threads, crowded, share_of

_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


@dataclass(frozen=True)
class Finding:
    """What one rank found.

    Args:
        product: what was measured, or is too small to be; "" on a rank whose model has no product.
        gain: how many times as fast bf16 is; 1 if it was not measured.
        why_not: why it was not measured; empty if it was.
    """

    product: str
    gain: float = 1.0
    why_not: str = ""


class Choice(NamedTuple):
    """A number format, and the reason for it."""

    compute: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.compute}, as {self.reason}"


def choose_by_machine(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None] = lambda text: None,
    note: Callable[[str, Mapping[str, Any]], None] = lambda name, record: None,
) -> Recipe:
    """The recipe with a number format in place of "auto"; collective. What is slow here is told.

    Args:
        cluster: connected.
        warn: is told what was chosen and why, or by how much a choice of the recipe is slow here.
        note: is told the same, for the run folder.
    Wire: one ragged all_gather of some bytes.
    """
    asked, product = recipe.precision.compute, largest_product(recipe, task, cluster.world_size)
    here, cores = cluster.local_world_size, find_cores()
    threads = choose_threads(recipe, here, cores)
    slow = [crowded(recipe.runtime.threads, here, cores.number)]
    slow += [few_threads(recipe.runtime.threads, share_of(cores, here), product, device)]
    slow += [] if asked == "auto" else [slow_choice(asked, product, device)]
    for text in filter(None, [*slow, "" if recipe.runtime.threads else str(threads)]):
        warn(text)
    note("threads", threads._asdict())
    if asked != "auto":
        return recipe
    choice = _agree(recipe, product, cluster, device)
    warn(str(choice))
    note("precision", choice._asdict())
    return recipe.replace(precision=recipe.precision.replace(compute=choice.compute))


def _agree(recipe: Recipe, product: Product | None, cluster: Cluster, device: torch.device) -> Choice:
    if recipe.reproducible:
        return Choice("fp32", "reproducible = true leaves nothing to what is measured")
    world = Mesh.build(cluster, {"replica": cluster.world_size}).world
    mine = json.dumps(find_gain(product, device).__dict__)
    texts = gather_texts(mine, world, Net(recipe.runtime.deadline_seconds))
    return choose([Finding(**json.loads(text)) for text in texts])


def choose(found: Sequence[Finding]) -> Choice:
    """bf16 if every rank gains by it; pure.

    Args:
        found: by rank.
    """
    slowest = min(range(len(found)), key=lambda rank: (found[rank].gain, not found[rank].why_not))
    least = found[slowest]
    alike = all(other.why_not == least.why_not for other in found) and least.why_not
    where = "here" if len(found) == 1 or alike else f"on rank {slowest}"
    if least.why_not:
        return Choice("fp32", f"{least.why_not} {where}".removesuffix(" here"))
    speed = f"in bf16 a product of {least.product} is {least.gain:.1f} times as fast {where}"
    if least.gain >= GAIN:
        return Choice("bf16", speed)
    return Choice("fp32", f"{speed}, which is no gain")


def slow_choice(asked: str, product: Product | None, device: torch.device) -> str:
    """By how much a format that the recipe names is slow here; empty if it is not."""
    if product is None or product.is_small or (asked == "fp32" and not has_bf16(device)):
        return ""
    other = "fp32" if asked != "fp32" else "bf16"
    gain = measure_gain(product, device, asked if asked != "fp32" else other)
    times = 1 / gain if asked != "fp32" else gain
    if times < GAIN:
        return ""
    return (
        f'precision.compute = "{asked}" is slow here: a product of {product} takes {times:.1f} times'
        f' as long as in {other}; "auto" chooses by the machine'
    )


def largest_product(recipe: Recipe, task: Task, processes: int = 1) -> Product | None:
    """The largest product in a micro-batch, by the model's weights; None if it has none.

    A table that is looked up (an embedding) is no product. Of a convolution the rows are counted as if it
    were applied at one place, so that a small one is never taken for a large one.
    """
    samples = -(-recipe.batch.size // num_micro_batches(recipe, processes))
    rows = samples * max(1, task.num_tokens_per_sample)
    weights = [
        (p.shape[0], p[0].numel())
        for module in task.model.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
        if p.ndim >= 2 and p.numel()
    ]
    if not weights:
        return None
    columns, inner = max(weights, key=lambda shape: shape[0] * shape[1])
    return Product(rows, inner, columns)


def find_gain(product: Product | None, device: torch.device) -> Finding:
    """How many times as fast as in fp32 this rank computes a product and its gradients in bf16."""
    if product is None:
        return Finding("", why_not="the model has no products")
    if product.is_small:
        return Finding(str(product), why_not=f"products of {product} are too small to gain")
    if not has_bf16(device):
        kind = "processor" if device.type == "cpu" else "GPU"
        return Finding(str(product), why_not=f"the {kind} has no instructions for bf16")
    return Finding(str(product), measure_gain(product, device, "bf16"))


def has_bf16(device: torch.device, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether there are instructions for bf16; true where nobody says, so that measuring decides."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not flags or not _BF16_FLAGS.isdisjoint(flags.partition(":")[2].split())
