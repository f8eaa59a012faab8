"""What a launcher that was killed leaves is removed: by its reaper at once, else by the next launcher."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from paceline.job.cluster import Cluster
from paceline.launch.node_liveness import NodeLivenessProbe
from paceline.launch.stale_folders import mark_owner, remove_stale_folders
from paceline.launch.worker_guard import guard
from paceline.observe.process_info import cache_folder
from tests.dist.launch.actors import until as wait_until
from tests.hostile.jobs import end_of, prepare, start, until

pytestmark = pytest.mark.timeout(240)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tmp").glob("paceline-*"))


@pytest.mark.parametrize("reaper", ["lives", "is killed too"])
def test_a_launcher_that_is_killed_leaves_nothing_for_long(reaper: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    environ = {} if reaper == "lives" else {"PACELINE_FORK_SERVER": "none"}
    words = ("train", "recipe.toml", "--set", "options.what=build", "--set", "options.rank=0")
    with start(tmp_path, *words, "--set", "options.seconds=100", **environ) as process:
        until((tmp_path / "building-0").exists, process)
        if reaper != "lives":
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                if b"reaper" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()
        worker = int((tmp_path / "building-0").read_text())
        wait_until(lambda: not Path(f"/proc/{worker}").exists())
    if reaper != "lives":
        assert len(folders(tmp_path)) == 1
        with start(tmp_path, "run", "-n", "1", str(tmp_path / "none.py"), **environ) as process:
            assert end_of(process).code != 0
    wait_until(lambda: not folders(tmp_path))


def test_only_what_a_dead_process_of_this_system_owned_is_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for name in ("mine", "dead", "elsewhere", "nobody", "odd"):
        (tmp_path / f"paceline-{name}").mkdir()
    mark_owner(tmp_path / "paceline-mine")
    mine = json.loads((tmp_path / "paceline-mine" / "owner.json").read_text())
    said = {
        "dead": {**mine, "pid": gone.pid, "start": 5},
        "elsewhere": {**mine, "pid": gone.pid, "boot": "x"},
        "odd": [1],
    }
    for name, value in said.items():
        (tmp_path / f"paceline-{name}" / "owner.json").write_text(json.dumps(value))
    assert [path.name for path in remove_stale_folders()] == ["paceline-dead"]
    assert not (tmp_path / "paceline-dead").exists() and (tmp_path / "paceline-elsewhere").exists()


def test_a_job_whose_keeper_is_killed_goes_on(tmp_path: Path) -> None:
    prepare(tmp_path)
    words = ("train", "recipe.toml", "-n", "2", "--set", "options.what=wait")
    with start(tmp_path, *words) as process:
        until((tmp_path / "stepping-1").exists, process)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"reaper" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert end_of(process).code == 0


@pytest.mark.capability("O2")
def test_the_beacon_is_heard_at_the_address_of_the_rendezvous_alone(tmp_path: Path) -> None:
    with NodeLivenessProbe(2, 0, tmp_path, ("127.0.0.1", 29500)) as peers:
        socket.create_connection(("127.0.0.1", peers.port), timeout=20).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", peers.port), timeout=20)


@pytest.mark.parametrize("length", [20, 200])
def test_sockets_lie_where_the_launcher_removes_them(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the name of that folder is longer than a socket's may be."""
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", None)
    errors = tmp_path / ("x" * length)
    errors.mkdir()
    with guard(replace(Cluster.single(), error_dir=errors)), Listener(None, "AF_UNIX") as listener:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(listener.address))
        assert [path for path in errors.rglob("*") if path.is_socket()]


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert str(os.getuid()) in cache_folder().name
