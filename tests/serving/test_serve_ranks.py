"""`paceline serve` over several processes: the same texts, an end on SIGTERM, and the loss of a rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.launch.fork_client import FORK_SERVER_VARIABLE, NO_FORK_SERVER
from tests import commands
from tests.marks import soak_param
from tests.serving.clients import ServerProcess, events_of, wait_until

pytest.importorskip("uvicorn", reason="needs paceline[serve]")

LONG = 100  # tokens
REQUESTS = [
    {"prompt": "def f(x):\n"[: 1 + k] * (1 + k % 4), "max_tokens": 6 + 3 * k, "seed": k, "stream": k % 2 == 1}
    for k in range(8)
]


def rank_process(server: ServerProcess, rank: int) -> int:
    """Return the process of a rank."""
    name = f"\0RANK={rank}\0".encode()
    named = (pid for pid in server.processes() if name in Path(f"/proc/{pid}/environ").read_bytes())
    return next(named)


@pytest.fixture(scope="module", params=[soak_param("replicas=2"), "pipeline=2"])
def ranks(request: pytest.FixtureRequest, gpt_run: Path) -> Iterator[ServerProcess]:
    """A server of two processes; it ends well on SIGTERM."""
    words = ["--slots", "4", "-n", "2", "--strategy", request.param]
    # Ranks that are forked have no environment of their own, by which they could be found.
    with ServerProcess(gpt_run, *words, environ={FORK_SERVER_VARIABLE: NO_FORK_SERVER}) as started:
        yield started
        if started.is_running:
            assert started.stop() == 0, started.communicate()


@pytest.mark.capability("W7", "W9", clause="a server over ranks has the texts of one process")
def test_ranks_have_the_answers_of_one_process(ranks: ServerProcess, server: ServerProcess) -> None:
    expected = [server.text(**request) for request in REQUESTS]
    time.sleep(2.5)  # an idle server waits for more than one heartbeat
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        assert list(pool.map(lambda request: ranks.text(**request), REQUESTS)) == expected
    one, several = (json.loads(s.call("/v1/models")[2])["data"][0]["fingerprint"] for s in (server, ranks))
    assert one == several
    assert ranks.metric("paceline_server_slots", state="free") == 8
    with ranks.open_stream(prompt="a", max_tokens=LONG, temperature=0.0) as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: ranks.metric("paceline_server_slots", state="used") == 0)


@pytest.mark.capability("W9", clause="a rank that dies: 503 for all, none hangs, the error names it")
def test_a_killed_rank_fails_open_requests_and_is_named(ranks: ServerProcess) -> None:
    """The last test of each server."""
    body = {"prompt": "a", "max_tokens": LONG, "temperature": 0.0}
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(ranks.call, "/v1/completions", {**body, "stream": True}) for _ in range(2)]
        whole = [pool.submit(ranks.call, "/v1/completions", {**body, "n": 20}) for _ in range(2)]
        wait_until(lambda: ranks.metric("paceline_server_slots", state="used") == 8)
        os.kill(rank_process(ranks, 1), signal.SIGKILL)
        answers = [answer.result() for answer in whole]
        bodies = [stream.result()[2] for stream in streams]
    assert [status for status, _, _ in answers] == [503, 503]
    assert all(
        "rank 1 left while it served texts" in json.loads(data)["error"]["message"] for _, _, data in answers
    )
    last = [json.loads(data.split(b"data: ")[-1]) for data in bodies]
    assert all("rank 1 left while it served texts" in event["error"]["message"] for event in last)
    assert ranks.wait() != 0
    assert "rank 1 was killed by SIGKILL" in ranks.communicate()[1]


@pytest.mark.capability("W9", clause="SIGTERM ends all ranks")
def test_sigterm_finishes_what_runs_on_all_ranks(gpt_run: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    words = ["--slots", "1", "-n", "2", "--strategy", "tensor=2", "--token-file", tmp_path / "token"]
    with ServerProcess(gpt_run, *words, token="secret") as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a", "max_tokens": LONG, "temperature": 0.0, "stream": True}
        running = pool.submit(server.call, "/v1/completions", body)
        wait_until(lambda: server.metric("paceline_server_tokens_total", kind="generated") > 3)
        waiting = pool.submit(server.call, "/v1/completions", {**body, "stream": False})
        wait_until(lambda: server.metric("paceline_server_queued") == 1)
        assert ServerProcess.call(server, "/v1/models", None, {"Authorization": "Bearer other"})[0] == 401
        server.terminate()
        assert events_of(running.result()[2])[-1]["choices"][0]["finish_reason"] == "length"
        assert waiting.result()[0] == 503
        assert server.wait() == 0, server.communicate()


@pytest.mark.parametrize(
    "words, message",
    [
        (["-n", "2", "--strategy", "context=2"], "generation does not support context"),
        (["-n", "2", "--strategy", "replicas=3"], "3"),
        (["-n", "2", "--strategy", "sync=local:4"], "does not train"),
    ],
)
def test_layouts_that_cannot_generate_are_refused(gpt_run: Path, words: list[str], message: str) -> None:
    done = commands.run(gpt_run.parent, "serve", gpt_run, *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
