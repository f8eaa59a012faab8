"""A notice URL, and a server that answers it with what a test has thought of."""

from __future__ import annotations

import socket
import threading
from typing import Any

from hypothesis import strategies as st

from paceline.session.stop_signals import _notice_check
from tests.hostile.formats import damaged

ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
_HERE = ["127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1", "[", "]", "127.0.0.1:99999", "", "@", "%00", "[::1"]


def urls() -> st.SearchStrategy[Any]:
    """An address of this host, or none at all, with whatever behind it; and what is answered."""
    parts = st.tuples(
        st.sampled_from(["http://", "https://", "http:///", "http://a b@"]),
        st.sampled_from(_HERE),
        st.text(max_size=12).map(lambda text: "/" + text),
    )
    return st.tuples(parts.map("".join), st.one_of(damaged(ANSWER), st.binary(max_size=80)))


def read_notice(found: tuple[str, bytes]) -> None:
    """It is a notice if the answer is 200, and nothing else happens."""
    url, answer = found
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_answer, args=(server, answer), daemon=True)
        answering.start()
        found_one = _notice_check(url.replace("{port}", str(server.getsockname()[1])))()
        server.shutdown(socket.SHUT_RDWR)  # if nobody has called
        answering.join()
    assert not found_one or b"200" in answer


def _answer(server: socket.socket, answer: bytes) -> None:
    try:
        line, _ = server.accept()
        with line:
            line.settimeout(5.0)
            line.recv(4096)
            line.sendall(answer)
    except OSError:
        return
