"""A headless Chromium, if this machine has one; else the tests here are skipped with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@pytest.fixture(scope="session")
def driver() -> Iterator[Playwright]:
    """What talks to the browser; it stays until the last test."""
    reason = "needs playwright: pip install -e '.[dev]'"
    module = pytest.importorskip("playwright.sync_api", reason=reason)
    with module.sync_playwright() as found:
        yield found


@pytest.fixture
def browser(driver: Playwright) -> Iterator[Browser]:
    """A new one for each test: it starts and ends processes as it likes."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"needs Chromium, found none of {', '.join(_NAMES)}: apt-get install chromium")
    found = driver.chromium.launch(executable_path=path, args=list(_QUIET))
    yield found
    found.close()
