"""Hashes of the state: of a whole, which do not depend on the layout, and of what each rank holds of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.job.mesh import Mesh
from paceline.parallel.state_transfer import gather_in_slices
from paceline.state.slot import TensorPiece
from paceline.state.train_state import TrainState


def tensor_sha256(x: Tensor) -> str:
    """SHA-256, in hex, of dtype, shape and bytes in row-major order."""
    found = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def state_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of a whole state: of the names and hashes of its tensors, by name.

    Equal for every layout, number of ranks and of lanes that holds these bits.
    """
    return _combine_sha256({name: tensor_sha256(tensor) for name, tensor in tensors.items()})


def _combine_sha256(shas: Mapping[str, str]) -> str:
    text = "".join(f"{name} {shas[name]}\n" for name in sorted(shas))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class StateDivergence:
    """Ranks that should hold the same bits and do not.

    Args:
        tensor: its name in the state; the first in the order of the state.
        ranks: those that differ from most; all of them if no bits are held by most.
        step: after which it was seen.
    """

    tensor: str
    ranks: Sequence[int]
    step: int

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]} differs" if len(self.ranks) == 1 else f"ranks {self.ranks} differ"
        return f"{who} in '{self.tensor}' after step {self.step}"


def find_divergence(state: TrainState, mesh: Mesh, net: Net) -> StateDivergence | None:
    """Compare what ranks hold in common; collective, equal on every rank.

    Wire: one all_gather of about 100 bytes for each tensor of the state.
    """
    mine = [_hash_piece(piece) for piece in state.replicated_pieces()]
    tables = [json.loads(text) for text in all_gather_texts(json.dumps(mine), mesh.world, net)]
    held: dict[tuple[str, str], dict[int, str]] = {}
    for rank, table in enumerate(tables):
        for name, part, sha in table:
            held.setdefault((name, part), {})[rank] = sha
    for (name, _), found in held.items():
        wrong = _diverging_ranks(found)
        if wrong:
            return StateDivergence(name, wrong, state.step - 1)
    return None


def _hash_piece(piece: TensorPiece) -> tuple[str, str, str]:
    return piece.slot.name, str(piece.slot.part), tensor_sha256(piece.tensor)


def _diverging_ranks(found: Mapping[int, str]) -> list[int]:
    """Ranks without the bits that most hold; all, if no bits are held by most."""
    shas = list(found.values())
    most = max(set(shas), key=shas.count)
    if shas.count(most) == len(shas):
        return []
    clear = 2 * shas.count(most) > len(shas)
    return [rank for rank, sha in found.items() if sha != most or not clear]


def whole_sha256(state: TrainState, mesh: Mesh, net: Net) -> str:
    """The hash of the whole state; collective, equal on every rank, which has one slice of it at a time.

    Wire: as `take_snapshot`, and a table of names for every slice.
    """
    shas: dict[str, str] = {}
    pieces = state.pieces()
    for group, apart in ((mesh.inside, False), (mesh.world, True)):
        own = [piece for piece in pieces if ("replica" in piece.slot.axes) == apart]
        for tensors in gather_in_slices(own, group, net):
            shas |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    return _combine_sha256(shas)
