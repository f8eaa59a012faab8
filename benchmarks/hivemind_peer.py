"""A peer of Hivemind that averages one tensor with all others: the side of `diloco_libraries`.

As Hivemind's own optimizer does between rounds of local steps: a group is found through its hash table, and
every peer sums one part of the tensor (Ryabinin et al. 2021, Moshpit SGD). All other settings are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

_MEET_SECONDS = 60.0
_STEP, _TOLERANCE = 0.3, 0.1  # eight bits cut off beyond three deviations


class Peer:
    """A process of the hash table, and one that averages.

    Args:
        codec: "fp32", "fp16" or "8 bits".
        megabytes: of the tensor.
        address: of this host.
        num_peers: in the group; a round with fewer is an error.
        find: given what asks the first peer for its addresses, returns these, on every peer.
        rank: the first peer is 0.

    Raises:
        ImportError: Hivemind is not installed.
    """

    def __init__(
        self,
        codec: str,
        megabytes: int,
        address: str,
        num_peers: int,
        find: Callable[[Callable[[], list[str]]], list[str]],
        rank: int,
    ) -> None:
        import hivemind
        from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

        codecs: dict[str, Any] = {
            "fp32": NoCompression,
            "fp16": Float16Compression,
            "8 bits": Uniform8BitQuantization,
        }
        listen = {"host_maddrs": [f"/ip4/{address}/tcp/0"], "start": True}
        known = {} if rank == 0 else {"initial_peers": find(list)}
        self._table = hivemind.DHT(**known, **listen)
        if rank == 0:
            find(lambda: [str(one) for one in self._table.get_visible_maddrs()])
        self._num_peers = num_peers
        values = torch.randn(megabytes * 250_000)
        values[0] = _STEP * rank
        self._averager = hivemind.DecentralizedAverager(
            [values],
            self._table,
            prefix="outer",
            target_group_size=num_peers,
            compression=codecs[codec](),
            start=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self._averager.shutdown()
        self._table.shutdown()

    def meet(self) -> float:
        """One round; the first value of the tensor after it, the mean of all ranks.

        Raises:
            RuntimeError: not all peers were in it, or nothing was averaged: in 8 bits Hivemind 1.1.12 fails
                silently with NumPy 2.4.
        """
        found = self._averager.step(timeout=_MEET_SECONDS)
        if found is None or len(found) != self._num_peers:
            raise RuntimeError(f"{0 if found is None else len(found)} peers met, not {self._num_peers}")
        with self._averager.get_tensors() as tensors:
            value = float(tensors[0][0])
        if abs(value - _STEP * (self._num_peers - 1) / 2) > _TOLERANCE:
            raise RuntimeError(f"Hivemind did not average: {value}")
        return value
