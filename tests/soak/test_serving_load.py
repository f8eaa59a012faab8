"""An hour of mixed load in which clients are killed: texts stay equal, no slot is lost, memory is flat."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from paceline.launch.fork_client import FORK_SERVER_VARIABLE, NO_FORK_SERVER
from tests import commands
from tests.serving.clients import SECONDS, ServerProcess, wait_until
from tests.serving.conftest import RECIPE

MINUTES = 60
NUM_CLIENTS = 12
ANEW = {FORK_SERVER_VARIABLE: NO_FORK_SERVER}  # so that all processes are below the server


def private_bytes(server: ServerProcess) -> int:
    """Return the memory of the server and the ranks that it has started."""
    return sum(map(ServerProcess.private_bytes_of, server.processes()))


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 600)
@pytest.mark.capability("W9", clause="an hour of load with clients that are killed")
@pytest.mark.parametrize("words", [[], ["-n", "2", "--strategy", "pipeline=2"]], ids=["one", "stages"])
def test_an_hour_of_mixed_load(tmp_path: Path, words: list[str]) -> None:
    pytest.importorskip("uvicorn", reason="needs paceline[serve]")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    assert commands.run(tmp_path, "train", "recipe.toml").returncode == 0
    requests = [{"prompt": "ab\ncd "[: 1 + k % 6], "max_tokens": 1 + 9 * k, "seed": k} for k in range(12)]
    wrong: list[object] = []
    with ServerProcess(tmp_path / "run", "--slots", "4", *words, environ=ANEW) as server:
        alone = [server.text(**request) for request in requests]
        ends = time.monotonic() + MINUTES * 60

        def client(number: int) -> None:
            draws = random.Random(number)
            while time.monotonic() < ends and not wrong:
                k = draws.randrange(len(requests))
                if draws.random() < 0.3:  # killed before, within or after its answer
                    with server.open_stream(**requests[k]):
                        time.sleep(draws.random() * 0.3)
                elif server.text(**requests[k], stream=draws.random() < 0.5) != alone[k]:
                    wrong.append(requests[k])

        threads = [threading.Thread(target=client, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(MINUTES * 6)
        after_a_tenth = private_bytes(server)
        for thread in threads:
            thread.join(MINUTES * 60 + SECONDS)
        assert not wrong
        wait_until(lambda: server.metric("paceline_server_slots", state="used") == 0)
        assert private_bytes(server) < after_a_tenth * 1.05
        assert server.stop() == 0
