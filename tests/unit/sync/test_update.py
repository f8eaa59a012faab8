"""A step on gradients that are still to be multiplied: the same update, whoever multiplies."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.sync.update import can_fold_scale, scaled_step

MULTIPLIERS = (1.0, 0.37, 1 / 3, 2.0**-20, 1e-30, 0.0, -0.5, 1e39)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


class Watching(torch.optim.AdamW):
    """A user's own optimizer, which looks at the gradients itself."""

    seen = 0.0

    def step(self, closure=None):
        self.seen = float(self.param_groups[0]["params"][0].grad.sum())
        return super().step(closure)


def parameters(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Tensor]:
    """Two, with gradients that are views of one storage."""
    generator = torch.Generator().manual_seed(3)
    found = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (100, 28)]
    flat = torch.randn(128, generator=generator).to(dtype)
    for p, view in zip(found, flat.split([100, 28]), strict=True):
        p.grad = view
    return found, flat


@pytest.mark.capability("J2")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_the_update_is_that_of_multiplied_gradients(name: str, multiplier: float) -> None:
    (ours, flat), (right, right_flat) = parameters(), parameters()
    optimizer, by_hand = OPTIMIZERS[name](ours), OPTIMIZERS[name](right)
    for _ in range(3):
        scaled_step(optimizer, [flat], multiplier)
        right_flat.mul_(multiplier)
        by_hand.step()
    torch.testing.assert_close(flat, right_flat, rtol=1e-6, atol=0, equal_nan=True)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert can_fold_scale(optimizer) == name.startswith("fused")
    assert not hasattr(optimizer, "grad_scale")


def test_who_looks_at_gradients_before_a_step_sees_them_multiplied() -> None:
    """A hook, one for all optimizers, a subclass: each is set up after others have been folded."""
    (found, flat), seen = parameters(), []
    optimizer = torch.optim.AdamW(found, lr=0.1, fused=True)
    assert can_fold_scale(optimizer)
    before = float(found[0].grad.sum())

    def look(*_: object) -> None:
        seen.append(float(found[0].grad.sum()))

    with optimizer.register_step_pre_hook(look):
        scaled_step(optimizer, [flat], 0.5)
    with register_optimizer_step_pre_hook(look):
        scaled_step(optimizer, [flat], 0.5)
    own = Watching(found, lr=0.1, fused=True)
    scaled_step(own, [flat], 0.5)
    assert [*seen, own.seen] == pytest.approx([before / 2, before / 4, before / 8])
    assert can_fold_scale(optimizer) and not can_fold_scale(own)


def test_the_kernel_of_other_types_does_not_multiply() -> None:
    found, flat = parameters(torch.bfloat16)
    optimizer = torch.optim.AdamW(found, lr=0.1, fused=True)
    before = flat.clone()
    scaled_step(optimizer, [flat], 0.5)
    assert not can_fold_scale(optimizer)
    assert torch.equal(flat, before * 0.5)


def test_a_step_that_fails_leaves_no_divisor_behind() -> None:
    found, flat = parameters()
    optimizer = torch.optim.AdamW(found, lr=0.1, fused=True)
    found[0].grad = torch.zeros(100).to_sparse()
    with pytest.raises(RuntimeError):
        scaled_step(optimizer, [flat], 0.5)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.capability("J11", "K2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gradient_of_two_bytes_is_rounded_once(dtype: torch.dtype) -> None:
    """PyTorch's `_foreach_mul_` rounds the multiplier too: to 0.578 in bfloat16."""
    number = 0.5794948728912667
    params, flat = parameters(dtype)
    before, by_foreach = flat.clone(), flat.clone()
    scaled_step(OPTIMIZERS["AdamW"](params), [flat], number)
    assert torch.equal(flat, (before.float() * number).to(dtype))
    torch._foreach_mul_([by_foreach], number)
    assert torch.equal(by_foreach, flat) == (dtype == torch.float32)
