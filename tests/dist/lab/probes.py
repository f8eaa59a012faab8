"""Small programs that tests run inside hosts, on the standard library alone."""

import json
import subprocess
import sys
from contextlib import contextmanager

ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 7))
print("ready", flush=True)
while True:
    data, sender = s.recvfrom(2048)
    s.sendto(data, sender)
"""
TRIPS = """
import json, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(float(sys.argv[3]))
s.connect((sys.argv[1], 7))
trips = []
for i in range(int(sys.argv[2])):
    began = time.perf_counter()
    try:
        s.send(bytes([i % 256]) * 64)
        s.recv(2048)
        trips.append(time.perf_counter() - began)
    except OSError:
        trips.append(None)
print(json.dumps(trips))
"""
BURST = """
import json, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2.0)
s.connect((sys.argv[1], 7))
for i in range(int(sys.argv[2])):
    s.send(bytes([i]) * 64)
back = []
try:
    while True:
        back.append(s.recv(2048)[0])
except OSError:
    print(json.dumps(back))
"""
SINK = """
import socket
with socket.create_server(("", 9)) as listener:
    print("ready", flush=True)
    while True:
        peer, _ = listener.accept()
        total = 0
        while data := peer.recv(1 << 18):
            total += len(data)
        peer.sendall(str(total).encode())
        peer.close()
"""
PUSH = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9), timeout=80) as s:
    began = time.perf_counter()
    s.sendall(bytes(int(sys.argv[2])))
    s.shutdown(socket.SHUT_WR)
    assert s.recv(100).decode() == sys.argv[2]
    print(time.perf_counter() - began)
"""


def ask(lab, host: str, program: str, *arguments: object) -> str:
    """Run a program in a host to its end; what it printed."""
    command = lab.command(host, [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)])
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout


@contextmanager
def serving(lab, host: str, program: str):
    """A program that runs in a host during the block."""
    command = lab.command(host, [sys.executable, "-I", "-S", "-c", program])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "ready\n"
            yield
        finally:
            server.terminate()


def trips(lab, host: str, to: str, count: int = 20, wait: float = 60.0) -> list:
    """Seconds of every round trip of a small datagram; None where none came back in `wait` seconds."""
    return json.loads(ask(lab, host, TRIPS, lab.topology.host(to).address, count, wait))


def burst(lab, host: str, to: str, count: int) -> list[int]:
    """Which of so many small datagrams, sent without a pause, came back before two seconds without any."""
    return json.loads(ask(lab, host, BURST, lab.topology.host(to).address, count))


def pushes_faster(lab, host: str, to: str, num_bytes: int, seconds: float) -> bool:
    """Whether bytes ever take less than so many seconds over TCP: a busy machine may be slow many times."""
    return any(push(lab, host, to, num_bytes) < seconds for _ in range(20))


def push(lab, host: str, to: str, num_bytes: int) -> float:
    """Seconds that some bytes took over TCP."""
    return float(ask(lab, host, PUSH, lab.topology.host(to).address, num_bytes))
