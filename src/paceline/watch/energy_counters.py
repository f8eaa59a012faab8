"""Energy and GPUs: the counters of RAPL in /sys, and those of NVIDIA's driver through NVML.

Invariant: what cannot be read is absent, with the reason in words; nothing here raises. RAPL measures whole
processors with all that runs on them, and most kernels let only root read it; few virtual machines have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_POWERCAP = Path("/sys/class/powercap")
_WATTS_PER_UNIT = _JOULES_PER_UNIT = 1e-3  # NVML counts in milliwatts and millijoules


class RaplCounters:
    """The energy of processors and their memory, in joules since the first reading.

    Args:
        folder: where the kernel shows its power capping zones.

    Attributes:
        why_none: why there is nothing to read; empty if there is.
    """

    def __init__(self, folder: Path = _POWERCAP) -> None:
        zones = sorted(folder.glob("*-rapl:*"))
        self._zones = {f"{_read(zone / 'name')} {zone.name.partition(':')[2]}": zone for zone in zones}
        self._before: dict[str, int] = {}
        self._joules: dict[str, float] = {}
        self.why_none = "this machine shows no RAPL counters"
        if self._zones:
            readable = bool(self.read())
            self.why_none = "" if readable else "only root may read the RAPL counters"

    def read(self) -> Mapping[str, float]:
        """Return joules by domain, for example "package-0 0" or "dram 0:1"."""
        for name, zone in self._zones.items():
            with suppress(OSError, ValueError):
                now = int((zone / "energy_uj").read_text("ascii"))
                difference = now - self._before.get(name, now)
                if difference < 0:  # the counter has begun again from 0
                    difference += int((zone / "max_energy_range_uj").read_text("ascii"))
                self._before[name] = now
                self._joules[name] = self._joules.get(name, 0.0) + max(0, difference) / 1e6
        return dict(self._joules)


class GpuCounters:
    """The NVIDIA GPUs of this host, through NVML.

    Attributes:
        why_none: why there is nothing to read; empty if there is.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.why_none = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except ImportError:
            self.why_none = "nvidia-ml-py is not installed"
        except pynvml.NVMLError as error:
            self.why_none = f"NVML: {error}"
        else:
            self._nvml = pynvml
            self.why_none = "" if self._handles else "NVML finds no GPU"

    def read(self) -> dict[str, dict[str, float]]:
        """Return values by kind and index of the GPU; energy is in joules since the driver was loaded."""
        values: dict[str, dict[str, float]] = {
            "utilization": {},
            "memory_bytes": {},
            "celsius": {},
            "watts": {},
            "joules": {},
        }
        for index, handle in enumerate(self._handles):
            for kind, read in self._readers(handle).items():
                with suppress(self._nvml.NVMLError):  # not every GPU has every counter
                    values[kind][str(index)] = read()
        return values

    def _readers(self, handle: Any) -> dict[str, Callable[[], float]]:
        nvml = self._nvml
        return {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _WATTS_PER_UNIT,
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _JOULES_PER_UNIT,
        }


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace").strip()
    return "unknown"
