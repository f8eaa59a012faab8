"""The fork server of the suite has imported before these tests ask what it has started."""

from pathlib import Path

import pytest

from tests import commands
from tests.dist.launch.actors import until


@pytest.fixture(scope="session", autouse=True)
def server_has_imported(quick_workers: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a busy machine that may take longer than who starts a process waits for it."""
    folder: Path = tmp_path_factory.mktemp("first")

    def is_forked() -> bool:
        with commands.start(folder, "--version") as command:
            command.wait()
        return command.forked

    until(is_forked)
