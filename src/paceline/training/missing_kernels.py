"""Says that ranks have no compiled kernels, where the codec has some."""

from __future__ import annotations

from paceline.comm.kernels import Kernels, find_kernels
from paceline.comm.text import gather_texts
from paceline.training.arrange import Setting

_COMPILED = {"bf16", "fp16", "int8", "int4", "int2", "fixed", "sign", "topk", "dgc"}


def say_missing_kernels(setting: Setting) -> None:
    """One line for all ranks, with what it costs; collective, where several ranks code on processors."""
    world, strategy = setting.mesh.world, setting.recipe.strategy
    words = {spec.word for spec, _ in strategy.links}
    if world.size == 1 or setting.device.type != "cpu" or not words & _COMPILED:
        return
    found = find_kernels()
    said = gather_texts("" if isinstance(found, Kernels) else found, world, setting.net)
    without = [rank for rank, why in enumerate(said) if why]
    if without:
        setting.warn(
            f"codec={strategy.codec} has no compiled kernels on ranks {without}, as {said[without[0]]}:"
            " PyTorch's operations write the same bytes in 4 to 8 times the time (`benchmarks.coding`)"
        )
