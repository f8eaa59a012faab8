"""Versions of a policy: the weights with which actors act while the learner is ahead of them.

The learner publishes its weights before each iteration. With `rl.age = S`, iteration k is played with those
of k - S, or with the first ones: a fixed lag, and not whichever weights an actor has when it begins. So an
actor can play up to S iterations ahead, no row is older than S, and rows do not depend on its speed.

Invariant: the versions that later iterations need are state, so a resumed run plays them with the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.rl.normalizers import Normalizers
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot


class PolicyVersion(NamedTuple):
    """Weights and normalizers as they were before an iteration.

    Args:
        iteration: before which the learner published them.
        updates: that the learner had made.
        model: not changed by the learner, unless the age is 0.
        normalizers: not changed afterwards, unless the age is 0.
        sha: 16 bytes that depend on every bit of the model.
    """

    iteration: int
    updates: int
    model: nn.Module
    normalizers: Normalizers
    sha: bytes


class PolicyVersions(ExtraState):
    """The versions that present and later iterations are played with, by the iteration of their publication.

    Args:
        age: S, iterations that actors may be behind.
        network: a model of the same modules, which is copied.
        normalizers: of the run, which are copied.
    """

    def __init__(self, age: int, network: nn.Module, normalizers: Normalizers) -> None:
        self.age, self._normalizers = age, normalizers
        self._network = deepcopy(network).requires_grad_(False) if age else network
        self._versions: dict[int, PolicyVersion] = {}

    def publish(self, iteration: int, updates: int, model: nn.Module) -> PolicyVersion:
        """Return the version with the present weights, once for each iteration.

        Args:
            iteration: that the learner begins.
            updates: that it has made.
            model: whole; with an age of 0 it is used itself.
        """
        if iteration not in self._versions:
            # A copy for actors that play while the learner changes its own.
            acting = self._copy(model.state_dict(), model) if self.age else model
            normalizers = deepcopy(self._normalizers) if self.age else self._normalizers
            self._versions[iteration] = PolicyVersion(
                iteration, updates, acting, normalizers, weights_hash(model)
            )
        return self._versions[iteration]

    def of(self, iteration: int) -> PolicyVersion:
        """Return the version with which an iteration is played: S iterations older, or the oldest one."""
        return self._versions[max(iteration - self.age, min(self._versions))]

    def forget(self, iteration: int) -> None:
        """Drop the versions that no iteration after this one is played with."""
        oldest = iteration + 1 - self.age
        self._versions = {number: version for number, version in self._versions.items() if number >= oldest}

    def pieces(self) -> list[TensorPiece]:
        """Return weights, normalizers and the number of updates of each version."""
        tensors = dict[str, Tensor]()
        for number, version in self._versions.items():
            tensors |= {f"{number}/model/{name}": x for name, x in version.model.state_dict().items()}
            tensors |= {
                f"{number}/normalizers/{piece.slot.name}": piece.tensor
                for piece in version.normalizers.pieces()
            }
            tensors[f"{number}/updates"] = torch.tensor([version.updates])
        return [
            TensorPiece(TensorSlot.whole(name, value), value)
            for name, value in tensors.items()
            if value.numel()
        ]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned; a state of weights alone has none of it."""
        self._versions = {}
        for number in sorted({int(name.partition("/")[0]) for name in tensors}):
            self._versions[number] = self.read(
                number,
                int(tensors[f"{number}/updates"]),
                _below(tensors, f"{number}/model/"),
                _below(tensors, f"{number}/normalizers/"),
            )

    def read(
        self, number: int, updates: int, weights: Mapping[str, Tensor], normalizers: Mapping[str, Tensor]
    ) -> PolicyVersion:
        """Return a version from the tensors of its model and of its normalizers."""
        copied = deepcopy(self._normalizers)
        copied.load(normalizers)
        model = self._copy(weights, self._network)
        return PolicyVersion(number, updates, model, copied, weights_hash(model))

    def _copy(self, weights: Mapping[str, Tensor], like: nn.Module) -> nn.Module:
        model = deepcopy(self._network)
        model.load_state_dict(weights)
        device = next((x.device for x in like.state_dict().values()), torch.device("cpu"))
        return model.to(device).eval()


def weights_hash(model: nn.Module) -> bytes:
    """Return 16 bytes that depend on every bit of the parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
