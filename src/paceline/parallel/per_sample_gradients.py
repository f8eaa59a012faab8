"""Gradients of single samples, each clipped before anything is added, by `torch.func`.

`vmap` over `grad` runs the loss of the task on each sample of a micro-batch as a batch of one, so no sample
has an influence on what another one adds. The loss of a sample is the mean over its items (its tokens). A
sample whose gradient is not finite adds nothing.

Not done here: noise, which is added once to the sum of all ranks (`paceline.privacy`), and models whose
forward depends on values or writes to buffers: `torch.func` refuses them, and BatchNorm is refused by name.
Exactness: with no sample above the clip norm, the sum of the gradients is that of plain training with one
item for each sample, up to the order of additions; tests/parity/test_private_samples.py.
Source: Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.data.work import MicroBatch
from paceline.errors import TaskError
from paceline.models.dropout import KeyedDropout
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.model_runner import LossSums, check_loss
from paceline.parallel.rng_state import seed_micro_batch
from paceline.task import Loss


class ParameterPlaces:
    """The places of the trained parameters in the modules of a model, where other weights can be put.

    It does what `torch.func.functional_call` does, without the checks, which take as long as a small forward;
    and a loss may use its model as it likes.

    Args:
        model: whole.
        parameters: in the order of the weights; a tied one has several places.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        numbers = {id(p): number for number, p in enumerate(parameters)}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, int]] = [
            (module._parameters, name, p, numbers[id(p)])
            for module in model.modules()
            for name, p in module._parameters.items()
            if p is not None and id(p) in numbers
        ]

    @contextmanager
    def replaced(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Put weights in the places of the parameters within the block."""
        try:
            for table, name, _, number in self._places:
                table[name] = weights[number]
            yield
        finally:
            for table, name, p, _ in self._places:
                table[name] = p


class PerSampleRunner(ReplicatedRunner):
    """Runner of a whole model that sums clipped gradients of samples.

    Args:
        clip_norm: largest norm of the gradient of a sample.
        others: as of `ReplicatedRunner`.
    """

    def __init__(self, *args: Any, clip_norm: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clip_norm = clip_norm
        self._parameters = [*self.sharded_model.computes.values()]
        self._places = ParameterPlaces(self._model, self._parameters)
        _refuse_keyed_dropout(self)

    def _begin(self, num_micro_batches: int) -> LossSums:
        sums = super()._begin(num_micro_batches)
        # Zeros also without a sample: which parameters have a gradient must not depend on the samples.
        for p in self._parameters:
            p.grad = torch.zeros_like(p)
        return sums

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: LossSums, scale: float) -> None:
        """Add the clipped gradients of the samples of a micro-batch, times the scale of losses."""
        self._phases.begin("forward")
        seed_micro_batch(micro_batch.key, self._device if self._seeds else None, self._dropouts)
        leaves, spec = tree_flatten(batch)
        num_samples = len(micro_batch.indices)
        for leaf in leaves:
            if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == num_samples):
                raise TaskError(
                    f"a batch of {num_samples} samples has a value that is no tensor [{num_samples}, ...]:"
                    f" {type(leaf).__name__} {list(getattr(leaf, 'shape', ()))}",
                    where='private.unit = "sample"',
                    next_step="let the collate function return tensors with the samples along the first"
                    " dimension",
                )
        constants: dict[str, float] = {}

        def loss_of_sample(weights: list[Tensor], *values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            one = tree_unflatten([value.unsqueeze(0) for value in values], spec)
            with self.precision.autocast(), self._places.replaced(weights):
                loss = check_loss(self._loss(self._model, one))
            # A metric may have the name of the loss or of the count.
            columns = {"total": loss.total, "count": loss.count, **_prefixed(loss)}
            constants.update({n: float(v) for n, v in columns.items() if not isinstance(v, Tensor)})
            tensors = {name: v.detach() for name, v in columns.items() if isinstance(v, Tensor)}
            return (loss.total / loss.count).to(torch.float32), tensors

        gradients = vmap(
            grad(loss_of_sample, has_aux=True), in_dims=(None, *[0] * len(leaves)), randomness="different"
        )
        try:
            with self._write_guard:
                grads, columns = gradients([p.detach() for p in self._parameters], *leaves)
        except RuntimeError as error:
            raise TaskError(
                f"torch.func cannot take the gradient of each sample of this model: {error}",
                where='private.unit = "sample"',
                next_step="leave out modules that write to buffers or decide by values, or protect clients"
                ' (private.unit = "client")',
            ) from error
        self._phases.begin("backward")
        self._add_clipped(grads, scale)
        summed = {name: float(value.sum()) for name, value in columns.items()}
        summed |= {name: value * num_samples for name, value in constants.items()}
        total, count = torch.tensor(summed.pop("total"), dtype=torch.float64), summed.pop("count")
        sums.add(Loss(total, count, {name[1:]: value for name, value in summed.items()}))
        self.buffers.end_micro_batch()
        self.gradients.close()

    @torch.no_grad()
    def _add_clipped(self, grads: list[Tensor], scale: float) -> None:
        """Add gradients [samples, ...] to those of the parameters, each shortened to the clip norm."""
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]).to(torch.float64)
        norm = torch.linalg.vector_norm(norms, dim=0)
        is_finite = torch.isfinite(norm)
        factor = torch.where(is_finite, (self._clip_norm / norm).clamp(max=1.0), 0.0) * scale
        if not bool(is_finite.all()):
            # A factor of 0 leaves NaN as it is, and who looks at the sum would see that such a sample exists.
            grads = [torch.where(is_finite.view(-1, *[1] * (g.dim() - 1)), g, 0.0) for g in grads]
        for p, g in zip(self._parameters, grads, strict=True):
            assert p.grad is not None
            p.grad += torch.tensordot(factor.to(g.dtype), g, dims=1)


def _prefixed(loss: Loss) -> dict[str, Any]:
    return {f" {name}": value for name, value in loss.metrics.items()}


def _refuse_keyed_dropout(runner: PerSampleRunner) -> None:
    """Refuse dropout by name and step: all samples of a micro-batch would have the same mask."""
    for name, module in runner.sharded_model.model.named_modules():
        if isinstance(module, KeyedDropout) and module.p > 0:
            raise TaskError(
                f"'{name}' is a KeyedDropout, whose masks are those of a whole micro-batch",
                where='private.unit = "sample"',
                next_step="use nn.Dropout, or a rate of 0",
            )
