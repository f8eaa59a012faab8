"""Memory without a name that ranks of one host have mapped: it is gone when the last of them is."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from torch import Tensor

from paceline.errors import CommunicationError


def reserve(num_bytes: int, name: str) -> int:
    """An open file of so many zeroed bytes, which nobody else has; the caller closes it.

    Args:
        name: seen among the open files and maps of a process, and nowhere else.
    Raises:
        CommunicationError: the machine has no such memory left.
    """
    with ExitStack() as cleanup:
        try:
            file = os.memfd_create(name)
            cleanup.callback(os.close, file)
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise CommunicationError(
                f"there are no {num_bytes} bytes of shared memory: {error}",
                next_step="free memory, or choose route=native",
            ) from error
        cleanup.pop_all()
    return file


def mapped(file: int, num_values: int, dtype: torch.dtype) -> Tensor:
    """The memory of an open file as a tensor [n]; the file need not stay open."""
    path = f"/proc/self/fd/{file}"
    return torch.from_file(path, shared=True, size=max(1, num_values), dtype=dtype)[:num_values]
