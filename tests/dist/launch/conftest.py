"""The fork server of the suite has imported before tests ask what it has started."""

import time
from pathlib import Path

import pytest

from tests import commands

_SECONDS = 200.0


@pytest.fixture(scope="session")
def server_has_imported(quick_workers: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a busy machine that may take longer than who starts a process waits for it."""
    folder: Path = tmp_path_factory.mktemp("first")

    def is_forked() -> bool:
        with commands.start(folder, "--version") as command:
            command.wait()
        return command.forked

    expires = time.monotonic() + _SECONDS
    while not is_forked():
        assert time.monotonic() < expires, "no command is forked: is something else here than at the start?"
