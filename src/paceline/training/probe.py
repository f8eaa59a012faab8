"""How fast this machine is, one way and another, at a product or an update, in a tenth of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from paceline.layout import Precision
from paceline.optim import build_optimizer
from paceline.recipe import OptimizerRecipe

SMALLEST_PRODUCT = 2**24
"""Multiplications below which the time of a product is not that of its arithmetic."""
GAIN = 1.2
"""One way has to be this many times as fast as another to be chosen, or the other this slow to be told."""
_LARGEST_SIDE = 512
_FEWEST_VALUES, _MOST_VALUES = 2**16, 2**20
_PROBE_SECONDS = 0.1
_MOST_REPEATS = 9


class Product(NamedTuple):
    """The largest product of a model's forward: rows x inner times inner x columns."""

    rows: int
    inner: int
    columns: int

    @property
    def is_small(self) -> bool:
        return self.rows * self.inner * self.columns < SMALLEST_PRODUCT

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


def measure_gain(product: Product, device: torch.device, compute: str) -> float:
    """Seconds in fp32 over seconds in `compute`, of a product and its gradients; weights are kept in fp32."""
    run = _product_of(product, device)
    formats = [Precision("fp32", device.type), Precision(compute, device.type)]
    return _times_as_fast(lambda: run(formats[0]), lambda: run(formats[1]))


def few_threads(threads: int, share: int, product: Product | None, device: torch.device) -> str:
    """By how much fewer threads than this process's share of the cores are slow here; empty if they are not.

    Args:
        threads: that the recipe asks for; 0: it does not.
    """
    if not 0 < threads < share or product is None or product.is_small or device.type != "cpu":
        return ""
    run, before = _product_of(product, device), torch.get_num_threads()

    def on(number: int) -> None:
        torch.set_num_threads(number)
        run(Precision("fp32", device.type))

    try:
        times = _times_as_fast(lambda: on(threads), lambda: on(share))
    finally:
        torch.set_num_threads(before)
    if times < GAIN:
        return ""
    return (
        f"runtime.threads = {threads} is slow here: a product of {product} takes {times:.1f} times as long as"
        f" on {share} threads; 0 shares the cores"
    )


def slow_updates(recipe: OptimizerRecipe, num_values: int, device: torch.device) -> str:
    """By how much updates without a fused kernel are slow here; empty if they are not, or too small to tell.

    Args:
        recipe: with fused = false.
        num_values: of this rank's parameters.
    """
    size = min(num_values, _MOST_VALUES)
    if size < _FEWEST_VALUES:
        return ""
    optimizers = [_stepping(recipe.replace(fused=fused), size, device) for fused in (False, True)]
    times = _times_as_fast(*optimizers)
    if times < GAIN:
        return ""
    return (
        f"optimizer.fused = false is slow here: an update of {size:,} values takes {times:.1f} times as long"
        " as in a fused kernel"
    )


def _stepping(recipe: OptimizerRecipe, size: int, device: torch.device) -> Callable[[], None]:
    """Updates that many values once."""
    values = nn.ParameterList([torch.zeros(size // 64, 64, device=device)])
    optimizer = build_optimizer(values, recipe, fused_allowed=True)
    values[0].grad = torch.ones_like(values[0])

    def step() -> None:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _product_of(product: Product, device: torch.device) -> Callable[[Precision], None]:
    """Computes the product and its gradients once, in some number format."""
    rows, inner, columns = (min(side, _LARGEST_SIDE) for side in product)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator).to(device).requires_grad_()
    weight = torch.randn(columns, inner, generator=generator).to(device).requires_grad_()

    def run(precision: Precision) -> None:
        with precision.autocast():
            y = F.linear(x, weight)
        torch.autograd.grad(y.float().sum(), [x, weight])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _times_as_fast(first: Callable[[], None], second: Callable[[], None]) -> float:
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
