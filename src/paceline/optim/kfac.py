"""K-FAC: the gradient of a layer between the inverses of two factors of its curvature.

The factors of a layer are second moments of its inputs (A) and of the gradients of its outputs (G), collected
by hooks in the backward passes of a step, and summed over the ranks that share its samples. Each rank inverts
some of them. Everything else that a model has is updated by SGD with momentum, the base optimizer.

Invariant: factors and inverses have equal bits on all ranks, and the divisor of a factor is the number of
samples of the global batch, however these are divided into micro-batches and among ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from paceline.comm.net import Net
from paceline.errors import NumericError, TaskError, format_count
from paceline.job.mesh import RankGroup
from paceline.optim.compatibility import require_whole_passes
from paceline.optim.muon import assign_by_cost
from paceline.optim.slot_norms import SlotOptimizer

_FACTORS = "kfac"
_REUSED = "runs several times in a forward"


@dataclass(frozen=True)
class CurvatureLayer:
    """A layer whose gradient is preconditioned.

    Args:
        name: of the module, in the model.
        module: a linear or convolution layer that shares no parameter.
        has_bias: its bias is trained as well; it is a further column of the weight, whose input is 1.
    """

    name: str
    module: nn.Module
    has_bias: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of its parameters."""
        prefix = f"{self.name}." if self.name else ""
        return (f"{prefix}weight", f"{prefix}bias") if self.has_bias else (f"{prefix}weight",)

    @property
    def weight(self) -> Tensor:
        """Return its weight; under ZeRO-3 without memory between its uses."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its products and inverses: its own, but at least float32."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of rows of A and G."""
        return self.weight.shape[1:].numel() + self.has_bias, self.weight.shape[0]

    def input_rows(self, x: Tensor) -> tuple[Tensor, int]:
        """Return what each output is a product with, [samples x locations, inputs], and the samples."""
        module = self.module
        if isinstance(module, nn.Linear):
            rows, samples = x.reshape(-1, x.shape[-1]), x.shape[0] if x.dim() > 1 else 1
        else:
            assert isinstance(module, nn.Conv1d | nn.Conv2d)
            num_dims = len(module.kernel_size)
            x = x if x.dim() == num_dims + 2 else x.unsqueeze(0)
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            x = x if num_dims == 2 else x.unsqueeze(-2)
            kernel, dilation, stride = (
                (1,) * (2 - num_dims) + tuple(value)
                for value in (module.kernel_size, module.dilation, module.stride)
            )
            patches = F.unfold(x, kernel, dilation, 0, stride)
            rows, samples = patches.transpose(1, 2).reshape(-1, patches.shape[1]), len(x)
        return (F.pad(rows, (0, 1), value=1.0) if self.has_bias else rows), samples

    def output_rows(self, grad: Tensor) -> Tensor:
        """Return the gradients of the outputs, [samples x locations, outputs]."""
        if not isinstance(self.module, nn.Linear):
            num_dims = self.weight.dim() - 2
            grad = grad.movedim(-num_dims - 1, -1)
        return grad.reshape(-1, grad.shape[-1])


class KFac(SlotOptimizer):
    """K-FAC for linear and convolution layers, and SGD with momentum for all other parameters.

    With V the gradient of a layer, its update is that of SGD for G^-1 V A^-1, where A = mean of a a' over the
    samples of the global batch and G = mean of g g', for inputs a and output gradients g of a sample; in a
    convolution A sums over locations, and G takes their mean. Gradients are those of the loss itself and not
    of targets that are drawn from the model, so the factors are those of the empirical Fisher matrix.

    Args:
        model: its layers are watched by hooks.
        params: parameters, named parameters or groups of them; None: all of the model that are trained.
        lr: of preconditioned and of other parameters.
        momentum: share of the last update that is kept.
        weight_decay: times the parameter, added to the preconditioned gradient.
        damping: added to the curvature, divided between both factors by their traces. With 0 a singular
            factor is an error.
        factor_decay: share of the old factors that an update of the factors keeps.
        factor_interval, inverse_interval: updates from one update of factors or inverses to the next.
        kl_clip: largest sum of lr^2 u'V over preconditioned layers, with u their updates; longer ones are
            shortened together. None: no limit.

    Attributes:
        fallbacks: parameters that SGD updates, each with the reason.
        not_run: layers whose weight has had a gradient without a forward of the layer; SGD updates them.
    Raises:
        TaskError: an option is out of its range.
    Wire: in an update of factors one all_reduce of 4 n (n + 1) bytes for each factor [n, n], in one of
        inverses another; and under ZeRO-1 in every update one of the gradients of the layers.
    Exactness: products in the dtype of the layer, sums and inverses in float64; tests/parity/test_kfac.py.
    Source: Martens & Grosse 2015, arXiv:1503.05671, sections 3 and 6.3; Grosse & Martens 2016,
        arXiv:1602.01407, section 3.1 (convolutions); Ba, Grosse & Martens 2017, Distributed Second-Order
        Optimization using Kronecker-Factored Approximations, section 5 (the limit of an update); Pauloski et
        al. 2021, KAISA, arXiv:2107.01739 (inversions are assigned to ranks).
    """

    shared_moments: ClassVar[frozenset[str]] = frozenset({_FACTORS})
    collects_in_backward: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        lr: float = 0.3,
        *,
        momentum: float = 0.8,
        weight_decay: float = 0.0,
        damping: float = 0.03,
        factor_decay: float = 0.95,
        factor_interval: int = 1,
        inverse_interval: int = 10,
        kl_clip: float | None = 0.01,
    ) -> None:
        if damping < 0 or min(factor_interval, inverse_interval) < 1 or not 0 <= factor_decay < 1:
            raise TaskError(
                f"KFac got damping = {damping:g}, factor_decay = {factor_decay:g}, factor_interval ="
                f" {factor_interval} and inverse_interval = {inverse_interval}",
                next_step="expected damping >= 0, 0 <= factor_decay < 1, and intervals of 1 or more",
            )
        if params is None:
            params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "updates": 0})
        self.damping, self.factor_decay, self.kl_clip = damping, factor_decay, kl_clip
        self.factor_interval, self.inverse_interval = factor_interval, inverse_interval
        # Public, since the oracle repeats an update with copies of the public attributes.
        self.statistics: dict[str, dict[str, Any]] = {}
        self.loss_scale: float | None = None
        self.fallbacks: dict[str, str] = {}
        self.not_run: set[str] = set()
        self._names = {p: name for name, p in model.named_parameters()}
        self._layers = self._find_layers(model)
        self._last_pass: dict[str, int] = {}
        self._ranks: tuple[Net, RankGroup] | None = None
        self._log: Callable[[str], None] = lambda text: None
        for layer in self._layers:
            layer.module.register_forward_hook(_forward_hook(self, layer), with_kwargs=True)

    def _find_layers(self, model: nn.Module) -> list[CurvatureLayer]:
        """Return the layers that can be preconditioned; note why other parameters are not."""
        own = {p for options in self.param_groups for p in options["params"]}
        uses: dict[nn.Parameter, int] = {}
        for module in model.modules():
            for p in module._parameters.values():
                if p is not None:
                    uses[p] = uses.get(p, 0) + 1
        layers = []
        for name, module in model.named_modules():
            trained = [p for p in module._parameters.values() if p is not None and p in own]
            if not trained:
                continue
            if reason := _reason_against(module, trained, uses):
                self.fallbacks |= {self._names[p]: reason for p in trained}
            else:
                layers.append(CurvatureLayer(name, module, module._parameters["bias"] in own))
        return layers

    def on_build(self, session: Any) -> None:
        """Take the ranks that share the samples, and log what is preconditioned.

        Raises:
            StrategyError: a rank runs parts of the model or of a sample, or does not run the global step.
        """
        require_whole_passes(session, type(self).__name__, allows_shards=True)
        context = session.session_base.context
        self._ranks, self._log = (session.net, session.mesh.data), context.warn
        if context.trains:
            context.warn(f"optimizer: {self.describe()}")
            context.note("kfac", {"layers": [x.name for x in self._layers], "fallbacks": self.fallbacks})

    def describe(self) -> str:
        """Return a sentence about which layers are preconditioned, and why others are not."""
        names = ", ".join(layer.name or "the model" for layer in self._layers) or "none"
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.fallbacks.items():
            by_reason.setdefault(reason, []).append(name)
        others = "; ".join(f"{', '.join(found)} ({reason})" for reason, found in by_reason.items())
        text = f"K-FAC for {format_count(len(self._layers), 'layer')} ({names})"
        return f"{text}; SGD for {others}" if others else text

    def begin_backward(self, scale: float, losses: object = None) -> None:
        """Drop what was collected; the next backward passes are those of a step.

        Args:
            scale: factor of the losses, which are sums over samples. Without this call, as in a plain loop,
                the loss is taken for a mean over the samples.
            losses: not used.
        """
        self.loss_scale = scale
        self.statistics.clear()
        self._last_pass.clear()

    @property
    def collects(self) -> bool:
        """Return whether the next update changes the factors."""
        return bool(self.param_groups[0]["updates"] % self.factor_interval == 0)

    def add_sample_rows(self, layer: CurvatureLayer, x: Tensor, grad: Tensor) -> None:
        """Add the products of one backward pass through a layer; called by its hook."""
        if layer.name in self.statistics and self._last_pass.get(layer.name) == _backward_id():
            self.mark_reused(layer, _REUSED)
            return
        self._last_pass[layer.name] = _backward_id()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            inputs, num_samples = layer.input_rows(x)
            outputs = layer.output_rows(grad)
            inputs, outputs = inputs.to(layer.dtype), outputs.to(layer.dtype)
            # Rounded sums depend on how a batch is divided; those of float64 do not, in digits of float32.
            a = (inputs.T @ inputs).double()
            g = (outputs.T @ outputs).double() * (num_samples / max(1, len(outputs)))
        sums = self.statistics.setdefault(layer.name, {"samples": 0})
        sums["a"] = sums["a"].add_(a) if "a" in sums else a
        sums["g"] = sums["g"].add_(g) if "g" in sums else g
        sums["samples"] += num_samples

    def mark_reused(self, layer: CurvatureLayer, reason: str) -> None:
        """Let SGD update a layer from now on; all ranks learn it in the next update of the factors."""
        if layer.parameters[0] not in self.fallbacks:
            self.fallbacks |= dict.fromkeys(layer.parameters, reason)
            self._log(f"optimizer: SGD updates {', '.join(layer.parameters)}: the layer {reason}")

    @property
    def _shared_state(self) -> dict[str, Any]:
        """Return the state, whose keys PyTorch declares to be parameters."""
        return cast("dict[str, Any]", self.state)

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; collective."""
        updates = self.param_groups[0]["updates"]
        if self.collects:
            self._update_factors()
        factors: dict[str, dict[str, Tensor]] = self._shared_state.get(_FACTORS, {})
        is_new = any("a_inverse" not in of_layer for of_layer in factors.values())
        if is_new or updates % self.inverse_interval == 0:
            self._update_inverses(factors)
        directions, factor = self._precondition(factors)
        self._log_missing(factors)
        for options in self.param_groups:
            options["updates"] += 1
            for p in options["params"]:
                if p.grad is None:
                    continue
                name, direction = self._name_of(p), p.grad
                if name in directions:
                    index = () if self._bound is None else self._bound.slots[p].index
                    direction = (directions[name][index] * factor).to(p.dtype)
                self._descend(p, direction, options)
        self.statistics.clear()

    def _log_missing(self, factors: Mapping[str, object]) -> None:
        """Log the layers that have a gradient without a forward of their own, once for each."""
        for layer in self._layers:
            is_logged = layer.name in self.not_run or layer.parameters[0] in self.fallbacks
            if layer.name not in factors and layer.weight.grad is not None and not is_logged:
                self.not_run.add(layer.name)
                self._log(f"optimizer: SGD updates {', '.join(layer.parameters)}: its forward has not run")

    def _descend(self, p: Tensor, direction: Tensor, options: dict[str, Any]) -> None:
        if options["weight_decay"]:
            direction = direction.add(p, alpha=options["weight_decay"])
        if options["momentum"]:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            direction = state["momentum_buffer"].mul_(options["momentum"]).add_(direction)
        p.sub_(direction, alpha=options["lr"])

    def _update_factors(self) -> None:
        """Move the factors towards the means over the samples of all ranks; collective."""
        head = torch.zeros(2, len(self._layers), dtype=torch.float64, device=self._device)
        rows = []
        for i, layer in enumerate(self._layers):
            sums = self.statistics.get(layer.name, {})
            head[0, i], head[1, i] = sums.get("samples", 0), layer.parameters[0] in self.fallbacks
            for key, size in zip("ag", layer.sizes, strict=True):
                matrix = sums[key] if key in sums else head.new_zeros(size, size)
                rows.append(matrix[tuple(torch.tril_indices(size, size))])
        flat = self.sum_over_ranks(torch.cat([head.view(-1), *rows]))
        samples, reused = (row.tolist() for row in flat[: head.numel()].view(head.shape))
        parts = iter(flat[head.numel() :].split([len(row) for row in rows]))
        factors: dict[str, Any] = self._shared_state[_FACTORS]
        for layer, count, is_reused in zip(self._layers, samples, reused, strict=True):
            matrices = [_symmetric(next(parts), size) for size in layer.sizes]
            if is_reused:
                self.mark_reused(layer, _REUSED)
                factors.pop(layer.name, None)
            elif count:
                # The gradient of a sample: a step scales its losses, and a plain loop takes their mean.
                scale = 1 / count if self.loss_scale is None else self.loss_scale
                kept = factors.setdefault(layer.name, {})
                for key, total, divisor in zip("ag", matrices, (count, count * scale**2), strict=True):
                    mean = total / divisor
                    kept[key] = mean if key not in kept else kept[key].lerp_(mean, 1 - self.factor_decay)

    def _update_inverses(self, factors: Mapping[str, dict[str, Tensor]]) -> None:
        """Invert the damped factors, each on one rank, and send the inverses to all; collective.

        Raises:
            NumericError: a factor is singular; on all ranks alike.
        """
        layers = [layer for layer in self._layers if layer.name in factors]
        sizes = [size for layer in layers for size in layer.sizes]
        rank, num_ranks = (0, 1) if self._ranks is None else (self._ranks[1].rank, self._ranks[1].size)
        owners = iter(assign_by_cost([float(size) ** 3 for size in sizes], num_ranks))
        rows = []
        for layer in layers:
            for damped in self._damped(layer, factors[layer.name]):
                indices = tuple(torch.tril_indices(len(damped), len(damped)))
                # Zeros elsewhere: the sum has the bits of the rank that has inverted.
                eps = 8 * torch.finfo(layer.dtype).eps
                is_own = next(owners) == rank
                rows.append((_inverse(damped, eps) if is_own else torch.zeros_like(damped))[indices])
        if not rows:
            return
        parts = iter(self.sum_over_ranks(torch.cat(rows)).split([len(row) for row in rows]))
        for layer in layers:
            for key, size in zip("ag", layer.sizes, strict=True):
                inverse = _symmetric(next(parts), size)
                if not bool(torch.isfinite(inverse).all()):
                    raise NumericError(
                        f"the factor {key.upper()} [{size}, {size}] of '{layer.name}' is singular with"
                        f" damping = {self.damping:g}",
                        next_step="raise optimizer.damping, or leave the layer out of K-FAC by ByGroup",
                    )
                factors[layer.name][f"{key}_inverse"] = inverse.to(layer.dtype)

    def _damped(self, layer: CurvatureLayer, factors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield A and G with their shares of the damping; section 6.3 of Martens & Grosse."""
        means = [float(factors[key].diagonal().mean()) for key in "ag"]
        # Of a factor that is zero the share is not defined.
        ratio = (means[0] / means[1]) ** 0.5 if min(means) > 0 else 1.0
        for key, share in (("a", ratio), ("g", 1 / ratio)):
            factor = factors[key]
            damping = self.damping**0.5 * share
            yield factor + damping * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)

    def _precondition(self, factors: Mapping[str, dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
        """Return the updates of whole tensors by name, and the factor that shortens them; collective."""
        layers = [layer for layer in self._layers if layer.name in factors]
        gradients, rates = self._whole_gradients(layers)
        directions: dict[str, Tensor] = {}
        change = 0.0
        for layer in layers:
            whole = [gradients[name] for name in layer.parameters if name in gradients]
            if not whole:
                continue
            a_inverse, g_inverse = (factors[layer.name][f"{key}_inverse"] for key in "ag")
            columns = [grad.reshape(layer.sizes[1], -1).to(a_inverse.dtype) for grad in whole]
            gradient = torch.cat(columns, dim=1)
            update = g_inverse @ gradient @ a_inverse
            parts = update.split([x.shape[1] for x in columns], dim=1)
            for name, grad, part in zip(layer.parameters, whole, parts, strict=True):
                directions[name] = part.reshape(grad.shape)
                change += rates[name] ** 2 * float((directions[name] * grad).sum(dtype=torch.float64))
        if self.kl_clip is None or change <= self.kl_clip:
            return directions, 1.0
        return directions, (self.kl_clip / change) ** 0.5

    def _whole_gradients(
        self, layers: Iterable[CurvatureLayer]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the gradients and rates of the parameters of layers, by name; collective."""
        group, names = self.slot_group, {name for layer in layers for name in layer.parameters}
        if group.size == 1:
            own = [
                (self._name_of(p), p.grad, float(options["lr"]))
                for options in self.param_groups
                for p in options["params"]
                if p.grad is not None
            ]
            return {n: grad for n, grad, _ in own if n in names}, {n: rate for n, _, rate in own}
        wanted = [(slot, index) for slot, index in self.owned_tensors(group) if slot.name in names]
        parts = [
            (slot, p.grad) for p, slot in group.slots.items() if slot.name in names and p.grad is not None
        ]
        whole = group.gather(parts, [slot for slot, _ in wanted])
        return whole, {slot.name: float(self.param_groups[index]["lr"]) for slot, index in wanted}

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that share the samples of a step; collective."""
        if self._ranks is None or self._ranks[1].size == 1:
            return x
        net, group = self._ranks
        return net.all_reduce(x, group).wait()

    def _name_of(self, p: nn.Parameter) -> str:
        return self._names[p] if self._bound is None else self._bound.slots[p].name

    @property
    def _device(self) -> torch.device:
        return next((layer.weight.device for layer in self._layers), torch.device("cpu"))


def _reason_against(module: nn.Module, trained: list[nn.Parameter], uses: Mapping[nn.Parameter, int]) -> str:
    """Return why a module with trained parameters cannot be preconditioned; empty: it can."""
    is_layer = any(
        isinstance(module, kind) and type(module).forward is kind.forward
        for kind in (nn.Linear, nn.Conv1d, nn.Conv2d)
    )
    if not is_layer or is_parametrized(module):
        return "no linear or convolution layer"
    weight = module._parameters["weight"]
    if any(uses[p] > 1 for p in trained):
        return "shared by several layers"
    if getattr(module, "groups", 1) > 1:
        return "a convolution in groups"
    if not any(p is weight for p in trained):
        return "its weight is not trained"
    assert weight is not None
    if weight.is_complex() or not weight.numel():
        return "complex" if weight.is_complex() else "empty"
    return ""


def _forward_hook(optimizer: KFac, layer: CurvatureLayer) -> Callable[..., None]:
    """Return the hook of a layer; it neither keeps the optimizer alive nor watches copies of the layer."""
    optimizer_ref = weakref.ref(optimizer)

    def on_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        own = optimizer_ref()
        is_watched = own is not None and module is layer.module and output.requires_grad
        if not is_watched or own is None or not own.collects or layer.parameters[0] in own.fallbacks:
            return
        x, backward_ids = (args[0] if args else kwargs["input"]).detach(), list[int]()

        def on_gradient(grad: Tensor) -> None:
            if (live := optimizer_ref()) is None:
                return
            if backward_ids:
                live.mark_reused(layer, "is differentiated several times")
                return
            backward_ids.append(_backward_id())
            live.add_sample_rows(layer, x, grad)

        output.register_hook(on_gradient)

    return on_forward


def _backward_id() -> int:
    """Return the number of the backward pass that runs."""
    return int(torch._C._current_graph_task_id())


def _symmetric(values: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix [size, size] of its lower triangle, row by row."""
    lower = values.new_zeros(size, size)
    lower[tuple(torch.tril_indices(size, size))] = values
    return lower + lower.tril(-1).T


def _inverse(matrix: Tensor, eps: float) -> Tensor:
    """Return the inverse of a symmetric positive definite matrix, or NaN.

    Args:
        eps: smallest square of a pivot, relative to the largest value of the diagonal.
    """
    root, info = torch.linalg.cholesky_ex(matrix)
    diagonal = matrix.diagonal()
    # Products of float32 are singular up to rounding where exact ones are.
    is_singular = bool(info) or bool(root.diagonal().square().min() <= eps * diagonal.max())
    return torch.full_like(matrix, torch.nan) if is_singular else torch.cholesky_inverse(root)
