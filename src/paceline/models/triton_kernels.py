"""The Triton form of fused operations, imported only where a tensor is on a GPU.

Each function has the arguments and results of the plain form in `fused_operations`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024


@triton.jit
def _bias_relu_kernel(
    x_ptr: Any, bias_ptr: Any, y_ptr: Any, n: Any, bias_n: Any, block: tl.constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    total = tl.load(x_ptr + at, mask=inside) + tl.load(bias_ptr + at % bias_n, mask=inside)
    # Not a maximum: NaN has to stay.
    tl.store(y_ptr + at, tl.where(total <= 0, 0.0, total), mask=inside)


@triton.jit
def _relu_gradient_kernel(grad_ptr: Any, y_ptr: Any, out_ptr: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, tl.where(y <= 0, 0.0, tl.load(grad_ptr + at, mask=inside)), mask=inside)


class _BiasReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        y = torch.empty_like(x)
        _bias_relu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, bias, y, x.numel(), bias.numel(), block=_BLOCK
        )
        ctx.save_for_backward(y)
        ctx.bias_shape = bias.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (y,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(y)
        _relu_gradient_kernel[(triton.cdiv(y.numel(), _BLOCK),)](grad, y, out, y.numel(), block=_BLOCK)
        return out, out.sum_to_size(ctx.bias_shape)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """Return max(x + bias, 0) for a bias that has the last dimensions of `x`.

    Raises:
        RuntimeError: the bias broadcasts in another way.
    """
    if bias.shape != x.shape[x.dim() - bias.dim() :]:
        raise RuntimeError(f"a bias of {tuple(bias.shape)} has not the last dimensions of {tuple(x.shape)}")
    result: Tensor = _BiasReLU.apply(x, bias)
    return result


@triton.jit
def _rms_norm_kernel(
    x_ptr: Any, weight_ptr: Any, y_ptr: Any, scale_ptr: Any, width: Any, eps: Any, block: tl.constexpr
) -> None:
    row, at = tl.program_id(0), tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * width + at, x * scale * weight, mask=inside)


@triton.jit
def _rms_norm_gradient_kernel(
    grad_ptr: Any, x_ptr: Any, weight_ptr: Any, scale_ptr: Any, out_ptr: Any, width: Any, block: tl.constexpr
) -> None:
    row, at = tl.program_id(0), tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32) * weight
    scale = tl.load(scale_ptr + row)
    share = tl.sum(grad * x, 0) / width
    tl.store(out_ptr + row * width + at, scale * (grad - x * scale * scale * share), mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        y, scales = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(scales.numel(),)](x, weight.contiguous(), y, scales, width, eps, block=block)
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad, out, width = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        block = triton.next_power_of_2(width)
        _rms_norm_gradient_kernel[(scales.numel(),)](
            grad, x, weight.contiguous(), scales, out, width, block=block
        )
        to_weight = (grad.float() * x.float() * scales[..., None]).reshape(-1, width).sum(0)
        return out, to_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


@triton.jit
def _softmax_loss_kernel(
    logits_ptr: Any,
    targets_ptr: Any,
    losses_ptr: Any,
    gradient_ptr: Any,
    vocabulary: Any,
    ignored: Any,
    block: tl.constexpr,
) -> None:
    row, at = tl.program_id(0), tl.arange(0, block)
    inside = at < vocabulary
    target = tl.load(targets_ptr + row)
    counts = target != ignored
    x = tl.load(logits_ptr + row * vocabulary + at, mask=inside, other=-float("inf"))
    largest = tl.max(x, 0)
    powers = tl.exp(x - largest)
    total = tl.sum(powers, 0)
    chosen = tl.sum(tl.where(at == target, x, 0.0), 0)
    loss = tl.where(counts, tl.log(total) + largest - chosen, 0.0)
    gradient = powers / total - tl.where(at == target, 1.0, 0.0)
    tl.store(losses_ptr + row, loss)
    tl.store(gradient_ptr + row * vocabulary + at, tl.where(counts, gradient, 0.0), mask=inside)


def softmax_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of rows [C, V], and its gradient; one program holds a row."""
    logits, targets = logits.contiguous(), targets.contiguous()
    num_rows, vocabulary = logits.shape
    gradient, losses = torch.empty_like(logits), logits.new_empty(num_rows)
    block = triton.next_power_of_2(vocabulary)
    _softmax_loss_kernel[(num_rows,)](
        logits, targets, losses, gradient, vocabulary, ignore_index, block=block
    )
    return losses.sum(), gradient
