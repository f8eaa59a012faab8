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
import os
import sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
from paceline.checkpoint.pretrained import load_weights

def megabytes(word):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(word + ":")[2].split()[0]) / 1024

def measure(load, place, small):
    load(nn.Linear(4, 4), small)  # what the libraries need
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = megabytes("VmHWM")
    load(model, place)
    print(megabytes("VmHWM") - before, float(model[-1].weight[-1, -1]), flush=True)

ways = {"ours": load_weights, "twice": lambda model, place: model.load_state_dict(load_file(place))}
for how, folder in (word.split("=", 1) for word in sys.argv[1:]):
    if os.fork() == 0:  # each in a process of its own, which has all that is imported
        measure(ways[how], f"{folder}/large.safetensors", f"{folder}/small.safetensors")
        os._exit(0)
    assert os.wait()[1] == 0
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


def peaks(*loads: str) -> list[float]:
    """Megabytes that each took at its peak, beside the model; a load is HOW=FOLDER."""
    command = [sys.executable, "-c", PEAK, *loads]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [float(value) for _, value in found] == [0.25] * len(loads)
    return [float(grown) for grown, _ in found]


@pytest.mark.capability("W6")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_not_doubled(large: Path) -> None:
    """A checked file of 128 MB, mapped or by HTTP, takes less than 48 MB beside the model."""
    with serving(large) as web:
        mapped, http, twice = peaks(f"ours={large}", f"ours={web.url}", f"twice={large}")
    assert max(mapped, http) < 48, (mapped, http)
    assert twice > MEGABYTES * 0.9  # the measurement sees what is doubled
