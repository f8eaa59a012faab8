"""The functions of `kernels.c`: compiled at first use, kept in the cache folder, called through ctypes.

A library is named by a hash of source, flags, compiler and processor, and by a hash of its own bytes.
Invariant: a library whose bytes are not those it was written with is never loaded, and neither is one in a
folder that other users may write to or replace. Calls do not hold the GIL, so they run beside the training.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.observe.process_info import cache_folder

_KERNEL_SOURCE = Path(__file__).with_name("kernels.c")
# No contraction: a fused multiply-add would round differently from PyTorch.
_FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 60.0
_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_ARGUMENTS: dict[str, list[Any]] = {
    "paceline_scaled_encode": [_POINTER, _COUNT, _INT, _POINTER, _POINTER],
    "paceline_scaled_draw": [_POINTER, _COUNT, _INT, _POINTER, _POINTER, ctypes.c_uint64, ctypes.c_uint32],
    "paceline_scaled_decode": [_POINTER, _COUNT, _INT, _POINTER, _POINTER],
    "paceline_top": [_POINTER, _COUNT, _POINTER],
    "paceline_bf16_encode": [_POINTER, _COUNT, _POINTER, _POINTER],
    "paceline_fp16_encode": [_POINTER, _COUNT, ctypes.c_float, _POINTER],
    "paceline_fixed_encode": [_POINTER, _COUNT, _INT, ctypes.c_float, _POINTER],
    "paceline_fixed_decode": [_POINTER, _COUNT, _INT, ctypes.c_float, _POINTER],
    "paceline_sign_encode": [_POINTER, _COUNT, _POINTER, _POINTER],
    "paceline_sign_decode": [_POINTER, _COUNT, _POINTER, _POINTER],
    "paceline_largest": [_POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT],
}


class CodecKernels:
    """The compiled functions; all tensors are contiguous, on the CPU, and values float32.

    Args:
        file: the shared object.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        for name, arguments in _ARGUMENTS.items():
            # `library[name]` would make a new function at every call; an attribute is kept.
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

    def take(self, *tensors: Tensor) -> bool:
        """Return whether the functions accept these tensors: float32, contiguous and on the CPU."""
        return all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)

    def top(self, x: Tensor, out: Tensor) -> None:
        """Write the largest magnitude of each row of `x` [rows, n] into `out` [rows, 1]."""
        for row, maximum in zip(x, out, strict=True):
            self._library.paceline_top(row.data_ptr(), row.numel(), maximum.data_ptr())

    def bf16_encode(self, x: Tensor, out: Tensor) -> bool:
        """Round `x` to bfloat16 `out`; return False if it has values that are not finite, and `out` is
        undefined.
        """
        odd = ctypes.c_int32()
        self._library.paceline_bf16_encode(x.data_ptr(), x.numel(), out.data_ptr(), ctypes.byref(odd))
        return not odd.value

    def fp16_encode(self, x: Tensor, scale: Tensor, out: Tensor) -> None:
        """Divide `x` [n] by `scale` [1], a power of two from 2**-126 to 2**126, and write it as float16 `out`
        [n].
        """
        self._library.paceline_fp16_encode(x.data_ptr(), x.numel(), float(scale), out.data_ptr())

    def scaled_encode(self, x: Tensor, bits: int, out: Tensor, scales: Tensor) -> None:
        """Write `x` [n] as packed codes into `out`, uint8 [ceil(n bits / 8)], and `scales` [ceil(n /
        256)].
        """
        self._library.paceline_scaled_encode(x.data_ptr(), x.numel(), bits, out.data_ptr(), scales.data_ptr())

    def scaled_draw(self, x: Tensor, bits: int, out: Tensor, scales: Tensor, key: int, row: int) -> None:
        """Do the same with stochastic rounding, by the numbers of `codecs.int8_int4_int2.philox_uniform`."""
        self._library.paceline_scaled_draw(
            x.data_ptr(), x.numel(), bits, out.data_ptr(), scales.data_ptr(), key, row
        )

    def scaled_decode(self, payload: Tensor, bits: int, scales: Tensor, out: Tensor) -> None:
        """Decode into `out` [n]."""
        self._library.paceline_scaled_decode(
            payload.data_ptr(), out.numel(), bits, scales.data_ptr(), out.data_ptr()
        )

    def fixed_encode(self, x: Tensor, bits: int, top: Tensor, out: Tensor) -> None:
        """Write `x` [n], relative to `top` [1], as packed codes of `bits` bits, 3 to 16, into `out`."""
        self._library.paceline_fixed_encode(x.data_ptr(), x.numel(), bits, float(top), out.data_ptr())

    def fixed_decode(self, payload: Tensor, bits: int, top: Tensor, out: Tensor) -> None:
        """Decode into `out` [n]."""
        self._library.paceline_fixed_decode(payload.data_ptr(), out.numel(), bits, float(top), out.data_ptr())

    def sign_encode(self, x: Tensor, out: Tensor, sums: Tensor) -> None:
        """Write the signs of `x` [n] into `out`, uint8 [ceil(n / 8)], and `sums` of magnitudes, [ceil(n /
        1024)].
        """
        self._library.paceline_sign_encode(x.data_ptr(), x.numel(), out.data_ptr(), sums.data_ptr())

    def sign_decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write signs times `scales` [ceil(n / 1024)] into `out` [n]."""
        self._library.paceline_sign_decode(payload.data_ptr(), out.numel(), scales.data_ptr(), out.data_ptr())

    def largest(
        self, x: Tensor, num_kept: int, indices: Tensor, values: Tensor, sample: Tensor, wanted: int
    ) -> None:
        """Write the indices of the `kept` largest magnitudes of `x` [n] to the beginning of `places`, int64
        [room].

        Args:
            values: [room], memory for candidates; at least `kept` have room.
            sample: some values of `x`, or none; at least `kept` and at most `room` values of `x` are likely
                to reach its `wanted`-th largest magnitude.
        """
        self._library.paceline_largest(
            x.data_ptr(),
            x.numel(),
            num_kept,
            indices.data_ptr(),
            values.data_ptr(),
            values.numel(),
            sample.data_ptr(),
            sample.numel(),
            wanted,
        )


def load_kernels(folder: Path | None = None, compiler: str = "cc") -> CodecKernels | None:
    """Return the kernels, compiled before or now; None if there are none (`find_kernels` says why)."""
    kernels = find_kernels(folder, compiler)
    return kernels if isinstance(kernels, CodecKernels) else None


def find_kernels(folder: Path | None = None, compiler: str = "cc") -> CodecKernels | str:
    """Return the kernels, compiled before or now; or the reason why there are none.

    Args:
        folder: where they are kept; the cache folder of this user if None.
    """
    compiler_path = shutil.which(compiler)
    if compiler_path is None:
        return f"no C compiler ({compiler}) was found"
    # The kernels write scales and codes in memory order; the wire format is little-endian.
    if sys.byteorder != "little":
        return "this processor is not little-endian"
    cache = folder or cache_folder() / "kernels"
    try:
        # The mode is explicit: the umask may let others write.
        # The mode is explicit: the umask may let others write.
        cache.mkdir(0o700, parents=True, exist_ok=True)
        file = _find_compiled(cache, _cache_key(compiler_path)) or _compile(
            cache, _cache_key(compiler_path), compiler_path
        )
        return f"{compiler_path} does not compile them" if file is None else CodecKernels(file)
    # The folder is not writable, or the loader refuses the file (for example: mounted noexec).
    except OSError as error:
        return str(error)


def _cache_key(compiler: str) -> str:
    """Return a hash of everything that the machine code depends on."""
    resolved = Path(compiler).resolve()
    inputs = [
        _KERNEL_SOURCE.read_text(encoding="utf-8"),
        *_FLAGS,
        str(resolved),
        str(resolved.stat().st_mtime_ns),
    ]
    return hashlib.sha256("\0".join([*inputs, *_cpu_description()]).encode()).hexdigest()[:16]


def _cpu_description() -> list[str]:
    """Return the lines of /proc/cpuinfo that determine the instruction set."""
    file = Path("/proc/cpuinfo")
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    lines = {line for line in known if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return [platform.system(), platform.machine(), *sorted(lines)]


def _find_compiled(folder: Path, key: str) -> Path | None:
    """Return a library that was compiled before; a damaged one is removed."""
    about, above = folder.stat(), folder.parent.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022 or above.st_uid not in (0, os.getuid()):
        # The owner of the folder above can replace this one, so it has to be root or this user.
        raise PermissionError(f"other users can write to {folder} or replace it")
    for file in folder.glob(f"{key}-*.so"):
        if file.name == _library_name(key, file.read_bytes()):
            return file
        # A damaged file would be found again by every later process.
        file.unlink(missing_ok=True)
    return None


def _compile(folder: Path, key: str, compiler: str) -> Path | None:
    """Compile, and rename the library into place; None if the compiler fails."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "kernels.so"
        command = [compiler, *_FLAGS, "-fPIC", "-shared", "-o", str(out), str(_KERNEL_SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        except subprocess.SubprocessError:
            return None
        file = folder / _library_name(key, out.read_bytes())
        # The name contains a hash of the content, so two processes that compile at once do not conflict.
        out.replace(file)
    return file


def _library_name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}.so"
