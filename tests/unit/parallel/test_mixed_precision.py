"""Precision: 16-bit arithmetic around fp32 master weights; compilation falls back with a reason."""

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.data import LoadedBatch, MicroBatch
from paceline.models import GPT, GPTConfig
from paceline.observe import PhaseTimer
from paceline.parallel import MixedPrecision, ReplicatedRunner
from paceline.parallel.mixed_precision import compile_or_explain
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.slot import TensorSlot
from paceline.task import Loss

NUM_UPDATES = 10_000
STEP_SIZE = 2.0**-12


class Dtypes(nn.Linear):
    """A linear layer that notes the type of its results."""

    seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.dtype
        return y


def climb(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    return Loss(-model(batch[0]).sum(), 1)


def forward_backward(model: nn.Module, compute: str, x: Tensor) -> list[Tensor]:
    """The gradients that a layout hands on, in one precision."""
    handed: dict[TensorSlot, Tensor] = {}

    class Sink:
        by_micro_batch = False

        def micro_batch(self, shards: range, is_last: bool) -> None: ...

        def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
            handed[slot] = grad

    runner = ReplicatedRunner(
        unsharded_model(model),
        climb,
        MetricNames(()),
        precision=MixedPrecision(compute, "cpu"),
        phases=PhaseTimer(),
    )
    micro_batch = MicroBatch(0, 0, torch.arange(len(x)).numpy(), key=1)
    runner.run([LoadedBatch(micro_batch, [x])], 1, Sink(), 1.0)
    return [handed[slot] for slot in runner.sharded_model.slots]


def logits_error(weights: torch.dtype = torch.float32) -> float:
    """Of a GPT in bf16, relative to its fp32 logits."""
    torch.manual_seed(5)
    model, tokens = GPT(GPTConfig(256, 64, layers=4, heads=4, width=128)), torch.randint(256, (4, 64))
    with torch.no_grad():
        exact = model(tokens)
        for p in model.parameters():
            p.copy_(p.to(weights))
        with MixedPrecision("bf16", "cpu").autocast():
            rounded = model(tokens)
    return float((rounded.float() - exact).norm() / exact.norm())


@pytest.mark.capability("K2")
def test_logits_of_a_gpt_in_bf16_are_within_two_to_the_minus_eight() -> None:
    """Its residual stream and its norms stay fp32; with weights of four bits the same bound is missed."""
    assert 2.0**-11 < logits_error() <= 2.0**-8 < logits_error(torch.float8_e4m3fn)


@pytest.mark.capability("K2")
def test_one_bf16_product_is_within_two_to_the_minus_eight_of_the_exact_one() -> None:
    torch.manual_seed(4)
    layer = nn.Linear(64, 32, bias=False)
    with torch.no_grad():  # inputs that bf16 holds: what is left is the rounding of the result
        layer.weight.copy_(layer.weight.bfloat16())
        x = torch.randn(100, 64).bfloat16().float()
        exact = layer.double()(x.double())
        with MixedPrecision("bf16", "cpu").autocast():
            found = layer.float()(x)
    scale = (x.abs().double() @ layer.weight.abs().double().t()).abs()
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * scale).all()


def test_fp32_stays_fp32_inside_somebody_elses_autocast() -> None:
    model = Dtypes(8, 8)
    with torch.autocast("cpu", torch.bfloat16), MixedPrecision("fp32", "cpu").autocast():
        model(torch.randn(4, 8))
    assert model.seen == torch.float32


@pytest.mark.parametrize("caches", [True, False])
def test_an_autocast_inside_fp32_caches_as_was_asked(caches: bool) -> None:
    with MixedPrecision("fp32", "cpu", caches=caches).autocast():
        assert torch.is_autocast_cache_enabled() == caches


@pytest.mark.capability("K1", "K3")
@pytest.mark.parametrize("compute, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_is_16_bit_and_what_is_reduced_and_updated_is_fp32(
    compute: str, dtype: torch.dtype
) -> None:
    model = Dtypes(8, 4)
    grads = forward_backward(model, compute, torch.randn(6, 8))
    assert model.seen == dtype
    assert {g.dtype for g in grads} == {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.capability("K3")
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_small_updates_survive_in_master_weights(compute: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    precision, x = MixedPrecision(compute, "cpu"), torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        with precision.autocast():
            loss = climb(model, [x])
        loss.total.backward()
        optimizer.step()
    assert model.weight.item() == 1.0 + NUM_UPDATES * STEP_SIZE


@pytest.mark.capability("K3")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_updates_are_lost_in_16_bit_weights(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=STEP_SIZE)
    weight.grad = -torch.ones(1, dtype=dtype)
    for _ in range(NUM_UPDATES):
        optimizer.step()
    assert weight.item() == 1.0


def test_without_a_compiler_it_runs_uncompiled_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = nn.Linear(2, 2)
    reason = compile_or_explain(model, "cpu")
    assert "compiler" in reason
    assert "uncompiled" in reason
    assert model._compiled_call_impl is None
    assert model(torch.zeros(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    "found, device_type", [("c++", "cpu"), ("clang++", "cpu"), ("g++", "cpu"), ("", "cuda")]
)
def test_with_a_compiler_or_on_a_gpu_the_model_is_compiled_in_place(
    found: str, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name if name == found else None)
    compiled: list[dict[str, object]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(options))
    assert compile_or_explain(nn.Linear(2, 2), device_type) == ""
    assert compiled == [{"dynamic": False}]
