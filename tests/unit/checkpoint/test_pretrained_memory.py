"""Loading first weights keeps a model in memory once: the peak of a process, over what it had before."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.web import serving

MEGABYTES = 128
PEAK = """
import sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
from paceline.checkpoint import load_weights

def megabytes(word):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(word + ":")[2].split()[0]) / 1024

how, place, small = sys.argv[1:]
ways = {"ours": load_weights, "twice": lambda model, place: model.load_state_dict(load_file(place))}
ways[how](nn.Linear(4, 4), small)  # what the libraries need
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = megabytes("VmHWM")
ways[how](model, place)
print(megabytes("VmHWM") - before, float(model[-1].weight[-1, -1]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_file({f"{i}.weight": torch.full((2048, 2048), 0.25) for i in range(8)}, folder / "large.safetensors")
    save_file(nn.Linear(4, 4).state_dict(), folder / "small.safetensors")
    assert (folder / "large.safetensors").stat().st_size > MEGABYTES * 2**20
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / "SHA256SUMS").write_text(sums)
    return folder


def peak(how: str, folder: str) -> float:
    """Megabytes that loading took at its peak, beside the model."""
    places = [f"{folder}/large.safetensors", f"{folder}/small.safetensors"]
    command = [sys.executable, "-c", PEAK, how, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    grown, value = done.stdout.split()
    assert float(value) == 0.25
    return float(grown)


@pytest.mark.capability("W6")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_not_doubled(large: Path) -> None:
    """A checked file of 128 MB, mapped or by HTTP, takes less than 48 MB beside the model."""
    with serving(large) as web:
        grown = {"mapped": peak("ours", str(large)), "http": peak("ours", web.url)}
    assert max(grown.values()) < 48, grown
    assert peak("twice", str(large)) > MEGABYTES * 0.9  # the measurement sees what is doubled
