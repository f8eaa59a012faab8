"""Random numbers of a micro-batch: seeded from its key, and carried from chunk to chunk of a pipeline.

Invariant: everything random in a micro-batch follows from its key, so it does not depend on the rank, the
number of ranks or the order of micro-batches. What is drawn from PyTorch's global generator continues from
chunk to chunk: a chunk that draws sends the state of its generator to the next one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.models.dropout import KeyedDropout


def seed_micro_batch(
    key: int, device: torch.device | None, dropouts: Iterable[KeyedDropout], *, everything: bool = False
) -> None:
    """Seed PyTorch's global generators for a micro-batch and pass its key to keyed dropout.

    Args:
        device: device of the generators; None leaves them alone, because other threads share them.
        everything: seed Python's and NumPy's generators, too, which the model or its loss may use; takes
            about 20 microseconds.
    """
    if device is not None:
        # Not torch.manual_seed, which also seeds the generators of all other devices.
        torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(key)
    if everything:
        random.seed(key)
        # NumPy takes 32-bit seeds only.
        np.random.seed(key % 2**32)
    for dropout in dropouts:
        dropout.take_key(key)


def append_rng_state(
    tensors: Sequence[Tensor], fresh: Tensor | None, device: torch.device
) -> tuple[Sequence[Tensor], float]:
    """Append the state of the global generator to the outputs of a chunk that has drawn from it.

    Args:
        fresh: state of the generator before the chunk; None if it is not tracked.
    Returns:
        The tensors to send, and 1.0 if the state is the last of them, else 0.0.
    """
    state = torch.default_generator.get_state() if fresh is not None else None
    if state is None or fresh is None or torch.equal(state, fresh):
        return tensors, 0.0
    return [*tensors, state.to(device)], 1.0


def require_unchanged_rng(earlier_state: Tensor | None) -> None:
    """Require that the forward of a part of a micro-batch has not used the global generator.

    Numbers drawn for a part differ from those drawn for the same samples in the whole micro-batch.

    Args:
        earlier_state: state of the generator before the forward; None if it is not tracked.
    Raises:
        TaskError: the generator has advanced since.
    """
    if earlier_state is not None and not torch.equal(
        torch.default_generator.get_state(), earlier_state.cpu()
    ):
        raise TaskError(
            "the forward draws from PyTorch's global generator, as nn.Dropout does, and a part of a"
            " micro-batch would draw other numbers than the whole",
            next_step="use paceline.models.KeyedDropout, or set 1 in rechunk for that stage",
        )


def dropout_noise(x: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Draw the factors of PyTorch's dropout for a whole tensor of which a rank has a part.

    Args:
        x: the part; its memory order is that of the whole tensor.
        shape: of the whole tensor.
        p: probability that a value is dropped.
    Returns:
        0 or 1 / (1 - p) for each value of the whole tensor, with the dtype and device of x.
    Exactness: the generator advances, and the values are drawn, as by `torch.nn.functional.dropout` of the
        whole tensor.
    """
    return F.dropout(_ones_in_memory_order(x, shape), p, True).detach()


def _ones_in_memory_order(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ones with the memory order of x, in which PyTorch draws masks."""
    strides = list(x.stride())
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    permuted = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    inverse = tuple(order.index(dim) for dim in range(x.dim()))
    return permuted.permute(inverse).requires_grad_(x.requires_grad and x.is_floating_point())
