"""Workers of a study on other machines, which take leases over the store that jobs use for their rendezvous.

Keys of the store, which the coordinator serves:

    study            JSON: folder of the study, its mark, and the length of a lease
    workers          number of workers that have joined; the first is 1
    worker/3         JSON: where worker 3 runs
    worker/3/beat    number of its heartbeats
    worker/3/offer/0 JSON: its first lease and what to run; {} at the end of the study
    lease/7/taken    the worker has begun
    lease/7          how it ended: JSON from the worker, or "expired" from the coordinator
    stop             the user has stopped the study

Invariants: a lease has one end, the one that was written first, by compare-and-set; so a report after the
expiry is rejected, and its worker reads that. Leases expire by the coordinator's clock. A run never outlives
its lease: its slot dies earlier, by its own clock, unless an answered heartbeat renews it.
Not done here: run folders are not sent; all machines see the study's folder.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError, DataError, format_count
from paceline.job.addresses import format_address, listen_at
from paceline.job.cluster import process_environment
from paceline.job.handshake import VISITOR_OFFSET
from paceline.job.rendezvous import StoreAccess, connect_store
from paceline.job.store_client import KeyTimeoutError, StoreClient
from paceline.job.store_protocol import ADD, CHECK, COMPARE, SET
from paceline.job.store_server import StoreServer
from paceline.launch.executor import Executor, ExecutorProcess, NodeRequest, ProcessReport
from paceline.launch.fork_client import fork_server
from paceline.search.job_executor import PRELOADED
from paceline.search.worker_slots import RunEnd, RunSlot, SlotPool, SlotRequest, WorkerSlot

_MARK = "coordinator"
_EXPIRED = b"expired"
_POLL_SECONDS = 0.25
_BACKLOG = 128
_BEATS_IN_LEASE = 8
_OWN_SHARE = 0.6  # of the lease, after which a slot that is not renewed dies, before the coordinator's clock
_LEAVE_SECONDS = 3.0
_JOIN_SECONDS = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class WorkerEntrance:
    """Where a coordinator listens for workers.

    Args:
        host, port: address; port 0 is a free one.
        token: the key that workers must know.
        lease_seconds: a worker without a heartbeat for so long is lost.
    """

    host: str
    port: int
    token: str
    lease_seconds: float = 20.0


# ---------------------------------------------------------------------- the coordinator


class RemoteSlot:
    """A worker on another machine, as a slot of the coordinator.

    Args:
        worker: its number, from 1.
        member: its number in the store, by which a lost connection is known.
        place: where it runs, for the user.
        client: a connection to the store of its own, since a wait occupies it.
        study: folder of the study.
        lease_seconds: see `WorkerEntrance`.
        on_lost: called, perhaps twice, when the slot can take no more leases.
        clock: the coordinator's, in seconds.
    """

    def __init__(
        self,
        worker: int,
        member: int,
        place: str,
        client: StoreClient,
        study: Path,
        lease_seconds: float,
        *,
        on_lost: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.place, self.member, self._client = worker, place, member, client
        self._study, self._lease_seconds, self._clock = study, lease_seconds, clock
        self._beats, self._last_beat = b"", clock()
        self._num_offers, self._is_lost, self._on_lost = 0, False, on_lost

    def is_lost(self) -> bool:
        """Return whether the worker hung up, or had no heartbeat for the length of a lease."""
        (beats,) = self._client.request(ADD, self._key("beat"), b"0")
        if beats != self._beats:
            self._beats, self._last_beat = beats, self._clock()
        is_late = self._clock() - self._last_beat > self._lease_seconds
        if not self._is_lost and (is_late or self.member in self._client.lost()):
            self._is_lost = True
            self._on_lost()
        return self._is_lost

    def run(self, request: SlotRequest, lease: int) -> RunEnd:
        """Offer a lease, and wait until the worker reports its end or the lease expires."""
        folder = Path(request.folder).relative_to(self._study)
        request = replace(request, folder=str(folder), lease_seconds=_OWN_SHARE * self._lease_seconds)
        self._offer({"lease": lease, "request": asdict(request)})
        key = f"lease/{lease}"
        while True:
            with suppress(KeyTimeoutError):
                end, reason = _read_end(self._client.wait([key], _POLL_SECONDS)[0])
                if end == "lost":  # the worker has left
                    self._on_lost()
                return end, reason
            if self.is_lost():
                return self._expire(key, lease)

    def stop(self) -> None:
        """Let the worker save its run and end."""
        self._client.request(SET, b"stop", b"1")

    def close(self) -> None:
        """Send the worker home, and hang up."""
        with suppress(CommunicationError):
            if not self.is_lost():
                self._offer({})
        self._client.close()

    def _expire(self, key: str, lease: int) -> RunEnd:
        (end,) = self._client.request(COMPARE, key.encode(), b"", _EXPIRED)
        if end != _EXPIRED:  # the report was first
            return _read_end(end)
        (is_taken,) = self._client.request(CHECK, f"{key}/taken".encode())
        reason = f"worker {self.worker} ({self.place}) was lost, lease {lease} has expired"
        return ("killed", reason) if is_taken == b"1" else ("lost", reason)

    def _offer(self, offer: Mapping[str, Any]) -> None:
        self._client.request(SET, self._key(f"offer/{self._num_offers}"), json.dumps(offer).encode())
        self._num_offers += 1

    def _key(self, name: str) -> bytes:
        return f"worker/{self.worker}/{name}".encode()


def _read_end(value: bytes) -> RunEnd:
    end, reason = json.loads(value)
    return end, reason


class LeaseServer:
    """The store of a study, and the workers that have joined.

    Args:
        entrance: where to listen.
        study: folder of the study.
        slots: receives a `RemoteSlot` for each worker.
        pool: receives the number of each slot.
        report: receives a line for the user.
    Raises:
        CommunicationError: the address is in use, or is not of this machine.
    """

    def __init__(
        self,
        entrance: WorkerEntrance,
        study: Path,
        slots: MutableMapping[int, RunSlot],
        pool: SlotPool,
        report: Report,
    ) -> None:
        self._entrance, self._study, self._slots, self._pool = entrance, study.resolve(), slots, pool
        self._report = report
        self._num_local, self._num_known, self._closing = len(slots), 0, threading.Event()
        try:
            listener = listen_at(entrance.host, entrance.port, _BACKLOG)
        except OSError as error:
            raise CommunicationError(
                f"cannot listen at {format_address(entrance.host, entrance.port)}: {error.strerror or error}",
                where="--listen",
                next_step="name an address of this machine with a free port, or port 0",
            ) from error
        self.port: int = listener.getsockname()[1]
        mark = secrets.token_hex(16)
        (self._study / _MARK).write_text(mark, encoding="utf-8")
        self._server = StoreServer(lambda text: report(text.rstrip()))
        self._server.admit(listener, entrance.token, tls=True)
        self._client = self._connect(0)
        about = {"folder": str(self._study), "mark": mark, "lease_seconds": entrance.lease_seconds}
        self._server.put("study", json.dumps(about))
        self._thread = threading.Thread(target=self._watch, daemon=True, name="study-workers")
        self._thread.start()

    @property
    def address(self) -> str:
        """The address at which workers connect."""
        return format_address(self._entrance.host, self.port)

    def close(self) -> None:
        """Send the workers home and end."""
        self._closing.set()
        self._thread.join()
        remote = {number: slot for number, slot in self._slots.items() if isinstance(slot, RemoteSlot)}
        for number, slot in remote.items():
            slot.close()
            self._slots.pop(number)
        members = {slot.member for slot in remote.values()}
        expires = time.monotonic() + _LEAVE_SECONDS
        with suppress(CommunicationError):
            while members - self._client.lost() and time.monotonic() < expires:
                time.sleep(_POLL_SECONDS / 5)
        self._client.close()
        self._server.close()

    def _connect(self, number: int) -> StoreClient:
        # behind the numbers that callers can claim
        return StoreClient(self._server.connection_for(2 * VISITOR_OFFSET + number))

    def _watch(self) -> None:
        """Let workers join, and remove those that are lost."""
        while not self._closing.wait(_POLL_SECONDS):
            num_joined = int(self._client.request(ADD, b"workers", b"0")[0])
            while self._num_known < num_joined:
                self._num_known += 1
                self._admit(self._num_known)
            for number, slot in [*self._slots.items()]:
                if isinstance(slot, RemoteSlot) and slot.is_lost():
                    self._report(f"worker {slot.worker} ({slot.place}) is gone")
                    self._slots.pop(number)

    def _admit(self, worker: int) -> None:
        with suppress(KeyTimeoutError):  # else it was lost before it could say where it is
            joined = json.loads(self._client.wait([f"worker/{worker}"], _JOIN_SECONDS)[0])
            number = self._num_local + worker - 1  # never used again, so that nobody holds an old one
            client, seconds = self._connect(worker), self._entrance.lease_seconds
            slot = RemoteSlot(
                worker,
                joined["member"],
                joined["place"],
                client,
                self._study,
                seconds,
                on_lost=lambda: self._pool.remove(number),
            )
            self._slots[number] = slot
            self._pool.add(number)
            self._report(f"worker {worker} ({slot.place}) has joined")


# ---------------------------------------------------------------------- a worker


class StudyWorker:
    """A worker with one slot.

    Args:
        access: where the coordinator listens, and the key.
        folder: of the study, as this machine sees it; None: as the coordinator does.
        patience_seconds: for how long the coordinator may be gone.
        report: receives a line for the user.
    """

    def __init__(
        self, access: StoreAccess, folder: Path | None, patience_seconds: float, report: Report
    ) -> None:
        self._access, self._folder = access, folder
        self._patience_seconds, self._report = patience_seconds, report
        self._is_leaving = False
        self._slot: WorkerSlot | None = None

    def is_leaving(self) -> bool:
        """Return whether the worker was asked to leave."""
        return self._is_leaving

    def leave(self) -> None:
        """Let the run save, give its lease back, and end; a signal handler can call this."""
        self._is_leaving = True
        if self._slot is not None:
            self._slot.stop()

    def work(self) -> None:
        """Take leases until the study ends.

        Raises:
            CommunicationError: the coordinator has another key, or is gone for too long.
            DataError: this machine does not see the folder of the study.
        """
        with fork_server(PRELOADED) as variables:
            environ = {**process_environment(), **variables}
            while True:
                # a new number each time: the store knows the old one as lost
                access = replace(self._access, number=1 + secrets.randbelow(VISITOR_OFFSET - 1))
                client = connect_store(access, self._patience_seconds)
                try:
                    with closing(client), self._one_slot(environ) as slot:
                        _WorkerConnection(self, access.number, client, slot).serve()
                        return
                except CommunicationError as error:
                    if self._is_leaving:
                        return
                    self._report(f"{error.what}; joining again")

    @contextmanager
    def _one_slot(self, environ: Mapping[str, str]) -> Iterator[WorkerSlot]:
        self._slot = slot = WorkerSlot(environ)
        try:
            yield slot
        finally:
            slot.close()


class _WorkerConnection:
    """A worker that has joined, until the study ends or a side is gone."""

    def __init__(self, worker: StudyWorker, member: int, client: StoreClient, slot: WorkerSlot) -> None:
        self._worker, self._member, self._client, self._slot = worker, member, client, slot
        self._lease: int | None = None
        self._over = threading.Event()

    def serve(self) -> None:
        """Take leases."""
        study = json.loads(self._client.wait(["study"], _JOIN_SECONDS)[0])
        folder = self._find_folder(study)
        number = int(self._client.request(ADD, b"workers", b"1")[0])
        place = {"member": self._member, "place": f"{socket.gethostname()}, process {os.getpid()}"}
        self._client.request(SET, f"worker/{number}".encode(), json.dumps(place).encode())
        self._worker._report(f"joined as worker {number}; the study is {folder}")
        seconds = study["lease_seconds"] / _BEATS_IN_LEASE
        beats = threading.Thread(target=self._send_heartbeats, args=(number, seconds), daemon=True)
        with ExitStack() as ending:
            ending.callback(beats.join)
            ending.callback(self._over.set)
            beats.start()
            for index in count():
                offer = self._next_offer(f"worker/{number}/offer/{index}")
                if not offer:
                    return
                self._take(offer, folder)

    def _find_folder(self, study: Mapping[str, Any]) -> Path:
        folder = self._worker._folder or Path(study["folder"])
        path = folder / _MARK
        if not path.is_file() or path.read_text(encoding="utf-8") != study["mark"]:
            raise DataError(
                f"this machine does not see the study's folder: '{folder}' is "
                + ("another one" if path.is_file() else "not there"),
                where="--out",
                next_step="mount the folder of the coordinator, and pass its path here as --out",
            )
        return folder.resolve()

    def _next_offer(self, key: str) -> Mapping[str, Any]:
        """Return the next lease; empty at the end of the study, or if this worker leaves."""
        while not self._worker.is_leaving():
            with suppress(KeyTimeoutError):
                offer: Mapping[str, Any] = json.loads(self._client.wait([key], _POLL_SECONDS)[0])
                return offer
        return {}

    def _take(self, offer: Mapping[str, Any], folder: Path) -> None:
        lease, request = offer["lease"], SlotRequest(**offer["request"])
        if self._worker.is_leaving():
            return
        self._client.request(SET, f"lease/{lease}/taken".encode(), b"1")
        self._worker._report(f"lease {lease}: {request.folder}")
        self._lease = lease
        end, reason = self._slot.run(replace(request, folder=str(folder / request.folder)), lease)
        self._lease = None
        if self._worker.is_leaving() and end == "stopped":
            end, reason = "lost", "its worker has left"
        report = json.dumps([end, reason]).encode()
        (answer,) = self._client.request(COMPARE, f"lease/{lease}".encode(), b"", report)
        outcome = "rejected: the lease has expired" if answer != report else f"{end} {reason}".rstrip()
        self._worker._report(f"lease {lease}: {request.folder}: {outcome}")
        if answer != report:
            raise CommunicationError(f"lease {lease} has expired, so the coordinator has lost this worker")

    def _send_heartbeats(self, number: int, seconds: float) -> None:
        """Renew the lease of the slot after each heartbeat that was answered."""
        try:
            while True:
                self._client.request(ADD, f"worker/{number}/beat".encode(), b"1")
                lease = self._lease
                if lease is not None and self._is_set(f"lease/{lease}"):
                    self._slot.kill()  # the coordinator has given the run to another worker
                else:
                    self._slot.renew()
                if self._is_set("stop"):
                    self._slot.stop()
                if self._over.wait(seconds):
                    return
        except CommunicationError:
            self._slot.kill()  # the main thread finds out, too, and reports it

    def _is_set(self, key: str) -> bool:
        return self._client.request(CHECK, key.encode())[0] == b"1"


def serve_leases(access: StoreAccess, folder: Path | None, patience_seconds: float, report: Report) -> None:
    """Work for a study until it ends or a signal arrives; raises the errors of `StudyWorker.work`."""
    worker = StudyWorker(access, folder, patience_seconds, report)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    worker.work()


# ---------------------------------------------------------------------- workers that an executor starts


@dataclass(frozen=True)
class ExecutorRequest:
    """The workers of a study that an executor starts.

    Args:
        executor: starts them; closed at the end of the study.
        nodes: the nodes that they need.
        log: file that receives what they print.
    """

    executor: Executor
    nodes: NodeRequest
    log: Path


class ExecutorWorkers:
    """Workers that an executor has started, followed until the end of the study.

    Args:
        request: the executor and its nodes.
        pool: fails when no worker is left.
        report: receives a line for the user.
    """

    def __init__(self, request: ExecutorRequest, pool: SlotPool, report: Report) -> None:
        self._executor, self._nodes, self._log = request.executor, request.nodes, request.log
        self._pool, self._report = pool, report
        self._closing = threading.Event()
        self._num_left = self._nodes.nodes * self._nodes.processes
        self._thread = threading.Thread(target=self._follow, daemon=True, name="study-executor")

    def reserve(self) -> None:
        """Reserve the nodes.

        Raises:
            CommunicationError: they are not free in time.
        """
        workers, nodes = format_count(self._num_left, "worker"), format_count(self._nodes.nodes, "node")
        self._report(f"starting {workers} on {nodes}; their output is in {self._log}")
        self._executor.reserve(self._nodes)

    def start(self, address: str, token: str) -> None:
        """Start the workers, which join the coordinator at an address; its key is in their variables."""
        words = ("tune", "work", address)
        self._executor.start(
            [
                ExecutorProcess("worker", node, words, {"PACELINE_TOKEN": token})
                for node in range(self._nodes.nodes)
                for _ in range(self._nodes.processes)
            ]
        )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def _follow(self) -> None:
        """Write down what the workers print, and report those that end before the study."""
        with self._log.open("a", encoding="utf-8") as log:
            while self._num_left:
                for report in self._executor.poll():
                    log.writelines(f"[{report.number}] {line}\n" for line in report.output.splitlines())
                    log.flush()
                    if report.ended:
                        self._note_end(report)
                if self._closing.wait(_POLL_SECONDS):
                    return

    def _note_end(self, report: ProcessReport) -> None:
        self._num_left -= 1
        if self._closing.is_set() or report.code == 0:
            return
        is_killed = report.code is not None and report.code < 0
        how = f"killed by signal {-(report.code or 0)}" if is_killed else f"exit code {report.code}"
        self._report(f"worker process {report.number} has ended: {report.reason or how}; see {self._log}")
        if not self._num_left:
            self._pool.fail(
                CommunicationError(
                    "all workers of the study have ended",
                    where=str(self._log),
                    next_step="see what they printed there; the same command continues the study",
                )
            )

    def close(self) -> None:
        """Wait a moment for workers that were sent home, and give the nodes back."""
        expires = time.monotonic() + _LEAVE_SECONDS
        while self._thread.is_alive() and self._num_left and time.monotonic() < expires:
            time.sleep(_POLL_SECONDS / 5)
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._executor.close()
