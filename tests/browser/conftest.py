"""A headless Chromium, if this machine has one; else the tests here are skipped with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Started once; every page that a test opens is new."""
    reason = "needs playwright: pip install -e '.[dev]'"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"needs Chromium, found none of {', '.join(_NAMES)}: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=list(_QUIET))
        yield found
        found.close()
