"""What is saved is what is loaded: on a disk, in memory, and by torch.distributed.checkpoint alone."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from paceline.checkpoint import write_plan
from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import ManifestReader
from paceline.checkpoint.disk.checksum import is_checksum
from paceline.checkpoint.safetensors_file import TensorChunk
from paceline.checkpoint.staging import StagingBuffer
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError, DeadlineError
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.train_state import TrainState
from tests.unit.checkpoint.states import change, holds, load, make_state, raising, save, saver, whole

pytestmark = pytest.mark.capability("N1")


@pytest.fixture(params=["disk", pytest.param("memory", marks=pytest.mark.capability("N10"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{tmp_path.name}"


def test_what_is_saved_is_what_is_loaded(place: str) -> None:
    state = make_state()
    name = save(place, state)
    assert name == "step-00000003" and holds(place, name, state)
    other = make_state(step=8, seed=9)
    found = load(place, name)
    other.load(found.tensors, found.scalars)
    assert other.scalars() == state.scalars()
    assert all(torch.equal(other.tensors()[n], t) for n, t in state.tensors().items())


def test_the_manifest_says_where_it_comes_from(place: str) -> None:
    state = make_state()
    manifest = load(place, save(place, state)).manifest
    assert (manifest.step, manifest.serial) == (3, 1)
    assert manifest.origin.recipe == 'task = "x"\n' and manifest.origin.strategy == "replicas=1"
    assert manifest.origin.versions == {"torch": "2"} and manifest.origin.run
    assert all(is_checksum(file.checksum) and file.num_bytes for file in manifest.files)
    again = load(place, save(place, state)).manifest
    assert again.state_sha256 == manifest.state_sha256 and again.serial == 2
    change(state)
    assert load(place, save(place, state)).manifest.state_sha256 != manifest.state_sha256


@pytest.mark.parametrize("left", [(0,), (0, 1)])
def test_a_part_of_a_rank_that_is_lost_is_not_waited_for(left: tuple[int, ...], place: str) -> None:
    """Of one that is not, it is: until the deadline."""

    def both(text: str) -> list[str]:
        return [text, json.dumps({**json.loads(text), "rank": 1})]

    seconds = 0.2 if 1 in left else 3600.0
    with saver(place, make_state(), exchange=both, left=lambda: left, deadline_seconds=seconds) as one:
        one.save()
        error, text = (DeadlineError, "in time") if 1 in left else (CheckpointError, "was lost before it")
        with pytest.raises(error, match=f"rank 1 .*{text}"):
            one.finish()
        assert not one.catalog.whole


def test_nothing_is_overwritten_when_a_step_is_saved_again(place: str) -> None:
    first, second = make_state(5), make_state(5, seed=1)
    names = [save(place, first), save(place, second)]
    assert names == ["step-00000005", "step-00000005.1"]
    assert holds(place, names[0], first) and holds(place, names[1], second)


def odd_model() -> nn.Module:
    model = nn.Module()
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        model.register_buffer(str(dtype).replace(".", "_"), torch.tensor([[0, 1], [1, 1]]).to(dtype))
    model.register_buffer("scalar", torch.tensor(1.25))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("transposed", torch.arange(6).view(2, 3).t())
    model.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    model.register_buffer("first_row", model.weight.detach()[0])
    return model


def test_every_type_and_shape_survives(place: str) -> None:
    model = odd_model()
    state = TrainState(unsharded_model(model), torch.optim.SGD(model.parameters(), lr=0.1))
    assert holds(place, save(place, state), state)


def test_a_type_that_has_no_word_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"'model/odd' is torch\.complex128"):
        save(tmp_path, TrainState(unsharded_model(model), torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.capability("N3")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_the_files(tmp_path: Path) -> None:
    """DCP's own reader of safetensors, and ours given to DCP."""
    state = make_state()
    name = save(tmp_path, state)
    readers = (
        dcp.HuggingFaceStorageReader(str(tmp_path / name)),
        ManifestReader(StorageFolder(str(tmp_path)), name),
    )
    for reader in readers:
        found = {n: torch.empty_like(t) for n, t in state.tensors().items()}
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert all(torch.equal(found[n], t) for n, t in state.tensors().items())


class Payload:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.capability("N13")
def test_a_pickle_in_the_folder_is_never_loaded(tmp_path: Path) -> None:
    state, mark = make_state(), tmp_path / "executed"
    name = save(tmp_path / "c", state)
    bomb = pickle.dumps(Payload(mark))
    folder = tmp_path / "c" / name
    for file in (".metadata", "rank-00000.pt", "__0_0.distcp", "data.pkl"):
        (folder / file).write_bytes(bomb)
    assert holds(tmp_path / "c", name, state)
    for file in folder.glob("rank-*"):
        file.write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", name)
    (folder / "manifest.json").write_bytes(bomb)
    assert whole(tmp_path / "c") == []
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb was a dud"


def test_what_is_in_a_folder(tmp_path: Path) -> None:
    name = save(tmp_path, make_state())
    assert sorted(p.name for p in (tmp_path / name).iterdir()) == [
        "certificate.json",
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    assert json.loads((tmp_path / name / "manifest.json").read_text())["step"] == 3


def test_a_large_part_is_cut_into_files_that_do_not_depend_on_who_writes_them(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_plan, "_MIN_FILE_BYTES", 64)
    monkeypatch.setattr(write_plan, "_MAX_FILES", 3)
    state = make_state()
    names = [save(place, state, writers=n, background=n == 1, newest=9) for n in (1, 2, 5)]
    manifests = [load(place, name).manifest for name in names]
    assert [f.name for f in manifests[0].files] == [f"rank-00000.{i}-of-3.safetensors" for i in (1, 2, 3)]
    assert all(manifest.files == manifests[0].files for manifest in manifests)
    assert len({manifest.state_sha256 for manifest in manifests}) == 1
    assert all(holds(place, name, state) for name in names)
    files = StorageFolder(place)
    damaged = f"{names[-1]}/{manifests[-1].files[1].name}"
    data = bytearray(files.read(damaged))
    data[-1] ^= 1
    files.publish(damaged, bytes(data))
    with pytest.raises(CheckpointError, match=r"rank-00000\.2-of-3\.safetensors"):
        load(place, names[-1])


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [1, 1, 40, 1], [100], [3, 0, 5], [0], []])
def test_a_part_is_cut_between_tensors_and_nothing_is_lost(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_plan, "_MIN_FILE_BYTES", 8)
    chunks = [TensorChunk(str(i), "U8", (n,), (0,), (n,)) for i, n in enumerate(sizes)]
    cuts = write_plan.draft_files(7, chunks)
    data = [cut.num_bytes - len(cut.header) for cut in cuts]
    assert [chunk for cut in cuts for chunk in cut.chunks] == chunks
    assert sum(data) == sum(sizes) and all(cut.chunks for cut in cuts)
    assert len(cuts) <= max(1, min(4, sum(sizes) // 8)) and len({cut.name for cut in cuts}) == len(cuts)
    if sizes == [8, 8, 8, 8]:
        assert data == [8, 8, 8, 8]


@pytest.mark.capability("N4")
@pytest.mark.parametrize("steady", [True, False])
def test_a_save_in_the_background_holds_the_state_of_its_step(tmp_path: Path, steady: bool) -> None:
    """Parameters, moments and statistics change while it is written."""
    state, before = make_state(), make_state()
    with saver(tmp_path, state, steady=steady, newest=9) as one:
        for step in range(3, 9):
            name = one.save()
            for _ in range(3):
                change(state, one.settle)
            one.finish()
            assert holds(tmp_path, name, before)
            state.step, state.num_updates = step + 1, step
            before.load(state.tensors(), state.scalars())
            before.optimizer.param_groups[0]["lr"] = 0.1
    assert whole(tmp_path) == [3, 4, 5, 6, 7, 8]


@pytest.mark.capability("N4")
def test_an_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without the wait, the checkpoint holds what came later."""
    import threading

    go = threading.Event()
    with saver(tmp_path, state := make_state()) as one:
        complete = StagingBuffer.complete
        monkeypatch.setattr(StagingBuffer, "complete", lambda buffer: (go.wait(100), complete(buffer))[1])
        early = make_state()
        name = one.save()
        assert one.busy  # nothing is copied yet
        with torch.no_grad():
            state.model[0].weight.add_(1.0)  # behind the optimizer's back
        go.set()
        one.finish()
        assert not holds(tmp_path, name, early)
        go.clear()
        name = one.save()
        later = {n: t.clone() for n, t in state.tensors().items()}
        releasing = threading.Timer(0.2, go.set)
        releasing.start()
        change(state, one.settle)
        one.finish()
        releasing.join()
        assert all(torch.equal(load(tmp_path, name).tensors[n], t) for n, t in later.items())


def test_an_error_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver(tmp_path, make_state()) as one:
        monkeypatch.setattr(one.catalog.files, "write", raising(OSError(5, "Input/output error")))
        one.save()
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            one.save()
        assert caught.value.next_step
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path))).whole == []


@pytest.mark.capability("N5", clause="a server and its launcher outlive workers")
@pytest.mark.parametrize("needed", [False, True])
def test_where_the_job_outlives_a_rank_its_part_is_not_needed_or_the_draft_is_dropped(
    needed: bool, place: str
) -> None:
    """What follows is saved as if nothing had been; of one that is dropped nothing is left."""
    there, state = ["rank 1"], make_state()

    def both(text: str) -> list[str]:
        told = json.loads(text)
        other = {**told, "rank": 1, "table": told["table"] if needed else []}
        return [text, json.dumps(other)][: 1 + len(there)]

    with saver(place, state, exchange=both, left=lambda: (0,), survives_lost_ranks=lambda: True) as one:
        name = one.save()
        assert one.wait_published(name) == (not needed) and one.dropped == ({name} if needed else set())
        there.clear()
        second = one.save()
        assert one.wait_published(second)
        assert one.dropped == set()  # the name has come again
    assert not CheckpointCatalog.read(StorageFolder(place)).broken and len(whole(place)) == 2 - needed
    assert holds(place, second, state)
