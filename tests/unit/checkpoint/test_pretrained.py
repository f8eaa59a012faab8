"""First weights from where models are published: Hugging Face, HTTP; whole, checked, in memory once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.checkpoint.pretrained import load_weights
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session.start_rank import join
from paceline.testing.parity import make_task
from tests.unit.checkpoint.states import flip_bit
from tests.web import serving

pytestmark = pytest.mark.capability("W6")


def gpt2(seed: int) -> Any:
    """A small GPT-2 with its output layer tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def published(folder: Path, pieces: str = "20KB") -> Any:
    """Several files and an index, as Hugging Face's library writes them."""
    model = gpt2(1)
    model.save_pretrained(folder, max_shard_size=pieces)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def write_sums(folder: Path) -> Path:
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.glob("*.safetensors"))]
    place = folder / "SHA256SUMS"
    place.write_text("".join(lines))
    return place


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("place", ["path", "file", "http"])
def test_a_folder_of_hugging_face_from_a_path_and_from_urls(place: str, tmp_path: Path) -> None:
    theirs, ours = published(tmp_path), gpt2(2)
    assert len([*tmp_path.glob("*.safetensors")]) == 2 and not same(ours, theirs)
    with serving(tmp_path) as web:
        places = {"path": str(tmp_path), "file": tmp_path.as_uri(), "http": web.url}
        taken = load_weights(ours, places[place])
    assert same(ours, theirs) and ours.lm_head.weight is ours.transformer.wte.weight
    assert len(taken.unverified_files) == len([*tmp_path.glob("*.safetensors")])
    assert "SHA256SUMS" in str(taken.warning(str(tmp_path)))


def test_one_file_behind_a_signed_url_and_a_user_who_knows_its_hash(tmp_path: Path) -> None:
    theirs, ours = published(tmp_path, "1GB"), gpt2(2)
    digest = sha256(tmp_path / "model.safetensors")
    with serving(tmp_path) as web:
        place = f"{web.url}/model.safetensors?signature=a/b"
        assert load_weights(ours, f"{place}#sha256={digest}").warning(place) is None
        assert same(ours, theirs) and any("signature=a/b" in path for _, path, _ in web.asked)
        wrong = "0" * 64
        with pytest.raises(CheckpointError, match=rf"model.safetensors is damaged: .*{wrong[:12]}"):
            load_weights(gpt2(2), f"{place}#sha256={wrong}")
    with pytest.raises(CheckpointError, match="is not a SHA-256"):
        load_weights(ours, f"{tmp_path / 'model.safetensors'}#sha256=beef")


def test_a_connection_that_breaks_is_tried_again(tmp_path: Path) -> None:
    theirs, ours = published(tmp_path, "1GB"), gpt2(2)
    with serving(tmp_path) as web:
        web.breaks = 3
        load_weights(ours, web.url)
        assert web.breaks == 0 and same(ours, theirs)
        web.breaks = 10**6
        with pytest.raises(CheckpointError, match="cannot read the weights"):
            load_weights(ours, web.url)


def test_what_a_server_cannot_do_or_does_not_have_is_said(tmp_path: Path) -> None:
    published(tmp_path, "1GB")
    with serving(tmp_path) as web:
        with pytest.raises(CheckpointError, match=r"nothing/model\.safetensors"):
            load_weights(gpt2(2), f"{web.url}/nothing")
        web.ranges = False
        with pytest.raises(CheckpointError, match="download it first"):
            load_weights(gpt2(2), web.url)
    with pytest.raises(CheckpointError, match="cannot reach the folder"):
        load_weights(gpt2(2), "nowhere://folder")


@pytest.mark.parametrize("remote", [False, True])
def test_sums_beside_a_folder_are_compared(remote: bool, tmp_path: Path) -> None:
    theirs, ours = published(tmp_path), gpt2(2)
    sums = write_sums(tmp_path)
    with serving(tmp_path) as web:
        place = web.url if remote else str(tmp_path)
        assert load_weights(ours, place).unverified_files == () and same(ours, theirs)
        last = max(tmp_path.glob("*.safetensors"))
        flip_bit(last)
        untouched, before = gpt2(2), gpt2(2)
        with pytest.raises(CheckpointError, match=f"{last.name} is damaged: .*by SHA256SUMS"):
            load_weights(untouched, place)
        assert remote or same(untouched, before)
        sums.write_text(sums.read_text().splitlines()[0])
        with pytest.raises(CheckpointError, match="SHA256SUMS does not name"):
            load_weights(ours, place)


@pytest.mark.parametrize("kept", ["link", "note"])
def test_what_hugging_faces_library_noted_is_compared(kept: str, tmp_path: Path) -> None:
    """Its cache links to blobs that are named by their hash; a download to a folder leaves a note."""
    theirs, ours = published(tmp_path / "snapshot", "1GB"), gpt2(2)
    file = tmp_path / "snapshot" / "model.safetensors"
    digest = sha256(file)
    if kept == "link":
        blob = file.rename(tmp_path / digest)
        file.symlink_to(f"../{digest}")
    else:
        local = pytest.importorskip("huggingface_hub._local_folder")
        local.write_download_metadata(file.parent, file.name, "a commit", digest)
        blob = file
    assert load_weights(ours, file.parent).unverified_files == () and same(ours, theirs)
    flip_bit(blob)
    with pytest.raises(CheckpointError, match=r"is damaged: .*by Hugging Face's download"):
        load_weights(ours, file.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_offsets": [0, 8]}, "which are not those of its shape"),
        ({"data_offsets": [4, 28]}, "outside of the file"),
        ({"shape": [-2, -3]}, r"shape\[0\]: .*greater than or equal to 0"),
        ({"dtype": "F4"}, "unknown here"),
    ],
)
def test_a_header_that_lies_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | change
    header = json.dumps({"weight": entry}).encode()
    place = tmp_path / "model.safetensors"
    place.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(CheckpointError, match=said):
        load_weights(nn.Linear(3, 2, bias=False), place)
    place.write_bytes((2**60).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="a header of"):
        load_weights(nn.Linear(3, 2, bias=False), place)


def test_bytes_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    place, model = tmp_path / "model.safetensors", nn.Linear(3, 2)
    save_file(model.state_dict(), place)
    place.write_bytes(place.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="belong to no tensor"):
        load_weights(model, place)


def test_types_are_converted_and_tensors_need_not_lie_in_one_piece(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].weight.data = torch.randn(3, 2).t()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_file({name: t.contiguous() for name, t in halves.items()}, tmp_path / "w.safetensors")
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other[0].weight.data = torch.zeros(3, 2).t()
    load_weights(other, tmp_path / "w.safetensors")
    assert all(torch.equal(t, other.state_dict()[name].to(t.dtype)) for name, t in halves.items())


def test_a_run_begins_from_a_url_and_says_that_nobody_vouches(tmp_path: Path) -> None:
    recipe = Recipe(task="digits", options={"model": "mlp", "hidden": [8]}, steps=1, optimizer={"lr": 0.0})
    served = tmp_path / "served"
    served.mkdir()
    values = {n: torch.full_like(t, 0.5) for n, t in make_task(recipe).model.state_dict().items()}
    save_file(values, served / "model.safetensors")
    said: list[str] = []
    with (
        serving(served) as web,
        join(recipe.replace(init_from=web.url), cluster=Cluster.single(), warn=said.append) as session,
    ):
        assert all((p == 0.5).all() for p in session.runner.sharded_model.model.parameters())
        assert f"model.safetensors of {web.url}" in "".join(said)


def test_what_safetensors_reads_is_what_is_read_here(tmp_path: Path) -> None:
    types = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    model = nn.Module()
    for i, dtype in enumerate(types):
        model.register_buffer(f"b{i}", torch.zeros(3, i, dtype=dtype))
    values = {f"b{i}": torch.randint(0, 2, (3, i)).to(dtype) for i, dtype in enumerate(types)}
    save_file(values, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    read = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in read.items())


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_not_doubled(large: Path) -> None:
    """A checked file of 128 MB, mapped or by HTTP, takes less than 48 MB beside the model."""
    with serving(large) as web:
        mapped, http, twice = peaks(f"ours={large}", f"ours={web.url}", f"twice={large}")
    assert max(mapped, http) < 48, (mapped, http)
    assert twice > MEGABYTES * 0.9  # the measurement sees what is doubled


def test_a_file_larger_than_the_memory_is_mapped_and_does_not_fit_the_model(tmp_path: Path) -> None:
    """It takes no space on the disk; before, it was an error of memory that asked for fewer processes."""
    shape = [2**19, 2**19]
    head = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * 2**38]}}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 4 * 2**38)
    with pytest.raises(CheckpointError, match="the weights do not fit this model"):
        load_weights(nn.Linear(2, 2, bias=False), str(path))
