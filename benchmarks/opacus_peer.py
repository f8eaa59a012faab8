"""DP-SGD by Opacus, as its users write it; it is imported only where it is installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

MODES = ("hooks", "functorch")
"""How Opacus computes gradients of samples; hooks are its default."""


class OpacusRun:
    """A training loop around `PrivacyEngine.make_private`.

    Args:
        task: its data is a `TensorDataset`.
        mode: one of `MODES`.
        reads_at_once: draw the Poisson batches here and index the rows of the tensors, in place of Opacus's
            loader, which reads and collates sample by sample.
        noise, expected: as of Paceline; None: the same.
    """

    def __init__(
        self,
        task: Any,
        mode: str,
        *,
        reads_at_once: bool = False,
        noise: float | None = None,
        expected: int | None = None,
    ) -> None:
        from opacus import PrivacyEngine

        from benchmarks.private import CLIP, EXPECTED, NOISE, RATE

        warnings.filterwarnings("ignore", message=".*Secure RNG turned off.*")
        warnings.filterwarnings("ignore", message=".*[Ff]ull backward hook is firing.*")
        self._tensors, size = task.data.tensors, expected or EXPECTED
        self.model: nn.Module = task.model.train()
        self._rate = size / len(task.data)
        self._engine = PrivacyEngine()  # PRV accountant
        self._private, self._optimizer, loader = self._engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=RATE),
            data_loader=DataLoader(task.data, batch_size=size),
            noise_multiplier=NOISE if noise is None else noise,
            max_grad_norm=CLIP,
            grad_sample_mode=mode,
        )
        self._batches = self._indexed() if reads_at_once else self._loaded(loader)

    @property
    def history(self) -> tuple[float, float, int]:
        """Noise, probability and number of the steps that were made."""
        (entry,) = self._engine.accountant.history
        return entry

    def step(self) -> float:
        """One step; the mean loss of its samples."""
        x, y = next(self._batches)
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._private(x), y)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def _loaded(self, loader: Any) -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    def _indexed(self) -> Iterator[list[Tensor]]:
        while True:
            drawn = (torch.rand(len(self._tensors[0])) < self._rate).nonzero().flatten()
            yield [tensor[drawn] for tensor in self._tensors]


def epsilons_of_opacus(history: tuple[float, float, int], delta: float) -> dict[str, float]:
    """Epsilon of some steps by each accountant of Opacus."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    found = {}
    for kind in (PRVAccountant, RDPAccountant):
        accountant = kind()
        accountant.history = [history]
        found[f"Opacus, {accountant.mechanism().upper()}"] = float(accountant.get_epsilon(delta))
    return found
