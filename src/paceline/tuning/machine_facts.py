"""The facts of this machine that decide how fast it trains, and which slow paths are in use.

Invariant: nothing is measured here, and nothing fails because a file of the system is missing: an unknown
fact is absent. `find_slow_paths` is pure, so that a file of another machine can be judged as well.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline._version import VERSION
from paceline.job.cpu_count import find_cores
from paceline.report.number_format import format_bytes, format_duration, format_number
from paceline.tuning.hardware_defaults import has_bf16

_SYS, _PROC = Path("/sys"), Path("/proc")
_CPU = _SYS / "devices/system/cpu"
_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_FORMATS = {
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "int8": {"avx_vnni", "avx512_vnni", "amx_int8", "i8mm", "asimddp"},
}
_PACKAGES = ("numpy", "triton", "psutil", "transformers", "safetensors", "zstandard", "grpcio")

_SLOW_WRITE_BYTES = 100e6
_SLOW_SYNC_SECONDS = 0.05
_SMALL_SHM_BYTES = 1 << 30
_SMALL_SPEEDUP = 0.6  # of cores, below which threads are said to be in each other's way


def describe_machine(folder: Path) -> dict[str, Any]:
    """Return the facts of this machine by group, as plain values for JSON.

    Args:
        folder: an existing folder on the disk that runs are written to.
    """
    features = _cpu_features()
    return {
        "cpu": _describe_cpu(features),
        "caches": _describe_caches(),
        "memory": _describe_memory(),
        "numa": {
            node.name.removeprefix("node"): _read(node / "cpulist")
            for node in sorted((_SYS / "devices/system/node").glob("node[0-9]*"))
        },
        "disk": {
            "file_system": _file_system(folder.resolve()),
            "free_bytes": shutil.disk_usage(folder).free,
        },
        "network": {
            link.name: {"mbit_per_second": _number(link / "speed"), "mtu": _number(link / "mtu")}
            for link in sorted((_SYS / "class/net").glob("*"))
        },
        "has_nvidia_driver": (_PROC / "driver/nvidia/version").exists(),
        "gpus": [_describe_gpu(index) for index in range(torch.cuda.device_count())],
        "libraries": _describe_libraries(),
        "number_formats": _describe_formats(features),
        "kernels": _describe_kernels(),
    }


def find_slow_paths(facts: Mapping[str, Any], measured: Mapping[str, float]) -> list[str]:
    """Return what makes this machine slower than it has to be, a sentence each with what to do; pure.

    Args:
        facts: of `describe_machine`.
        measured: values by name of `machine_benchmark.measure_machine`; a name may be missing.
    """
    return [
        *_slow_cpu(facts["cpu"], measured),
        *_slow_formats(facts, measured),
        *_slow_storage(facts, measured),
    ]


def _slow_cpu(cpu: Mapping[str, Any], measured: Mapping[str, float]) -> Iterator[str]:
    cores, threads = cpu["usable_cores"], cpu["threads"]
    if cores < cpu["machine_cores"]:
        yield (
            f"{cores} of {cpu['machine_cores']} cores can be used: {cpu['why']}. Raise the limit of the"
            " container or of the batch job if the others are free."
        )
    if cpu["throttled_periods"]:
        yield (
            f"the cgroup was stopped in {cpu['throttled_periods']} periods because its CPU quota was used up."
            " Use no more threads than the quota has cores."
        )
    if threads < cores:
        yield f"PyTorch uses {threads} of {cores} cores. Remove OMP_NUM_THREADS, or set runtime.threads = 0."
    alone, together = measured.get("matmul.cpu.fp32.one_thread"), measured.get("matmul.cpu.fp32")
    if threads > 1 and alone and together and together < _SMALL_SPEEDUP * threads * alone:
        yield (
            f"{threads} threads are {together / alone:.2g} times as fast as one for a matrix product: other"
            " programs use these cores, or the memory limits them."
        )
    if cpu["load"] > cores:
        yield (
            f"the load average is {cpu['load']:.1f} on {cores} cores: other programs run, so that all times"
            " are longer. Measure again on an idle machine."
        )
    if cpu["governor"] == "powersave":
        yield (
            "the frequency governor is powersave. `cpupower frequency-set -g performance` raises the clock"
            " rate."
        )


def _slow_formats(facts: Mapping[str, Any], measured: Mapping[str, float]) -> Iterator[str]:
    cpu, libraries = facts["cpu"], facts["libraries"]
    fp32, bf16 = measured.get("matmul.cpu.fp32"), measured.get("matmul.cpu.bf16")
    if not facts["number_formats"]["cpu"]["bf16"]:
        yield (
            "the CPU has no bf16 instructions; a matrix product in bf16 takes"
            f" {format_number(fp32 / bf16, 2)} times as"
            ' long as in fp32. precision.compute = "auto" keeps fp32 here.'
            if fp32 and bf16
            else 'the CPU has no bf16 instructions. precision.compute = "auto" keeps fp32 here.'
        )
    if cpu["architecture"] in ("x86_64", "AMD64") and not libraries["mkl"]:
        yield "PyTorch was built without MKL. Install a wheel of pytorch.org for this processor."
    if not libraries["onednn"]:
        yield "PyTorch was built without oneDNN, so convolutions and bf16 have no fast kernels on the CPU."
    if cpu["kernels"] in ("DEFAULT", "NO AVX"):
        yield "PyTorch uses kernels without AVX2: the processor, or ATEN_CPU_CAPABILITY, allows no others."
    if facts["has_nvidia_driver"] and not facts["gpus"]:
        yield (
            "an NVIDIA driver is loaded, but PyTorch uses no GPU. Install a CUDA wheel of PyTorch, or check"
            " CUDA_VISIBLE_DEVICES."
        )


def _slow_storage(facts: Mapping[str, Any], measured: Mapping[str, float]) -> Iterator[str]:
    memory = facts["memory"]
    if memory["huge_pages"] == "never":
        yield (
            "transparent huge pages are off. `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
            " makes large buffers cheaper to reach."
        )
    shm = memory["shm_bytes"]
    if shm is not None and shm < _SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has {format_bytes(shm)}: data loaders and ranks of one host share memory there."
            " Start the container with --shm-size=8g or --ipc=host."
        )
    write, sync = measured.get("disk.write"), measured.get("disk.sync")
    if write is not None and write * 1e9 < _SLOW_WRITE_BYTES:
        yield (
            f"the disk of the run folder writes {format_bytes(write * 1e9, decimal=True)} a second. Put"
            " run_dir on a faster one, or save less often (checkpoint.every_steps)."
        )
    if sync is not None and sync / 1e6 > _SLOW_SYNC_SECONDS:
        yield (
            f"the disk of the run folder takes {format_duration(sync / 1e6)} to sync 4 KiB, as network disks"
            " do. Put run_dir on a local disk."
        )


def _describe_cpu(features: Sequence[str]) -> dict[str, Any]:
    cores = find_cores()
    return {
        "model": _cpuinfo("model name") or platform.processor() or "unknown",
        "architecture": platform.machine(),
        "machine_cores": os.cpu_count() or 1,
        "usable_cores": cores.number,
        "why": cores.reason,
        "threads_per_core": len(_expand(_read(_CPU / "cpu0/topology/thread_siblings_list"))) or 1,
        "throttled_periods": _throttled_periods(),
        "features": list(features),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "governor": _read(_CPU / "cpu0/cpufreq/scaling_governor"),
        "is_virtual": "hypervisor" in _cpuinfo("flags").split(),
        "load": os.getloadavg()[0],
    }


def _describe_caches() -> dict[str, str]:
    """Return the size of each cache and the cores that share it, of the first core."""
    caches = {}
    for cache in sorted((_CPU / "cpu0/cache").glob("index[0-9]*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(cache / "type"), "")
        shared = _read(cache / "shared_cpu_list")
        caches[f"L{_read(cache / 'level')}{kind}"] = f"{_read(cache / 'size')} for cores {shared}"
    return caches


def _describe_memory() -> dict[str, Any]:
    lines = (line.split() for line in _read(_PROC / "meminfo").splitlines())
    sizes = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) > 2}
    limits = (
        _number(path)
        for path in (_SYS / "fs/cgroup/memory.max", _SYS / "fs/cgroup/memory/memory.limit_in_bytes")
    )
    total = sizes.get("MemTotal", 0)
    shm = Path("/dev/shm")
    return {
        "total_bytes": total,
        "available_bytes": sizes.get("MemAvailable", 0),
        "limit_bytes": next((limit for limit in limits if limit is not None and limit < total), None),
        "huge_pages": _chosen(_read(_SYS / "kernel/mm/transparent_hugepage/enabled")),
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
    }


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "bf16": capability >= (8, 0),
        "tf32": capability >= (8, 0),
        "fp8": capability >= (8, 9),
    }


def _describe_libraries() -> dict[str, Any]:
    config = torch.__config__.show()
    blas = next((word.strip(" ,") for word in config.split() if word.startswith("BLAS_INFO=")), "")
    distributed = torch.distributed
    available = distributed.is_available()
    return {
        "paceline": VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        **{name: text for name in _PACKAGES if (text := _version(name))},
        "blas": blas.partition("=")[2] or "unknown",
        "mkl": _config_line(config, "Math Kernel Library"),
        "onednn": _config_line(config, "MKL-DNN") if torch.backends.mkldnn.is_available() else "",
        "openmp": _config_line(config, "OpenMP"),
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        "gloo": available and distributed.is_gloo_available(),
        "mpi": f"mpi4py {version}" if (version := _version("mpi4py")) else "",
    }


def _describe_formats(features: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return whether processors have instructions for a number format; without, it is emulated."""
    cpu = {"bf16": has_bf16(torch.device("cpu"))}
    cpu |= {name: not flags.isdisjoint(features) for name, flags in _FORMATS.items()}
    formats = {"cpu": cpu}
    for index in range(torch.cuda.device_count()):
        gpu = _describe_gpu(index)
        formats[f"gpu{index}"] = {name: gpu[name] for name in ("bf16", "tf32", "fp8")}
    return formats


def _describe_kernels() -> dict[str, bool]:
    """Return which fused kernels run here, by trying each once."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {f"{name} ({device})": _runs(run, device) for device in devices for name, run in _KERNELS.items()}


def _fused_optimizer(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


def _flash_attention(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    query = torch.ones(1, 2, 16, 32, device=device, dtype=dtype)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


_KERNELS: Mapping[str, Callable[[str], None]] = {
    "fused AdamW": _fused_optimizer,
    "flash attention": _flash_attention,
}


def _runs(kernel: Callable[[str], None], device: str) -> bool:
    try:
        kernel(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _cpu_features() -> list[str]:
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in _FEATURES if name in flags]


def _cpuinfo(name: str) -> str:
    lines = _read(_PROC / "cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.split("\t")[0].strip() == name), "")


def _throttled_periods() -> int:
    for path in (_SYS / "fs/cgroup/cpu.stat", _SYS / "fs/cgroup/cpu/cpu.stat"):
        for line in _read(path).splitlines():
            if line.startswith("nr_throttled "):
                return int(line.split()[1])
    return 0


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on."""
    mounts = [line.split() for line in _read(_PROC / "mounts").splitlines()]
    found = [words for words in mounts if len(words) > 2 and folder.is_relative_to(words[1])]
    return max(found, key=lambda words: len(words[1]), default=["", "", "unknown"])[2]


def _config_line(config: str, word: str) -> str:
    """Return the line of PyTorch's build settings about a library; empty if there is none."""
    lines = (
        line.strip(" -") for line in config.splitlines() if word in line and "Build settings" not in line
    )
    return next(lines, "").partition(" (Git")[0]


def _chosen(text: str) -> str:
    """Return the word in brackets, as in "always [madvise] never"; empty if there is none."""
    return text.partition("[")[2].partition("]")[0]


def _expand(ranges: str) -> list[int]:
    """Return the numbers of a list such as "0-1,4"."""
    numbers: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        number = int(_read(path))
        return number if number >= 0 else None  # -1: the speed of a link is not known
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace").strip()
    return ""


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return ""
