"""A replayed forward computes the bits of the model's own code, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.serving import GenerationRequest, SamplingOptions, build_engine
from paceline.serving.recorded_forward import ForwardRecorder
from tests.request_mixes import RecordingEngine, small_gpt
from tests.unit.serving.test_kv_cache import CONTEXT, gpt2, llama


def record(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, str]:
    recorder = ForwardRecorder([x])
    with torch.inference_mode(), recorder.recording():
        result = forward(x)
    return recorder.finish(result), recorder.refusal


@pytest.mark.parametrize("attention", ["by_slot", "masked"])
@pytest.mark.parametrize("build", [small_gpt, lambda: small_gpt("learned"), llama, gpt2])
def test_a_replay_has_the_bits_of_the_models_own_code(build: Callable[[], nn.Module], attention: Any) -> None:
    torch.manual_seed(0)
    model, logits = build(), []
    for refuses in (False, True):
        with patch.object(ForwardRecorder, "finish", lambda *_: None) if refuses else nullcontext():
            built = build_engine(model, context=CONTEXT, slots=3, chunk=7, attention=attention)
        forward: Any = built.forward
        assert [recorded is None for recorded in forward._recorded.values()] == [refuses] * 3
        engine = RecordingEngine(forward)
        for prompt in ((1, 2, 3), tuple(range(20)), (5,)):
            engine.submit(GenerationRequest(prompt, 8, SamplingOptions(seed=3)))
        engine.run()
        logits.append(engine.logits)
    assert logits[0] == logits[1] and logits[0]


class Accumulates(nn.Module):
    """Module that writes in place, takes several results of one function, and names its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(2)
        total += x
        first, second = torch.split(total, 1)
        both = torch.cat([second, first], dim=0)
        both[0] = x.sum()
        return torch.add(input=both * self.scale, other=x, alpha=2)


def test_a_replay_starts_anew_and_sees_new_weights() -> None:
    model = Accumulates()
    replay, refusal = record(model, torch.tensor([1.0, 5.0]))
    assert not refusal
    with torch.no_grad():
        for values in ([4.0, 6.0], [4.0, 6.0], [-1.0, 0.5]):
            x = torch.tensor(values)
            assert torch.equal(replay(x), model(x))
        model.scale.mul_(7)
        assert torch.equal(replay(x), model(x))


def unseen(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x * 2


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x * 2 if x[0] > 0 else x, "__bool__"),
        (lambda x: x * x.max().item(), "item"),
        (lambda x: x * 2 if torch.equal(x, x.abs()) else x, "equal"),
        (lambda x: x * sum(x.tolist()), "tolist"),
        (lambda x: x[x > 0] * 2, "index"),
        (lambda x: torch.nonzero(x) * 2, "nonzero"),
        (lambda x: unseen(x) + 1, "where no function of PyTorch is seen"),
        (lambda x: torch.stack([x, x.abs()]).sum(0) * 2, ""),
    ],
)
def test_a_forward_that_depends_on_values_is_refused(
    forward: Callable[[Tensor], Tensor], reason: str
) -> None:
    replay, refusal = record(forward, torch.tensor([1.0, -2.0, 3.0]))
    assert (replay is None) == bool(reason) and reason in refusal


class ReadsValues(nn.Module):
    """Language model that looks at its tokens in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) * (2.0 if int(tokens.sum()) >= 0 else 1.0)


def test_a_model_that_reads_values_runs_its_own_code(caplog: pytest.LogCaptureFixture) -> None:
    model = ReadsValues().eval()
    with caplog.at_level("INFO", logger="paceline"):
        engine = build_engine(model, context=CONTEXT, slots=1, chunk=4)
    assert "runs the model's Python code" in caplog.text
    ticket = engine.submit(GenerationRequest((1, 2, 3, 4, 5), 6, SamplingOptions(temperature=0.0)))
    engine.run()
    text = list(ticket.request.prompt)
    for _ in range(6):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert ticket.text == text
