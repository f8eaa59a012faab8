"""Hashes of the training state: of the whole, independent of the layout, and of what ranks hold in common.

Invariant: the hash of the whole state is equal for every layout that holds the same bits. Hashing gathers one
slice at a time, so it needs no memory for a whole model.
"""

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
    """Return the SHA-256, in hex, of dtype, shape and bytes in row-major order."""
    # Dtype and shape go in first: equal bytes alone do not mean equal tensors.
    sha = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    sha.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def state_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of the names and hashes of all tensors of a whole state, sorted by name.

    It is equal for every layout, number of ranks and number of lanes that holds these bits.
    """
    return _combine_sha256({name: tensor_sha256(tensor) for name, tensor in tensors.items()})


def _combine_sha256(shas: Mapping[str, str]) -> str:
    text = "".join(f"{name} {shas[name]}\n" for name in sorted(shas))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class StateDivergence:
    """Ranks that should hold the same bits but do not.

    Args:
        tensor: name of the first such tensor in the order of the state.
        ranks: ranks that differ from the majority; all of them if no majority agrees.
        step: step after which it was found.
    """

    tensor: str
    ranks: Sequence[int]
    step: int

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]} differs" if len(self.ranks) == 1 else f"ranks {self.ranks} differ"
        return f"{ranks} in '{self.tensor}' after step {self.step}"


def find_divergence(state: TrainState, mesh: Mesh, net: Net) -> StateDivergence | None:
    """Compare what ranks hold in common; collective, equal on every rank.

    Returns:
        The first divergence, or None if all copies are equal.
    Wire: one all_gather of about 100 bytes for each tensor of the state.
    """
    # Hashes travel instead of tensors.
    mine = [_hash_piece(piece) for piece in state.replicated_pieces()]
    tables = [json.loads(text) for text in all_gather_texts(json.dumps(mine), mesh.world, net)]
    sha_by_rank: dict[tuple[str, str], dict[int, str]] = {}
    for rank, table in enumerate(tables):
        for name, box, sha in table:
            # By part, too: only ranks that hold the same part of a tensor must agree.
            sha_by_rank.setdefault((name, box), {})[rank] = sha
    for (name, _), shas in sha_by_rank.items():
        wrong = _diverging_ranks(shas)
        if wrong:
            # `state.step` counts the steps taken, so the last step has the number before it.
            return StateDivergence(name, wrong, state.step - 1)
    return None


def _hash_piece(piece: TensorPiece) -> tuple[str, str, str]:
    return piece.slot.name, str(piece.slot.part), tensor_sha256(piece.tensor)


def _diverging_ranks(sha_by_rank: Mapping[int, str]) -> list[int]:
    """Return the ranks whose bits differ from the majority; all of them if there is no majority."""
    shas = list(sha_by_rank.values())
    majority = max(set(shas), key=shas.count)
    if shas.count(majority) == len(shas):
        return []
    is_majority = 2 * shas.count(majority) > len(shas)
    return [rank for rank, sha in sha_by_rank.items() if sha != majority or not is_majority]


def whole_sha256(state: TrainState, mesh: Mesh, net: Net) -> str:
    """Return the hash of the whole state, one slice in memory at a time; collective, equal on every rank.

    Wire: as `take_snapshot`, and a table of names for every slice.
    """
    shas: dict[str, str] = {}
    pieces = state.pieces()
    # Servers hold parts of a tensor on several replicas, so these are gathered over all ranks.
    for group, is_per_replica in ((mesh.inside, False), (mesh.world, True)):
        local_pieces = [piece for piece in pieces if ("replica" in piece.slot.axes) == is_per_replica]
        for tensors in gather_in_slices(local_pieces, group, net):
            shas |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    return _combine_sha256(shas)
