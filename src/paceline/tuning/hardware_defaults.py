"""How many threads an operation runs on, and the reason for it. Pure.

How fast this machine is, one way and another, at a product or an update, in a tenth of a second.

What a recipe leaves to the machine: the number format of forward and backward, and the number of threads.

Invariant: all ranks come to the same answer, and it comes with its reason. A measured choice is made once,
when a run begins: its folder keeps the answer, so a run that goes on computes as it began. It costs one small
product, and nothing where the model's products are too small to gain.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.job.cluster import Cluster
from paceline.job.cpu_count import CoreCount, find_cores
from paceline.job.mesh import Mesh
from paceline.optim.build_optimizer import build_optimizer
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.recipe.tables import OptimizerRecipe
from paceline.task import Task


class ThreadChoice(NamedTuple):
    """Intra-op threads of each process of this host, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"threads: {self.number}, as {self.reason}"


def core_share(cores: CoreCount, processes_here: int) -> int:
    """Of the cores, what each process of this host has."""
    return max(1, cores.number // processes_here)


def choose_threads(recipe: Recipe, processes_here: int, cores: CoreCount) -> ThreadChoice:
    """As many as the recipe says, or an equal share of the cores.

    Args:
        processes_here: of the run, on this host.
        cores: that they may use.
    """
    if recipe.reproducible:
        return ThreadChoice(1, "reproducible = true: their number changes the order of additions")
    if recipe.is_ordered:
        return ThreadChoice(1, "lanes have the cores")
    if recipe.runtime.threads:
        return ThreadChoice(recipe.runtime.threads, "runtime.threads says")
    if processes_here == 1:
        return ThreadChoice(cores.number, f"one process has {cores.reason}")
    return ThreadChoice(core_share(cores, processes_here), f"{processes_here} processes share {cores.reason}")


def oversubscription_warning(threads: int, processes_here: int, cores: int) -> str:
    """By how much the threads of this host's processes are more than its cores; empty if they are not."""
    wanted = threads * processes_here
    if wanted <= cores:
        return ""
    return (
        f"runtime.threads = {threads} in {processes_here} processes is {wanted / cores:.1f} times the"
        f" {cores} cores here, so threads wait for each other; 0 shares the cores"
    )


SMALLEST_PRODUCT = 2**24
"""Multiplications below which the time of a product is not that of its arithmetic."""
MIN_GAIN = 1.2
"""One way has to be this many times as fast as another to be chosen, or the other this slow to be told."""
_LARGEST_SIDE = 512
_FEWEST_VALUES, _MOST_VALUES = 2**16, 2**20
_PROBE_SECONDS = 0.1
_MOST_REPEATS = 9


class MatrixProduct(NamedTuple):
    """The largest product of a model's forward: rows x inner times inner x columns."""

    rows: int
    inner: int
    columns: int

    @property
    def is_small(self) -> bool:
        return self.rows * self.inner * self.columns < SMALLEST_PRODUCT

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


def measure_gain(product: MatrixProduct, device: torch.device, compute: str) -> float:
    """Seconds in fp32 over seconds in `compute`, of a product and its gradients; weights are kept in fp32."""
    run = _product_runner(product, device)
    formats = [MixedPrecision("fp32", device.type), MixedPrecision(compute, device.type)]
    return _speedup(lambda: run(formats[0]), lambda: run(formats[1]))


def few_threads_warning(threads: int, share: int, product: MatrixProduct | None, device: torch.device) -> str:
    """By how much fewer threads than this process's share of the cores are slow here; empty if they are not.

    Args:
        threads: that the recipe asks for; 0: it does not.
    """
    if not 0 < threads < share or product is None or product.is_small or device.type != "cpu":
        return ""
    run, before = _product_runner(product, device), torch.get_num_threads()

    def on(number: int) -> None:
        torch.set_num_threads(number)
        run(MixedPrecision("fp32", device.type))

    try:
        times = _speedup(lambda: on(threads), lambda: on(share))
    finally:
        torch.set_num_threads(before)
    if times < MIN_GAIN:
        return ""
    return (
        f"runtime.threads = {threads} is slow here: a product of {product} takes {times:.1f} times as long as"
        f" on {share} threads; 0 shares the cores"
    )


def unfused_optimizer_warning(recipe: OptimizerRecipe, num_values: int, device: torch.device) -> str:
    """By how much updates without a fused kernel are slow here; empty if they are not, or too small to tell.

    Args:
        recipe: with fused = false.
        num_values: of this rank's parameters.
    """
    size = min(num_values, _MOST_VALUES)
    if size < _FEWEST_VALUES:
        return ""
    optimizers = [_optimizer_step(recipe.replace(fused=fused), size, device) for fused in (False, True)]
    times = _speedup(*optimizers)
    if times < MIN_GAIN:
        return ""
    return (
        f"optimizer.fused = false is slow here: an update of {size:,} values takes {times:.1f} times as long"
        " as in a fused kernel"
    )


def _optimizer_step(recipe: OptimizerRecipe, size: int, device: torch.device) -> Callable[[], None]:
    """Updates that many values once."""
    values = nn.ParameterList([torch.zeros(size // 64, 64, device=device)])
    optimizer = build_optimizer(values, recipe, fused_allowed=True)
    values[0].grad = torch.ones_like(values[0])

    def step() -> None:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _product_runner(product: MatrixProduct, device: torch.device) -> Callable[[MixedPrecision], None]:
    """Computes the product and its gradients once, in some number format."""
    rows, inner, columns = (min(side, _LARGEST_SIDE) for side in product)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator).to(device).requires_grad_()
    weight = torch.randn(columns, inner, generator=generator).to(device).requires_grad_()

    def run(precision: MixedPrecision) -> None:
        with precision.autocast():
            y = F.linear(x, weight)
        torch.autograd.grad(y.float().sum(), [x, weight])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _speedup(first: Callable[[], None], second: Callable[[], None]) -> float:
    """Least seconds of the first way over least seconds of the second, in turns."""
    ways, times = (first, second), (list[float](), list[float]())
    for way in ways:
        way()  # the first call chooses kernels
    end = time.perf_counter() + _PROBE_SECONDS
    while len(times[0]) < 2 or (len(times[0]) < _MOST_REPEATS and time.perf_counter() < end):
        for found, way in zip(times, ways, strict=True):
            begin = time.perf_counter()
            way()
            found.append(time.perf_counter() - begin)
    return min(times[0]) / min(times[1])


_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


@dataclass(frozen=True)
class PrecisionGain:
    """What one rank found.

    Args:
        product: what was measured, or is too small to be; "" on a rank whose model has no product.
        gain: how many times as fast bf16 is; 1 if it was not measured.
        why_not: why it was not measured; empty if it was.
    """

    product: str
    gain: float = 1.0
    why_not: str = ""


class PrecisionChoice(NamedTuple):
    """A number format, and the reason for it."""

    compute: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.compute}, as {self.reason}"


def choose_hardware_defaults(
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
    slow = [oversubscription_warning(recipe.runtime.threads, here, cores.number)]
    slow += [few_threads_warning(recipe.runtime.threads, core_share(cores, here), product, device)]
    slow += [] if asked == "auto" else [slow_precision_warning(asked, product, device)]
    for text in filter(None, [*slow, "" if recipe.runtime.threads else str(threads)]):
        warn(text)
    note("threads", threads._asdict())
    if asked != "auto":
        return recipe
    choice = _choose_on_all_ranks(recipe, product, cluster, device)
    warn(str(choice))
    note("precision", choice._asdict())
    return recipe.replace(precision=recipe.precision.replace(compute=choice.compute))


def _choose_on_all_ranks(
    recipe: Recipe, product: MatrixProduct | None, cluster: Cluster, device: torch.device
) -> PrecisionChoice:
    if recipe.reproducible:
        return PrecisionChoice("fp32", "reproducible = true leaves nothing to what is measured")
    world = Mesh.build(cluster, {"replica": cluster.world_size}).world
    mine = json.dumps(find_gain(product, device).__dict__)
    texts = all_gather_texts(mine, world, Net(recipe.runtime.deadline_seconds))
    return choose_precision([PrecisionGain(**json.loads(text)) for text in texts])


def choose_precision(found: Sequence[PrecisionGain]) -> PrecisionChoice:
    """bf16 if every rank gains by it; pure.

    Args:
        found: by rank.
    """
    slowest = min(range(len(found)), key=lambda rank: (found[rank].gain, not found[rank].why_not))
    least = found[slowest]
    alike = all(other.why_not == least.why_not for other in found) and least.why_not
    where = "here" if len(found) == 1 or alike else f"on rank {slowest}"
    if least.why_not:
        return PrecisionChoice("fp32", f"{least.why_not} {where}".removesuffix(" here"))
    speed = f"in bf16 a product of {least.product} is {least.gain:.1f} times as fast {where}"
    if least.gain >= MIN_GAIN:
        return PrecisionChoice("bf16", speed)
    return PrecisionChoice("fp32", f"{speed}, which is no gain")


def slow_precision_warning(asked: str, product: MatrixProduct | None, device: torch.device) -> str:
    """By how much a format that the recipe names is slow here; empty if it is not."""
    if product is None or product.is_small or (asked == "fp32" and not has_bf16(device)):
        return ""
    other = "fp32" if asked != "fp32" else "bf16"
    gain = measure_gain(product, device, asked if asked != "fp32" else other)
    times = 1 / gain if asked != "fp32" else gain
    if times < MIN_GAIN:
        return ""
    return (
        f'precision.compute = "{asked}" is slow here: a product of {product} takes {times:.1f} times'
        f' as long as in {other}; "auto" chooses by the machine'
    )


def largest_product(recipe: Recipe, task: Task, processes: int = 1) -> MatrixProduct | None:
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
    return MatrixProduct(rows, inner, columns)


def find_gain(product: MatrixProduct | None, device: torch.device) -> PrecisionGain:
    """How many times as fast as in fp32 this rank computes a product and its gradients in bf16."""
    if product is None:
        return PrecisionGain("", why_not="the model has no products")
    if product.is_small:
        return PrecisionGain(str(product), why_not=f"products of {product} are too small to gain")
    if not has_bf16(device):
        kind = "processor" if device.type == "cpu" else "GPU"
        return PrecisionGain(str(product), why_not=f"the {kind} has no instructions for bf16")
    return PrecisionGain(str(product), measure_gain(product, device, "bf16"))


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
