"""Fused operations: each has a plain form, a compiled one (`torch.compile`), and on a GPU one in Triton.

`FusedOperations` measures the forms once for each kind of arguments and uses the fastest. A form that fails,
or whose result differs from the plain one, is not used, and the reason is logged once. Nothing is measured
below `least_values`, where a compilation takes longer than a run can save.

Invariant: every form computes what the plain form does, to the bit where `is_bitwise` says so.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PLAIN, COMPILED, TRITON = "plain", "compiled", "triton"
FORMS = (PLAIN, COMPILED, TRITON)
# What a compiler, its files and its processes raise; errors of the arguments come again from the plain form.
_FORM_FAILURES = (RuntimeError, OSError, ImportError, SubprocessError, AssertionError)
_ROUNDS = 5
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class FusedOperation:
    """An operation with several forms.

    Args:
        plain: in PyTorch, as several kernels; `torch.compile` makes one of it.
        triton: `module:name` of the form in Triton.
        is_bitwise: all forms give the same bits, also of the gradients that no sum is needed for.
        differentiable: its result has gradients.
    """

    plain: Callable[..., Any]
    triton: str
    is_bitwise: bool = False
    differentiable: bool = True


def _bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def softmax_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of some rows, float32 [], and its gradient, in the shape of `logits`.

    Args:
        logits: float32 [C, V].
        targets: int64 [C]; rows with `ignore_index` have neither loss nor gradient.
    """
    counts = targets != ignore_index
    chosen = torch.where(counts, targets, 0)[:, None]
    norm = logits.logsumexp(1, keepdim=True)
    total = ((norm - logits.gather(1, chosen))[:, 0] * counts).sum()
    gradient = (logits - norm).exp_()
    gradient.scatter_add_(1, chosen, torch.full_like(norm, -1.0))
    return total, gradient.mul_(counts[:, None])


OPERATIONS: Mapping[str, FusedOperation] = {
    "bias_relu": FusedOperation(_bias_relu, "paceline.models.triton_kernels:bias_relu", is_bitwise=True),
    "rms_norm": FusedOperation(_rms_norm, "paceline.models.triton_kernels:rms_norm"),
    "softmax_loss": FusedOperation(
        softmax_loss, "paceline.models.triton_kernels:softmax_loss", differentiable=False
    ),
}
"""The operations by name."""


@dataclass
class FormChoice:
    """The form of an operation for one kind of arguments.

    Args:
        form: the form in use.
        seconds: the least time of each form that works, forward and backward; empty if nothing was measured.
        refused: why other forms are not used, by form.
    """

    form: str = PLAIN
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form: one graph, or an error."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)
    return compiled


class FusedOperations:
    """The operations of a model, each in the form that is fastest here.

    Args:
        log: receives a line for each choice, and one for each reason against a form.
        forms: the forms to choose from, in addition to the plain one.
        least_values: arguments with fewer values use the plain form.
        compiler: makes the compiled form of the plain one.
        operations: the operations by name.

    Attributes:
        choices: by name of the operation, and kind of arguments.
    """

    def __init__(
        self,
        log: Callable[[str], object] = lambda text: None,
        *,
        forms: tuple[str, ...] = FORMS,
        least_values: int = 2**16,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = _compile,
        operations: Mapping[str, FusedOperation] = OPERATIONS,
    ) -> None:
        self._log, self._forms, self._least_values = log, forms, least_values
        self._operations, self._compiler = operations, compiler
        self._loaded: dict[tuple[str, str], Callable[..., Any]] = {}
        self.choices: dict[tuple[Any, ...], FormChoice] = {}
        self._logged: set[str] = set()

    def bias_relu(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return max(x + bias, 0).

        Args:
            x: [..., n], any floating-point dtype.
            bias: a tensor that broadcasts to `x`, of its dtype.
        Memory traffic for n values each: 3 n values forward and backward, in one kernel; plain 5 n and 3 n.
        Exactness: bitwise; the gradient of a broadcast bias is a sum, whose order differs between the forms.
        """
        result: Tensor = self.apply("bias_relu", x, bias)
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

        Args:
            x: [..., W].
            weight: [W].
        Exactness: up to the order of the sums; tests/unit/models/test_fused_operations.py.
        Source: Zhang & Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
        """
        result: Tensor = self.apply("rms_norm", x, weight, eps)
        return result

    def apply(self, name: str, *args: Any) -> Any:
        """Run an operation in its form; the first call with arguments of a kind measures the forms."""
        kind = (name, *map(_kind_of, args), torch.is_grad_enabled())
        choice = self.choices.get(kind)
        if choice is None:
            choice = self.choices[kind] = self._choose(name, args)
        if choice.form != PLAIN:
            try:
                return self._function(name, choice.form)(*args)
            except _FORM_FAILURES as error:
                self._refuse(name, choice, choice.form, _first_line(error))
                choice.form = PLAIN
        return self._operations[name].plain(*args)

    def _choose(self, name: str, args: tuple[Any, ...]) -> FormChoice:
        choice, operation = FormChoice(), self._operations[name]
        tensors = [x for x in args if isinstance(x, Tensor)]
        device = tensors[0].device.type
        if max(x.numel() for x in tensors) < self._least_values:
            return choice
        runs = {PLAIN: _FormRun(operation, operation.plain, args)}
        for form in (COMPILED, TRITON):
            if form not in self._forms:
                continue
            reason = missing_compiler(device) if form == COMPILED else _missing_gpu(device)
            if not reason:
                reason = self._try(name, form, runs, args)
            if reason:
                self._refuse(name, choice, form, reason)
        choice.seconds = _least_seconds(runs) if len(runs) > 1 else {}
        choice.form = min(choice.seconds, key=choice.seconds.__getitem__, default=PLAIN)
        if choice.seconds:
            times = ", ".join(f"{form} {1e3 * s:.3g} ms" for form, s in choice.seconds.items())
            shape = "x".join(map(str, tensors[0].shape))
            self._log(f"{name} of {shape} on {device}: {times}; using {choice.form}")
        return choice

    def _try(self, name: str, form: str, runs: dict[str, _FormRun], args: tuple[Any, ...]) -> str:
        """Run a form beside the plain one; return why it cannot be used, or an empty string."""
        operation = self._operations[name]
        try:
            trial = _FormRun(operation, self._function(name, form), args)
            difference = runs[PLAIN].difference(trial)
        except _FORM_FAILURES as error:
            return _first_line(error)
        if not difference:
            runs[form] = trial
        return difference

    def _function(self, name: str, form: str) -> Callable[..., Any]:
        """Return a form, which is compiled or imported once."""
        if (name, form) not in self._loaded:
            operation = self._operations[name]
            if form == COMPILED:
                function = self._compiler(operation.plain)
            else:
                module, _, attribute = operation.triton.partition(":")
                function = getattr(importlib.import_module(module), attribute)
            self._loaded[name, form] = function
        return self._loaded[name, form]

    def _refuse(self, name: str, choice: FormChoice, form: str, reason: str) -> None:
        choice.refused[form] = reason
        # No GPU is no news; a missing compiler or a form that fails is, once.
        if form == COMPILED or not reason.startswith(_NO_GPU):
            line = f"{name}: the {form} form is not used: {reason}"
            if reason not in self._logged:
                self._log(line)
            self._logged.add(reason)


class _FormRun:
    """Runs of one form on copies of some arguments, with gradients where the caller's have them."""

    def __init__(
        self, operation: FusedOperation, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._operation, self._function = operation, function
        tracks = operation.differentiable and torch.is_grad_enabled()
        self._args = [
            x.detach().clone().requires_grad_(tracks and x.requires_grad) if isinstance(x, Tensor) else x
            for x in args
        ]
        self._inputs = [x for x in self._args if isinstance(x, Tensor) and x.requires_grad]
        self.results = self.run()

    def run(self) -> list[Tensor]:
        """Return results and gradients; the gradient of the result is the result itself."""
        returned = self._function(*self._args)
        results = [returned] if isinstance(returned, Tensor) else [*returned]
        if not self._inputs:
            return results
        return [*results, *torch.autograd.grad(results[0], self._inputs, results[0].detach())]

    def difference(self, other: _FormRun) -> str:
        """Return how the results of another form differ; an empty string if they agree."""
        for mine, theirs in zip(self.results, other.results, strict=True):
            a, b = mine.detach(), theirs.detach()
            is_sum = a.shape != self.results[0].shape
            if self._operation.is_bitwise and not is_sum:
                if not torch.equal(a, b):
                    return "its result has other bits than the plain one"
                continue
            error = float((a.double() - b.double()).abs().max())
            if not error <= _TOLERANCE.get(a.dtype, 0.0) * max(1.0, float(a.double().abs().max())):
                return f"its result is off by {error:.2g}"
        return ""


def _least_seconds(runs: Mapping[str, _FormRun]) -> dict[str, float]:
    """Return the least time of each form; the forms take turns, so that all meet the same load."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(_ROUNDS):
        for form, trial in runs.items():
            start = time.perf_counter()
            results = trial.run()
            if results[0].is_cuda:
                torch.cuda.synchronize(results[0].device)
            least[form] = min(least[form], time.perf_counter() - start)
    return least


def _kind_of(x: Any) -> Any:
    """Return what decides which form is fastest: of a tensor its shape, dtype, device, and gradient."""
    return (*x.shape, x.dtype, x.device.type, x.requires_grad) if isinstance(x, Tensor) else x


def missing_compiler(device_type: str) -> str:
    """Return why `torch.compile` cannot make kernels for a device here; an empty string if it can."""
    if device_type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "it needs a C++ compiler (g++ or clang++), and none is on PATH"
    return ""


_NO_GPU = "there is no GPU"


def _missing_gpu(device_type: str) -> str:
    return "" if device_type == "cuda" else f"{_NO_GPU}: the tensors are on {device_type}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
