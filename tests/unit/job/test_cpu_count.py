"""How many cores there are for a process: a container's share of time counts, not the machine it runs on."""

import os
from pathlib import Path

import pytest

from paceline.job.cpu_count import find_cores

HERE = len(os.sched_getaffinity(0))


def files(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("quota, number", [("100000 100000", 1), ("50000 100000", 1), ("70000 100000", 1)])
def test_the_quota_of_a_container_is_kept(quota: str, number: int, tmp_path: Path) -> None:
    files(tmp_path, cpu__max=f"{quota}\n")
    assert find_cores(tmp_path, tmp_path / "none").number == number


@pytest.mark.parametrize("quota", ["max 100000", "9900000 1000"])
def test_no_quota_and_a_large_one_leave_all_cores(quota: str, tmp_path: Path) -> None:
    files(tmp_path, cpu__max=quota)
    found = find_cores(tmp_path, tmp_path / "none")
    assert found.number == HERE and "cgroup" not in found.reason


def test_the_tightest_group_around_a_process_counts(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("0::/slice/job\n")
    files(tmp_path / "slice", cpu__max="50000 100000")
    files(tmp_path / "slice" / "job", cpu__max="max 100000")
    assert find_cores(tmp_path, tmp_path / "mine").reason == f"a cgroup quota of 0.5 cores (of {HERE})"


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("5:memory:/x\n3:cpu,cpuacct:/job\n")
    place = tmp_path / "cpu,cpuacct" / "job"
    files(place, cpu__cfs_quota_us="25000", cpu__cfs_period_us="100000")
    assert find_cores(tmp_path, tmp_path / "mine").reason.startswith("a cgroup quota of 0.25 cores")
    files(place, cpu__cfs_quota_us="-1")
    assert find_cores(tmp_path, tmp_path / "mine").number == HERE


@pytest.mark.parametrize("text", ["", "max", "1 0", "x y", "\x00"])
def test_what_nobody_understands_says_nothing(text: str, tmp_path: Path) -> None:
    files(tmp_path, cpu__max=text, cpu__cfs_quota_us=text)
    (tmp_path / "mine").write_text("nonsense\n" + text)
    assert find_cores(tmp_path, tmp_path / "mine").number == HERE
