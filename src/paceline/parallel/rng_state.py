"""Random numbers of a micro-batch: seeded from its key, and carried from chunk to chunk of a pipeline.

Invariant: everything random in a micro-batch follows from its key, so it does not depend on the rank, the
number of ranks or the order of micro-batches. That holds for the global generators of PyTorch, Python and
NumPy. What is drawn from them continues from chunk to chunk: a chunk that draws sends their states to the
next one.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from paceline.errors import TaskError
from paceline.models.dropout import KeyedDropout

_NUM_PYTHON_WORDS, _NUM_NUMPY_WORDS = 625, 624
# Words of Python's and NumPy's Mersenne twisters, then for each the normal number drawn in advance.
_OTHER_STATES = struct.Struct(f"<{_NUM_PYTHON_WORDS}I?d{_NUM_NUMPY_WORDS}Iq?d")


def seed_micro_batch(key: int, device: torch.device | None, dropouts: Iterable[KeyedDropout]) -> None:
    """Seed the global generators of PyTorch, Python and NumPy, and pass the key to keyed dropout.

    Args:
        key: of the micro-batch.
        device: device of PyTorch's generator; None leaves all global generators alone, because other threads
            share them.
    """
    if device is not None:
        # Not torch.manual_seed, which also seeds the generators of all other devices.
        torch.default_generator.manual_seed(key)
        random.seed(key)
        # NumPy takes 32-bit seeds only.
        np.random.seed(key % 2**32)
        if device.type == "cuda":
            torch.cuda.manual_seed(key)
    for dropout in dropouts:
        dropout.take_key(key)


@dataclass(frozen=True)
class RngStates:
    """States of the global generators of one process.

    Args:
        torch_cpu: of PyTorch's generator of the CPU, uint8 [5056].
        python: as `random.getstate` returns it.
        numpy: as `numpy.random.get_state` returns it.
    """

    torch_cpu: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def current(cls) -> RngStates:
        """Return copies of the present states."""
        return cls(torch.default_generator.get_state(), random.getstate(), _numpy_state())

    def restore(self) -> None:
        """Continue all generators from these states."""
        torch.default_generator.set_state(self.torch_cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def advanced(self, earlier: RngStates) -> list[str]:
        """Return the names of the generators that have been used since `earlier`."""
        used = {
            "torch": not torch.equal(self.torch_cpu, earlier.torch_cpu),
            "random": self.python != earlier.python,
            "numpy.random": _numpy_words(self.numpy) != _numpy_words(earlier.numpy),
        }
        return [name for name, is_used in used.items() if is_used]

    def to_bytes(self) -> Tensor:
        """Return the states as one tensor, uint8 [n], for a message."""
        _, python_words, python_normal = self.python
        packed = _OTHER_STATES.pack(
            *python_words,
            python_normal is not None,
            python_normal or 0.0,
            *self.numpy[1].tolist(),
            *self.numpy[2:],
        )
        return torch.cat([torch.frombuffer(bytearray(packed), dtype=torch.uint8), self.torch_cpu])

    @classmethod
    def from_bytes(cls, message: Tensor) -> RngStates:
        """Return the states that `to_bytes` has packed."""
        packed = message.cpu()
        words = _OTHER_STATES.unpack(packed[: _OTHER_STATES.size].numpy().tobytes())
        python_words, rest = words[:_NUM_PYTHON_WORDS], words[_NUM_PYTHON_WORDS:]
        has_normal, normal, rest = rest[0], rest[1], rest[2:]
        numpy_words, rest = rest[:_NUM_NUMPY_WORDS], rest[_NUM_NUMPY_WORDS:]
        return cls(
            packed[_OTHER_STATES.size :].clone(),
            (random.Random.VERSION, python_words, normal if has_normal else None),
            ("MT19937", np.array(numpy_words, dtype=np.uint32), *rest),
        )


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of NumPy's global generator, as `numpy.random.get_state` does.

    That function takes 150 microseconds. A generator that has drawn nothing since it was seeded has no normal
    number in advance, so that the words of its twister are all of its state, which takes 1 microsecond.
    """
    address = mtrand.get_bit_generator().ctypes.state_address
    words: Any = np.frombuffer(ctypes.string_at(address, 4 * _NUM_NUMPY_WORDS + 4), dtype=np.uint32)
    if words[-1] == _NUM_NUMPY_WORDS:
        return "MT19937", words[:-1], _NUM_NUMPY_WORDS, 0, 0.0
    state: Any = np.random.get_state()
    return tuple(state)


def _numpy_words(state: tuple[Any, ...]) -> tuple[Any, ...]:
    return state[1].tobytes(), *state[2:]


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the states of the global generators, also those of GPUs, after the block."""
    before = RngStates.current()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            before.restore()


def append_rng_state(
    tensors: Sequence[Tensor], fresh: RngStates | None, device: torch.device
) -> tuple[Sequence[Tensor], float]:
    """Append the states of the global generators to the outputs of a chunk that has drawn from one of them.

    Args:
        fresh: states before the chunk; None if they are not tracked.
    Returns:
        The tensors to send, and 1.0 if the states are the last of them, else 0.0.
    """
    states = RngStates.current() if fresh is not None else None
    if states is None or fresh is None or not states.advanced(fresh):
        return tensors, 0.0
    return [*tensors, states.to_bytes().to(device)], 1.0


def require_unchanged_rng(earlier: RngStates | None) -> None:
    """Require that the forward of a part of a micro-batch has not used a global generator.

    Numbers drawn for a part differ from those drawn for the same samples in the whole micro-batch.

    Args:
        earlier: states before the forward; None if they are not tracked.
    Raises:
        TaskError: a generator has advanced since.
    """
    used = RngStates.current().advanced(earlier) if earlier is not None else []
    if used:
        raise TaskError(
            f"the forward draws from {describe_generator(used[0])}, and a part of a micro-batch would draw"
            " other numbers than the whole",
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


def describe_generator(name: str) -> str:
    """Return how an error names a global generator."""
    return (
        "PyTorch's global generator, as nn.Dropout does"
        if name == "torch"
        else f"the global generator of {name}"
    )


class Draw(NamedTuple):
    """One call that has advanced a generator: its function and the shape of its result."""

    function: str
    shape: tuple[int, ...]


class DrawRecorder(TorchFunctionMode):
    """Function mode that records every call that advances the generator of the CPU or of a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.draws = device, list[Draw]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self._state()
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, self._state())):
            first = result[0] if isinstance(result, tuple) and result else result
            shape = tuple(first.shape) if isinstance(first, Tensor) else ()
            self.draws.append(Draw(resolve_name(func) or str(func), shape))
        return result

    def _state(self) -> list[Tensor]:
        # Their methods are no functions of PyTorch, so they are not seen by this mode.
        states = [torch.default_generator.get_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.default_generators[self._device.index or 0].get_state())
        return states
