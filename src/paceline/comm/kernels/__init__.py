"""Coding in one pass over memory, by a C compiler where there is one.

A codec is given kernels, or None: then PyTorch's own operations write the same bytes, in more time. Whether a
rank has a compiler changes nothing that it sends (tests/contract/test_kernels.py).
"""

from paceline.comm.kernels.compiled import Kernels, find_kernels, load_kernels

__all__ = ["Kernels", "find_kernels", "load_kernels"]
