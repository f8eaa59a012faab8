"""The functions of `kernels.c`: compiled at first use, kept in the cache folder, called through ctypes.

The file is named by a hash of source, flags, compiler and processor, and by a hash of its own bytes.
Invariant: a file whose bytes are not those it was written with is never loaded, and neither is one in a
folder that others may write to, or may put another one in place of. A call holds no lock of Python, so it
runs beside the training.
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

_SOURCE = Path(__file__).with_name("kernels.c")
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
    """The compiled functions; all tensors are contiguous, on the processor, and values float32.

    Args:
        file: the shared object.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)  # kept by the library, unlike library[name]
            function.argtypes, function.restype = arguments, None
        self._library = library

    def take(self, *tensors: Tensor) -> bool:
        """Whether these functions may be called with such rows of values."""
        return all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)

    def top(self, x: Tensor, out: Tensor) -> None:
        """The largest magnitude of each row of `x` [rows, n], in `out` [rows, 1]."""
        for row, found in zip(x, out, strict=True):
            self._library.paceline_top(row.data_ptr(), row.numel(), found.data_ptr())

    def bf16_encode(self, x: Tensor, out: Tensor) -> bool:
        """`x` rounded to bfloat16 `out`; false: something in it is not finite, and `out` may be anything."""
        odd = ctypes.c_int32()
        self._library.paceline_bf16_encode(x.data_ptr(), x.numel(), out.data_ptr(), ctypes.byref(odd))
        return not odd.value

    def fp16_encode(self, x: Tensor, scale: Tensor, out: Tensor) -> None:
        """`x` [n] divided by `scale` [1], a power of two from 2**-126 to 2**126, as float16 `out` [n]."""
        self._library.paceline_fp16_encode(x.data_ptr(), x.numel(), float(scale), out.data_ptr())

    def scaled_encode(self, x: Tensor, bits: int, out: Tensor, scales: Tensor) -> None:
        """`x` [n] as packed codes in `out`, uint8 [ceil(n bits / 8)], with `scales` [ceil(n / 256)]."""
        self._library.paceline_scaled_encode(x.data_ptr(), x.numel(), bits, out.data_ptr(), scales.data_ptr())

    def scaled_draw(self, x: Tensor, bits: int, out: Tensor, scales: Tensor, key: int, row: int) -> None:
        """The same, rounded up or down at random, by the numbers of `codecs.philox`."""
        self._library.paceline_scaled_draw(
            x.data_ptr(), x.numel(), bits, out.data_ptr(), scales.data_ptr(), key, row
        )

    def scaled_decode(self, payload: Tensor, bits: int, scales: Tensor, out: Tensor) -> None:
        """The inverse, into `out` [n]."""
        self._library.paceline_scaled_decode(
            payload.data_ptr(), out.numel(), bits, scales.data_ptr(), out.data_ptr()
        )

    def fixed_encode(self, x: Tensor, bits: int, top: Tensor, out: Tensor) -> None:
        """Steps of `x` [n], relative to `top` [1], as packed codes of so many bits, 3 to 16, in `out`."""
        self._library.paceline_fixed_encode(x.data_ptr(), x.numel(), bits, float(top), out.data_ptr())

    def fixed_decode(self, payload: Tensor, bits: int, top: Tensor, out: Tensor) -> None:
        """The inverse, into `out` [n]."""
        self._library.paceline_fixed_decode(payload.data_ptr(), out.numel(), bits, float(top), out.data_ptr())

    def sign_encode(self, x: Tensor, out: Tensor, sums: Tensor) -> None:
        """Signs of `x` [n] in `out`, uint8 [ceil(n / 8)], and `sums` of magnitudes, [ceil(n / 1024)]."""
        self._library.paceline_sign_encode(x.data_ptr(), x.numel(), out.data_ptr(), sums.data_ptr())

    def sign_decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Signs times `scales` [ceil(n / 1024)], into `out` [n]."""
        self._library.paceline_sign_decode(payload.data_ptr(), out.numel(), scales.data_ptr(), out.data_ptr())

    def largest(
        self, x: Tensor, kept: int, places: Tensor, values: Tensor, sample: Tensor, wanted: int
    ) -> None:
        """The places of the `kept` largest magnitudes of `x` [n], in the first of `places`, int64 [room].

        Args:
            values: [room], for what may be among them; at least `kept` have room.
            sample: some values of `x`, or none; its `wanted`-th largest magnitude is a size that at least
                `kept` are likely to reach, and at most `room`.
        """
        self._library.paceline_largest(
            x.data_ptr(),
            x.numel(),
            kept,
            places.data_ptr(),
            values.data_ptr(),
            values.numel(),
            sample.data_ptr(),
            sample.numel(),
            wanted,
        )


def load_kernels(folder: Path | None = None, compiler: str = "cc") -> CodecKernels | None:
    """The kernels, compiled before or now; None: see `find_kernels`."""
    found = find_kernels(folder, compiler)
    return found if isinstance(found, CodecKernels) else None


def find_kernels(folder: Path | None = None, compiler: str = "cc") -> CodecKernels | str:
    """The kernels, compiled before or now; or why there are none.

    Args:
        folder: where they are kept; the cache folder of this user if None.
    """
    found = shutil.which(compiler)
    if found is None:
        return f"there is no C compiler ({compiler})"
    if sys.byteorder != "little":
        return "this processor is not little-endian"
    place = folder or cache_folder() / "kernels"
    try:
        place.mkdir(0o700, parents=True, exist_ok=True)  # whatever the umask lets others do
        file = _find_compiled(place, _cache_key(found)) or _compile(place, _cache_key(found), found)
        return f"{found} does not compile them" if file is None else CodecKernels(file)
    except OSError as error:  # a folder that cannot be written to, or a file that the loader does not take
        return str(error)


def _cache_key(compiler: str) -> str:
    """Of what the machine code depends on."""
    resolved = Path(compiler).resolve()
    parts = [_SOURCE.read_text(encoding="utf-8"), *_FLAGS, str(resolved), str(resolved.stat().st_mtime_ns)]
    return hashlib.sha256("\0".join([*parts, *_cpu_description()]).encode()).hexdigest()[:16]


def _cpu_description() -> list[str]:
    """What says which instructions it has."""
    file = Path("/proc/cpuinfo")
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    lines = {line for line in known if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return [platform.system(), platform.machine(), *sorted(lines)]


def _find_compiled(folder: Path, key: str) -> Path | None:
    """A file that was compiled before, whole; what is damaged is removed."""
    about, above = folder.stat(), folder.parent.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022 or above.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{folder} is not this user's alone")  # who owns what is above can swap it
    for file in folder.glob(f"{key}-*.so"):
        if file.name == _library_name(key, file.read_bytes()):
            return file
        file.unlink(missing_ok=True)
    return None


def _compile(folder: Path, key: str, compiler: str) -> Path | None:
    """Compile, and give the file its name at once; None: the compiler refuses."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        out = Path(made) / "kernels.so"
        command = [compiler, *_FLAGS, "-fPIC", "-shared", "-o", str(out), str(_SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        except subprocess.SubprocessError:
            return None
        file = folder / _library_name(key, out.read_bytes())
        out.replace(file)
    return file


def _library_name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}.so"
