"""Which device a process takes, and what is said of GPUs that stay idle; the number of GPUs is made up."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import DeviceError
from paceline.session.start_rank import choose_device, idle_gpu_warning


@pytest.fixture(params=[0, 2])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("asked", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("processes", [1, 3])
def test_each_process_has_a_gpu_of_its_own_or_all_the_processor(
    asked: str, processes: int, gpus: int
) -> None:
    if asked == "cuda" and gpus < processes:
        with pytest.raises(DeviceError, match=f"{gpus} NVIDIA GPUs for {processes} process"):
            choose_device(asked, processes - 1, processes)
        return
    device = choose_device(asked, processes - 1, processes)
    assert device.type == ("cuda" if asked != "cpu" and gpus >= processes else "cpu")
    said = [*idle_gpu_warning(asked, device, processes)]
    assert len(said) == (asked == "auto" and 0 < gpus < processes)
    assert all("2 NVIDIA GPUs for 3 processes" in text for text in said)
