"""The pytest plugin of the test kit: `-p paceline.testing.plugin`.

Invariant: a test that leaves something behind fails by name, and the next test does not suffer from it.

It adds one fixture that every test uses (leaks), `lab` (a cluster on this machine), the marks
`capability(*ids)`, `gpu` (skipped with a reason where there is no NVIDIA GPU) and `soak` (left out unless
`--soak` is given), and `--capability-report=PATH`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing.capabilities import CapabilityReport
from paceline.testing.labs import lab, why_no_lab
from paceline.testing.leaks import Observation, clean_up, find_leaks, observe

__all__ = ["lab", "no_leaks", "why_no_lab"]

_MARKS = (
    "capability(*ids): the rows of the capability list that this test proves",
    "gpu: needs an NVIDIA GPU",
    "soak: long; runs only with --soak",
)

_LAST = pytest.StashKey[Observation]()  # what was seen before the last test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("paceline")
    group.addoption("--soak", action="store_true", help="run the tests with the mark soak as well")
    group.addoption("--capability-report", metavar="PATH", help="write which tests prove which capability")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the report."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    path = config.getoption("--capability-report")
    if path:
        config.pluginmanager.register(CapabilityReport(Path(path)), "paceline-capabilities")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, skip what needs a GPU that is not there."""
    if not config.getoption("--soak"):
        long = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
        if long:
            config.hook.pytest_deselected(items=long)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False")
            )


def _has_gpu() -> bool:
    """PyTorch takes seconds to load: it is asked only where there is a driver that it could use."""
    drivers = ("nvidia*", "nvhost*", "nvgpu*", "dxg")  # the last one is that of Windows, under WSL
    if sys.platform == "linux" and not any(any(Path("/dev").glob(name)) for name in drivers):
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves behind a variable, a thread, a process, shared memory or a process group."""
    last = request.config.stash.get(_LAST, None)
    before = request.config.stash[_LAST] = observe(last)
    yield
    leaks = find_leaks(before)
    if leaks:
        clean_up(before)
        pytest.fail("the test leaves behind: " + "; ".join(leaks), pytrace=False)
