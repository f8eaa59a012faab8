"""Asked to stop: a signal, a second signal, a notice."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.session.stop_signals import (
    SAME_REQUEST_SECONDS,
    SIGNALS,
    StopRequest,
    stop_on_notice,
    stop_on_signals,
)

pytestmark = pytest.mark.capability("N7")


def await_request(stop: StopRequest, seconds: float = 100.0) -> bool:
    expires = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < expires:
        time.sleep(0.01)
    return stop.requested


def test_what_comes_at_once_is_the_same_request_and_what_comes_later_ends_the_process() -> None:
    stop = StopRequest()
    assert not stop()
    assert stop.request(100.0) and stop()
    assert stop.request(100.0 + 0.9 * SAME_REQUEST_SECONDS)
    assert not stop.request(100.0 + SAME_REQUEST_SECONDS)


def test_a_signal_to_a_child_asks_only_the_child() -> None:
    with stop_on_signals(StopRequest()) as stop:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop():
            time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_and_afterwards_all_is_as_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals(StopRequest()) as stop:
        os.kill(os.getpid(), number)
        assert await_request(stop)
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


BLOCKED = """
import ctypes, os
from paceline.session.stop_signals import StopRequest, stop_on_signals

class Told(StopRequest):
    def request(self, now):
        found = super().request(now)
        print("asked", flush=True)
        return found

with stop_on_signals(Told()):
    print("ready", flush=True)
    libc = ctypes.CDLL(None)  # no Python runs in the main thread until these return
    libc.pause(); libc.pause(); libc.sleep(600)
"""


@pytest.mark.soak
def test_the_second_signal_ends_a_process_that_is_stuck_in_c() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == b"asked\n"
        time.sleep(SAME_REQUEST_SECONDS + 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 130


def test_a_notice_file_is_a_request(tmp_path: Path) -> None:
    stop = StopRequest()
    with stop_on_notice(str(tmp_path / "notice"), stop):
        assert not stop()
        (tmp_path / "notice").touch()
        assert await_request(stop)


class Service(http.server.BaseHTTPRequestHandler):
    """Answers 404 until there is a notice."""

    notice = False

    def do_GET(self) -> None:
        self.send_response(200 if type(self).notice else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_notice_at_a_url_is_a_request() -> None:
    class Own(Service):
        notice = False

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stop = StopRequest()
        with stop_on_notice(f"http://127.0.0.1:{server.server_port}/spot", stop):
            assert not stop()
            Own.notice = True
            assert await_request(stop)
        server.shutdown()
        thread.join()


def test_without_a_service_there_is_no_notice() -> None:
    stop = StopRequest()
    with stop_on_notice("http://127.0.0.1:9/spot", stop), stop_on_notice(None, stop):
        assert not stop()
