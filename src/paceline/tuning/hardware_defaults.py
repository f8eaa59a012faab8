"""Choose number format and threads by the machine, and warn of settings that are slow on it.

Invariant: all ranks choose alike, and every choice has a reason. A measurement takes about 0.1 s; nothing
is measured if the model's matrix products are too small for bf16 to be faster. The run folder keeps the
choice, so a resumed run computes as it began.

It does not choose a device (`session.start_rank`), and counts cores with `job.cpu_count`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.errors import format_count
from paceline.job.cluster import Cluster
from paceline.job.cpu_count import CoreCount, find_cores
from paceline.job.mesh import Mesh
from paceline.optim.build_optimizer import build_optimizer
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.task import Task

SMALLEST_PRODUCT = 2**24
"""Multiplications below which call overhead, not arithmetic, decides the time of a matrix product."""
MIN_GAIN = 1.2
"""The speedup at which bf16 is chosen, and the slowdown at which a setting of the user is warned about."""
_LARGEST_SIDE = 512
_FEWEST_VALUES, _MOST_VALUES = 2**16, 2**20
_PROBE_SECONDS = 0.1
_MOST_REPEATS = 9
_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


class ThreadChoice(NamedTuple):
    """Number of intra-op threads of each process of this host, with the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"threads: {self.number} ({self.reason})"


@dataclass(frozen=True)
class PrecisionGain:
    """Measured speedup of bf16 on one rank.

    Args:
        product: the measured matrix product; "" if the model has none.
        gain: seconds in fp32 over seconds in bf16; 1 if it was not measured.
        why_not: the reason why it was not measured; empty if it was.
    """

    product: str
    gain: float = 1.0
    why_not: str = ""


class PrecisionChoice(NamedTuple):
    """Number format of forward and backward, with the reason."""

    compute: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.compute} ({self.reason})"


class MatrixProduct(NamedTuple):
    """Shape of the largest matrix product of a forward: [rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def is_small(self) -> bool:
        return self.rows * self.inner * self.columns < SMALLEST_PRODUCT

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


def choose_hardware_defaults(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None] = lambda text: None,
    note: Callable[[str, Mapping[str, Any]], None] = lambda name, record: None,
) -> Recipe:
    """Return the recipe with a number format in place of `auto`, and warn of slow settings; collective.

    The threads are set by `session.start_rank`, to an equal share of the cores. Here they are reported, and
    reduced to one if a matrix product shows that other programs use these cores.

    Args:
        cluster: connected.
        warn: receives the lines "threads: ..." and "precision: ...", and warnings.
        note: receives the events `threads` and `precision`, for the run folder.
    Wire: one ragged all_gather of some bytes.
    """
    configured, product = recipe.precision.compute, largest_product(recipe, task, cluster.world_size)
    num_processes, cores = cluster.local_world_size, find_cores()
    threads = choose_threads(recipe, num_processes, cores)
    if not recipe.runtime.threads and threads.number > 1:
        threads = reduce_slow_threads(threads, product, device)
    warnings = [
        oversubscription_warning(recipe.runtime.threads, num_processes, cores.number),
        few_threads_warning(recipe.runtime.threads, core_share(cores, num_processes), product, device),
        "" if configured == "auto" else slow_precision_warning(configured, product, device),
    ]
    for text in filter(None, [*warnings, "" if recipe.runtime.threads else str(threads)]):
        warn(text)
    note("threads", threads._asdict())
    if configured != "auto":
        return recipe
    choice = _choose_on_all_ranks(recipe, product, cluster, device)
    warn(str(choice))
    note("precision", choice._asdict())
    return recipe.replace(precision=recipe.precision.replace(compute=choice.compute))


def core_share(cores: CoreCount, num_processes: int) -> int:
    """Return the number of cores for each process on this host, at least one."""
    return max(1, cores.number // num_processes)


def choose_threads(recipe: Recipe, num_processes: int, cores: CoreCount) -> ThreadChoice:
    """Return the number of threads that the recipe sets, or an equal share of the cores; pure.

    Args:
        num_processes: of the run, on this host.
        cores: those that the processes may use.
    """
    if recipe.reproducible:
        return ThreadChoice(1, "reproducible = true; more threads would change the order of additions")
    if recipe.is_ordered:
        return ThreadChoice(1, "the cores are used by lanes")
    if recipe.runtime.threads:
        return ThreadChoice(recipe.runtime.threads, "set by runtime.threads")
    if num_processes == 1:
        return ThreadChoice(cores.number, f"one process on {cores.reason}")
    return ThreadChoice(core_share(cores, num_processes), f"{num_processes} processes share {cores.reason}")


def reduce_slow_threads(
    threads: ThreadChoice, product: MatrixProduct | None, device: torch.device
) -> ThreadChoice:
    """Return one thread, and set it, if several are slower; nothing is measured for small products.

    On a machine whose cores are busy, threads wait for each other inside every operation.
    """
    if product is None or product.is_small or device.type != "cpu":
        return threads
    slowdown = _thread_slowdown(product, device, threads.number, 1, median)
    if slowdown < MIN_GAIN:
        return threads
    torch.set_num_threads(1)
    reason = (
        f"{threads.number} threads take {slowdown:.1f} times as long for a matrix product of {product}: the"
        " cores of this host are busy"
    )
    return ThreadChoice(1, reason)


def _thread_slowdown(
    product: MatrixProduct,
    device: torch.device,
    threads: int,
    other: int,
    summarize: Callable[[Sequence[float]], float],
) -> float:
    """Return the seconds of a product on `threads` threads over those on `other` threads."""
    run, num_threads = _product_runner(product, device), torch.get_num_threads()

    def run_on(number: int) -> None:
        torch.set_num_threads(number)
        run(MixedPrecision("fp32", device.type))

    try:
        return _speedup(lambda: run_on(threads), lambda: run_on(other), summarize)
    finally:
        torch.set_num_threads(num_threads)


def oversubscription_warning(threads: int, num_processes: int, num_cores: int) -> str:
    """Return a warning if this host's processes have more threads than cores, else an empty text; pure."""
    total = threads * num_processes
    if total <= num_cores:
        return ""
    return (
        f"warning: runtime.threads = {threads} in {format_count(num_processes, 'process')} is"
        f" {total / num_cores:.1f} times the {format_count(num_cores, 'core')} of this host, so threads"
        " wait for each other. Set runtime.threads = 0 to"
        " share the cores."
    )


def few_threads_warning(threads: int, share: int, product: MatrixProduct | None, device: torch.device) -> str:
    """Return a warning if the threads of the recipe are slower than a full share of the cores, else "".

    Args:
        threads: `runtime.threads`; 0: chosen by Paceline, so nothing is measured.
        share: number of cores of this process.
    """
    if not 0 < threads < share or product is None or product.is_small or device.type != "cpu":
        return ""
    slowdown = _thread_slowdown(product, device, threads, share, min)
    if slowdown < MIN_GAIN:
        return ""
    return (
        f"warning: runtime.threads = {threads} is slow here: a matrix product of {product} takes"
        f" {slowdown:.1f} times as long as with {share} threads. Set runtime.threads = 0 to share the cores."
    )


def unfused_optimizer_warning(recipe: OptimizerRecipe, num_values: int, device: torch.device) -> str:
    """Return a warning if updates without a fused kernel are slower here, else an empty text.

    Args:
        recipe: with fused = false.
        num_values: number of parameters that this rank updates; of few of them nothing is measured.
    """
    size = min(num_values, _MOST_VALUES)
    if size < _FEWEST_VALUES:
        return ""
    unfused, fused = (_optimizer_step(recipe.replace(fused=on), size, device) for on in (False, True))
    slowdown = _speedup(unfused, fused)
    if slowdown < MIN_GAIN:
        return ""
    return (
        f"warning: optimizer.fused = false is slow here: an update of {size:,} values takes {slowdown:.1f}"
        " times as long as with a fused kernel."
    )


def slow_precision_warning(configured: str, product: MatrixProduct | None, device: torch.device) -> str:
    """Return a warning if the number format of the recipe is slower here than another, else an empty text."""
    if product is None or product.is_small or (configured == "fp32" and not has_bf16(device)):
        return ""
    other = "fp32" if configured != "fp32" else "bf16"
    gain = measure_gain(product, device, configured if configured != "fp32" else other)
    slowdown = 1 / gain if configured != "fp32" else gain
    if slowdown < MIN_GAIN:
        return ""
    return (
        f'warning: precision.compute = "{configured}" is slow here: a matrix product of {product} takes'
        f' {slowdown:.1f} times as long as in {other}. With "auto" the faster one is chosen.'
    )


def _choose_on_all_ranks(
    recipe: Recipe, product: MatrixProduct | None, cluster: Cluster, device: torch.device
) -> PrecisionChoice:
    if recipe.reproducible:
        # A measurement may come out differently the next time, and the bits with it.
        return PrecisionChoice("fp32", "reproducible = true, so nothing is measured")
    world = Mesh.build(cluster, {"replica": cluster.world_size}).world
    local = json.dumps(asdict(find_gain(product, device)))
    texts = all_gather_texts(local, world, Net(recipe.runtime.deadline_seconds))
    return choose_precision([PrecisionGain(**json.loads(text)) for text in texts])


def choose_precision(gains: Sequence[PrecisionGain]) -> PrecisionChoice:
    """Choose bf16 if it is faster on every rank; pure.

    Args:
        gains: by rank.
    """
    slowest = min(range(len(gains)), key=lambda rank: (gains[rank].gain, not gains[rank].why_not))
    least = gains[slowest]
    same_on_all = len(gains) == 1 or (least.why_not and all(gain.why_not == least.why_not for gain in gains))
    where = "" if same_on_all else f" on rank {slowest}"
    if least.why_not:
        return PrecisionChoice("fp32", least.why_not + where)
    measured = f"{least.gain:.1f} times as fast as fp32 for a matrix product of {least.product}{where}"
    if least.gain >= MIN_GAIN:
        return PrecisionChoice("bf16", measured)
    return PrecisionChoice("fp32", f"bf16 is only {measured}")


def largest_product(recipe: Recipe, task: Task, num_processes: int = 1) -> MatrixProduct | None:
    """Return the largest matrix product in a micro-batch, by the model's weights; None if there is none.

    Embeddings are looked up and not multiplied. The rows of a convolution are counted as if it were
    applied at one position, so that a small one is never taken for a large one.
    """
    samples = -(-recipe.batch.size // num_micro_batches(recipe, num_processes))
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
    """Measure on this rank how much faster bf16 is than fp32 for a product and its gradients."""
    if product is None:
        return PrecisionGain("", why_not="the model has no matrix products")
    if product.is_small:
        reason = "matrix products are too small for bf16 to be faster"
        return PrecisionGain(str(product), why_not=reason)
    if not has_bf16(device):
        processor = "CPU" if device.type == "cpu" else "GPU"
        return PrecisionGain(str(product), why_not=f"the {processor} has no bf16 instructions")
    return PrecisionGain(str(product), measure_gain(product, device, "bf16"))


def has_bf16(device: torch.device, cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the device has bf16 instructions; true if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not flags or not _BF16_FLAGS.isdisjoint(flags.partition(":")[2].split())


def measure_gain(product: MatrixProduct, device: torch.device, compute: str) -> float:
    """Return seconds in fp32 over seconds in `compute`, of a product and its gradients.

    Weights are kept in fp32, as in training.
    """
    run = _product_runner(product, device)
    formats = [MixedPrecision("fp32", device.type), MixedPrecision(compute, device.type)]
    return _speedup(lambda: run(formats[0]), lambda: run(formats[1]))


def _optimizer_step(recipe: OptimizerRecipe, size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that updates `size` values once."""
    values = nn.ParameterList([torch.zeros(size // 64, 64, device=device)])
    optimizer = build_optimizer(values, recipe, fused_allowed=True)
    values[0].grad = torch.ones_like(values[0])

    def step() -> None:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _product_runner(product: MatrixProduct, device: torch.device) -> Callable[[MixedPrecision], None]:
    """Return a function that computes the product and its gradients once, in a given number format."""
    rows, inner, columns = (min(side, _LARGEST_SIDE) for side in product)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator).to(device).requires_grad_()
    weight = torch.randn(columns, inner, generator=generator).to(device).requires_grad_()

    def run(precision: MixedPrecision) -> None:
        with precision.autocast():
            # Gradients are part of it: backward has two products of the same size for each
            # one of forward.
            y = F.linear(x, weight)
        torch.autograd.grad(y.float().sum(), [x, weight])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _speedup(
    first: Callable[[], None],
    second: Callable[[], None],
    summarize: Callable[[Sequence[float]], float] = min,
) -> float:
    """Return the seconds of `first` over the seconds of `second`.

    Args:
        summarize: the least of some times is that of an idle machine, the median that of this machine as it
            is.
    """
    functions, times = (first, second), (list[float](), list[float]())
    for function in functions:
        function()  # not counted: the first call chooses kernels and allocates
    end = time.perf_counter() + _PROBE_SECONDS
    # In turns, so that a change of the clock rate or another process slows both.
    while len(times[0]) < 2 or (len(times[0]) < _MOST_REPEATS and time.perf_counter() < end):
        for seconds, function in zip(times, functions, strict=True):
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
    return summarize(times[0]) / summarize(times[1])
