"""What tests of the writer process share."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started, in their order."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found
