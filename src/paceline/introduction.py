"""What rank 0 says of its job, so that others can tell whether it is theirs; and who found that it is not.

Invariant: the key of the job is never said: a nonce and a proof are, which who holds the key can check.
"""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

from paceline.handshake import is_proof, nonce, prove

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_ROLE = b"job"
_MOST_TOLD, _MOST_LETTERS = 20, 300


def introduce(token: str, world_size: int) -> str:
    """A nonce, a proof that rank 0 knows the key, and the number of processes."""
    made = nonce()
    return f"{made.hex()} {prove(token, _ROLE, 0, made, b'').hex()} {world_size}"


def is_introduced(said: str, token: str) -> bool:
    """Whether who said that has the same key."""
    try:
        made, proof, _ = said.split(" ")
        return is_proof(bytes.fromhex(proof), token, _ROLE, 0, bytes.fromhex(made), b"")
    except ValueError:
        return False


def tell_refusal(job: Store, what: str) -> None:
    """Let the user of rank 0 know of a process that does not belong here."""
    job.set(f"refused/{job.add('refused', 1)}", f"{socket.gethostname()}: {what}"[:_MOST_LETTERS])


class Refusals:
    """Those that have found out that they do not belong here, on rank 0."""

    def __init__(self, job: Store) -> None:
        self._job, self._told = job, 0

    def tell(self) -> None:
        """Say what is new; a stranger may write what it likes, so not more than a few short lines."""
        while self._told < min(self._job.add("refused", 0), _MOST_TOLD):
            key = f"refused/{self._told + 1}"
            if not self._job.check([key]):
                return
            self._told += 1
            text = self._job.get(key)[:_MOST_LETTERS].decode(errors="replace")
            printable = "".join(letter if letter.isprintable() else "?" for letter in text)
            sys.stderr.write(f"turned away, and still waiting: {printable}\n")
