"""The server: texts that depend on nobody else, clients of every kind, and its end."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs paceline[serve]")
pytest.importorskip("jinja2", reason="needs paceline[serve]")
pytest.importorskip("prometheus_client", reason="needs paceline[serve]")
from paceline.errors import PacelineError
from paceline.serving import Engine, GenerationRequest, SamplingOptions, build_engine
from paceline.serving.engine_thread import EngineThread
from paceline.serving.load_model import ServedModel, load_served_model
from paceline.watch.metric_catalog import SERVER_METRICS
from tests.serving.clients import SECONDS, Client, ServerProcess, events_of, served_here, wait_until

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
LONG = 100  # tokens


@pytest.fixture(scope="module")
def served(gpt_run: Path) -> ServedModel:
    return load_served_model(gpt_run)


@pytest.fixture
def engine(served: ServedModel) -> Engine:
    return build_engine(served.model, context=served.context, slots=2)


@pytest.mark.capability("W9", clause="batching; a text is the one that is generated alone")
def test_sixteen_texts_at_once_are_those_generated_alone(server: ServerProcess) -> None:
    """Of several lengths, seeds and temperatures, half of them streamed, and some with `n`."""
    requests: list[dict[str, Any]] = [
        {
            "prompt": "def f(x):\n"[: 1 + k % 9] * (1 + k % 5),
            "max_tokens": 8 + 5 * (k % 7),
            "temperature": (0.0, 0.7, 1.5)[k % 3],
            "seed": k // 2,
            "stream": k % 2 == 1,
        }
        for k in range(16)
    ]
    alone = [server.text(**request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: server.text(**request), requests))
    assert together == alone and len(set(alone)) > 8
    # Each of `n` texts has a seed of its own, and is the text of a request with that seed.
    several = server.complete("import", n=3, seed=5, max_tokens=10)["choices"]
    assert [choice["seed"] for choice in several] == [5, 6, 7]
    assert [c["text"] for c in several] == [server.text("import", seed=s, max_tokens=10) for s in (5, 6, 7)]


BAD: list[tuple[bytes | dict[str, Any], str]] = [
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "x" * 500}, "the prompt has 500 tokens, and the model's context is 128"),
    ({"prompt": [1, 256]}, "token 256, and the model's vocabulary has 256"),
    ({"prompt": [[]]}, "the prompt is empty"),
    ({"prompt": {"a": 1}}, "neither a text nor a list of tokens"),
    ({}, "the parameter 'prompt' is missing"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; the prompt has 1 token of a context of 128"),
    ({"prompt": "a", "max_tokens": 10**9}, "max_tokens is 1000000000"),
    ({"prompt": "a", "temperature": -0.5}, "temperature is -0.5"),
    ({"prompt": "a", "seed": 2**79}, f"seed is {2**79}"),
    ({"prompt": "a", "seed": -1}, "seed is -1"),
    ({"prompt": "a", "n": 65}, "65 texts"),
    ({"prompt": "a", "n": 0}, "n: Input should be greater than or equal to 1"),
    ({"prompt": "a", "stop": ""}, "a stop string has 0 characters"),
    ({"prompt": "a", "logprobs": 10**6}, "logprobs is 1000000"),
    ({"prompt": "a", "echo": True}, "there is no parameter 'echo'"),
    ({"prompt": "a", "temperatures": 1.0}, "there is no parameter 'temperatures'"),
    ({"prompt": "a", "temperature": "hot"}, "temperature: Input should be a valid number"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
    (b'{"prompt": "a\\ud800"}', "half of a surrogate pair at character 1"),
    (b'{"prompt": "a"', "the body is not JSON"),
    (b'{"prompt": "\xff"}', "the body is not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    (b"[]", "the body is not a JSON object"),
]


@pytest.mark.capability("W9", clause="bad input is refused with the numbers")
@pytest.mark.parametrize("body, words", BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_by_name(server: ServerProcess, body: Any, words: str) -> None:
    status, _, answer = server.call("/v1/completions", body)
    error = json.loads(answer)["error"]
    assert status == 400 and words in error["message"] and error["type"] == "invalid_request_error"
    named = {"prompt", "max_tokens", "temperature", "seed", "n", "stop", "logprobs", "echo", "temperatures"}
    assert error["param"] in named or isinstance(body, bytes)


def test_what_is_not_part_of_the_server_is_said(server: ServerProcess) -> None:
    assert server.call("/v1/embeddings", {})[0] == 404
    assert server.call("/v1/completions")[0] == 405
    status, _, body = server.call("/v1/completions", {"prompt": "a", "model": "gpt-9"})
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"
    status, _, body = server.call("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert status == 400 and "the model run has no chat template" in json.loads(body)["error"]["message"]
    # A page in a browser can send neither another type nor another name of this host.
    assert server.call("/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"})[0] == 400
    assert server.call("/v1/models", None, {"Host": "evil.example"})[0] == 403
    models = json.loads(server.call("/v1/models")[2])["data"]
    assert [model["id"] for model in models] == ["run"] and models[0]["context"] == 128
    assert server.call("/health")[0] == 200 and server.call("/ready")[0] == 200


@pytest.mark.capability("W9", clause="metrics")
def test_metrics_are_those_of_the_catalog(server: ServerProcess) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    before = server.metric("paceline_server_tokens_total", kind="generated")
    server.complete("abc", max_tokens=5, temperature=0.0)
    assert server.metric("paceline_server_tokens_total", kind="generated") >= before + 5
    families = list(text_string_to_metric_families(server.call("/metrics")[2].decode()))
    names = {sample.name for family in families for sample in family.samples}
    assert names == {metric.name for metric in SERVER_METRICS}
    assert all(s.labels["model"] == "run" for family in families for s in family.samples)
    assert server.metric("paceline_server_slots", state="free") == 4


def test_ten_thousand_connections_that_send_nothing_stop_nobody(server: ServerProcess) -> None:
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    expected = server.text("abc", max_tokens=5)
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS))
        assert server.text("abc", max_tokens=5) == expected
        assert server.call("/ready")[0] == 200
    assert server.text("abc", max_tokens=5) == expected


def test_clients_that_are_killed_leave_no_slot_used(server: ServerProcess) -> None:
    """While they wait for a slot, for a first token, and within a stream."""
    cancelled = server.metric("paceline_server_cancelled_total")
    streams = [server.open_stream(prompt="abc", max_tokens=LONG, temperature=0.0) for _ in range(8)]
    assert streams[0].recv(1) == b"H"
    for stream in streams:
        stream.close()
    wait_until(lambda: server.metric("paceline_server_slots", state="used") == 0)
    assert server.metric("paceline_server_queued") == 0
    assert server.metric("paceline_server_cancelled_total") > cancelled


@pytest.mark.capability("W9", clause="a client that leaves frees its slot within one step")
def test_a_slot_is_free_within_one_step(engine: Engine) -> None:
    request = GenerationRequest((1, 2, 3), LONG, SamplingOptions(temperature=0.0))

    async def leave() -> tuple[int, int, int]:
        thread = EngineThread(engine, max_queued=4, request_seconds=SECONDS)
        thread.start(asyncio.get_running_loop())
        stream = thread.submit([request])
        index, event = await stream.next()
        assert index == 0 and event.finish_reason is None
        stream.close()
        before = thread.statistics.num_steps  # one more may be under way
        while engine.num_running:
            await asyncio.sleep(0)
        after = thread.statistics.num_steps
        await asyncio.to_thread(thread.close)
        return before, after, thread.num_open

    # In a thread of its own: the thread of the tests may have an event loop of the browser's driver.
    with ThreadPoolExecutor(1) as pool:
        before, after, num_open = pool.submit(asyncio.run, leave()).result(SECONDS)
    assert after - before <= 1 and num_open == 0


@pytest.mark.capability("W9", clause="back-pressure")
def test_a_full_queue_is_429_with_a_time(served: ServedModel, engine: Engine) -> None:
    with served_here(served, engine, max_queued=1) as client, ExitStack() as stack:
        streams = [client.open_stream(prompt="a", max_tokens=LONG, temperature=0.0) for _ in range(3)]
        for stream in streams:
            stack.callback(stream.close)
        wait_until(lambda: client.metric("paceline_server_queued") == 1)
        status, headers, body = client.call("/v1/completions", {"prompt": "a"})
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
        assert "1 text wait for a slot, of 1 that may" in json.loads(body)["error"]["message"]
        assert client.call("/v1/completions", {"prompt": "a", "n": 2})[0] == 429


def test_long_bodies_slow_ones_and_slow_readers_hold_nobody(served: ServedModel, engine: Engine) -> None:
    """100 MB are refused by their header or after 4 MiB; a byte per second is not waited for."""
    with served_here(served, engine, receive_seconds=1.0) as client, ExitStack() as stack:

        def connect(length: str) -> socket.socket:
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", client.port), SECONDS))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            opened.sendall(f"{head}{length}\r\n\r\n".encode())
            return opened

        slow_reader = client.open_stream(prompt="a", max_tokens=LONG, n=2, logprobs=20)
        stack.callback(slow_reader.close)
        assert connect(f"Content-Length: {100 * 2**20}").recv(64).startswith(b"HTTP/1.1 413")
        chunked, part = connect("Transfer-Encoding: chunked"), b"10000\r\n" + b" " * 2**16 + b"\r\n"
        for _ in range(65):
            chunked.sendall(part)
        assert chunked.recv(64).startswith(b"HTTP/1.1 413")
        slow = connect("Content-Length: 1000")
        slow.sendall(b"{")
        assert client.text("abc", max_tokens=5)
        assert slow.recv(64).startswith(b"HTTP/1.1 408")
        half = stack.enter_context(socket.create_connection(("127.0.0.1", client.port), SECONDS))
        half.sendall(b"GET /health HT")
        assert half.recv(64) == b""  # closed: the request did not arrive in time
        assert slow_reader.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("send_seconds, is_cut", [(0.3, True), (60.0, False)])
def test_a_client_that_takes_nothing_more_is_cut(
    served: ServedModel, engine: Engine, send_seconds: float, is_cut: bool
) -> None:
    with served_here(served, engine, send_seconds=send_seconds, buffer_bytes=4096) as client:
        with client.open_stream(prompt="a", max_tokens=LONG, n=6, logprobs=20) as stream:
            wait_until(lambda: client.metric("paceline_server_tokens_total", kind="generated") > LONG)
            wait_until(lambda: client.metric("paceline_server_slots", state="used") == 0)
            time.sleep(1.0)
            got = bytearray()
            with suppress(ConnectionResetError):
                while part := stream.recv(2**16):
                    got += part
                    if got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                        break
        assert (b"[DONE]" not in got) == is_cut


def test_the_access_token_is_needed_but_for_health(served: ServedModel, engine: Engine) -> None:
    with served_here(served, engine, token="secret") as client:
        assert client.call("/v1/models")[0] == 200
        for shown in ("", "secre", "Bearer secret2", "\xff"):
            headers = {"Authorization": f"Bearer {shown}"}
            assert client.call("/v1/models", None, headers)[0] == 401
            assert client.call("/metrics", None, headers)[0] == 401
            assert client.call("/v1/completions", {"prompt": "a"}, headers)[0] == 401
        assert Client(client.port).call("/health")[0] == Client(client.port).call("/ready")[0] == 200


def test_answers_that_take_too_long_end(served: ServedModel, engine: Engine) -> None:
    with served_here(served, engine, request_seconds=0.02) as client:
        status, _, body = client.call("/v1/completions", {"prompt": "a", "max_tokens": LONG})
        assert status == 504 and "took longer than 0.02 seconds" in json.loads(body)["error"]["message"]
        wait_until(lambda: engine.num_running == 0)


@pytest.mark.capability("W9", clause="a failed engine is 503 for all")
def test_a_lost_rank_fails_all_requests_and_none_hangs(
    served: ServedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, left = engine.forward.decode, iter(range(3))

    def fail_later(*args: Any) -> Any:
        if next(left, None) is None:
            raise PacelineError("rank 1 does not respond to all_reduce")
        return decode(*args)

    monkeypatch.setattr(engine.forward, "decode", fail_later)
    with served_here(served, engine) as client:
        with ThreadPoolExecutor(4) as pool:
            body = {"prompt": "a", "max_tokens": LONG, "temperature": 0.0}
            answers = list(pool.map(lambda _: client.call("/v1/completions", body), range(4)))
        assert [answer[0] for answer in answers] == [503] * 4
        assert "rank 1 does not respond" in json.loads(answers[0][2])["error"]["message"]
        assert client.call("/health")[0] == client.call("/ready")[0] == 503
        assert client.call("/v1/completions", {"prompt": "a"})[0] == 503


def test_logprobs_are_those_of_the_model(served: ServedModel, engine: Engine) -> None:
    with served_here(served, engine) as client:
        choice = client.complete("abc", max_tokens=4, temperature=0.0, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == choice_tokens(choice)
    for token, logprob, top in zip(
        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert math.isclose(top[token], logprob) and max(top.values()) == logprob and len(top) == 2


def choice_tokens(choice: dict[str, Any]) -> int:
    assert choice["finish_reason"] in ("length", "stop")
    return 4 if choice["finish_reason"] == "length" else len(choice["logprobs"]["tokens"])


@pytest.fixture
def chat_client(served: ServedModel, engine: Engine) -> Iterator[Client]:
    from dataclasses import replace

    with served_here(replace(served, chat_template=TEMPLATE), engine) as client:
        yield client


def test_a_chat_is_the_completion_of_its_rendered_template(chat_client: Client) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    options = {"max_tokens": 9, "temperature": 0.0}
    status, _, body = chat_client.call("/v1/chat/completions", {"messages": messages, **options})
    assert status == 200, body
    answer = json.loads(body)
    prompt = "[system] s\n[user] hi\n[assistant] "
    assert answer["choices"][0]["message"]["content"] == chat_client.text(prompt, **options)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    streamed = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
    events = events_of(chat_client.call("/v1/chat/completions", streamed)[2])
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    texts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(texts) == answer["choices"][0]["message"]["content"]
    assert events[-1]["usage"] == answer["usage"] and events[-1]["choices"] == []
    for bad, words in (
        ([{"role": "tool", "content": "x"}], "the chat template refuses these messages: no tools"),
        ([], "messages: List should have at least 1 item"),
        (
            [{"role": "user", "content": "x", "tool_calls": []}],
            "there is no parameter 'messages.0.tool_calls'",
        ),
    ):
        status, _, body = chat_client.call("/v1/chat/completions", {"messages": bad})
        assert status == 400 and words in json.loads(body)["error"]["message"], body


def test_a_template_cannot_leave_its_sandbox() -> None:
    import jinja2

    from paceline.serving.answers import compile_template

    for text in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) | list }}"):
        with pytest.raises((jinja2.TemplateError, OverflowError)):
            compile_template(text).render(messages=[])


@pytest.mark.capability("W9", clause="SIGTERM: finish or refuse")
def test_sigterm_finishes_what_runs_and_refuses_what_waits(gpt_run: Path) -> None:
    """There are so many requests that some wait however slow their clients are."""
    with ServerProcess(gpt_run, "--slots", "2") as server, ThreadPoolExecutor(40) as pool:
        prompt = {"prompt": "a", "max_tokens": 120, "temperature": 0.0}

        def ask() -> tuple[int, bytes]:
            try:
                status, _, body = server.call("/v1/completions", prompt)
            except OSError:  # a client that is so slow that the server no longer listens
                return 0, b""
            return status, body

        answers = [pool.submit(ask) for _ in range(40)]
        wait_until(lambda: server.metric("paceline_server_queued") >= 10)
        began = time.monotonic()
        assert server.stop() == 0, server.communicate()
        assert time.monotonic() - began < 35.0
        done = [answer.result() for answer in answers]
    assert {200, 503} <= {status for status, _ in done} <= {0, 200, 503}
    finished = [json.loads(body)["choices"][0] for status, body in done if status == 200]
    assert len({choice["text"] for choice in finished}) == 1, "none was cut short"
    assert len(done) - len(finished) >= 8
