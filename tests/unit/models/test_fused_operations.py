"""Fused operations: forms agree, what fails is refused with its reason, and the chunked loss saves memory."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import OPERATIONS, FusedOperation, FusedOperations, chunked_cross_entropy
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.peak import peak_bytes
from tests.recipes import recipe_of

# Traced and differentiated as for kernels, and run as PyTorch's own: no C++ compiler runs.
TRACED = partial(torch.compile, fullgraph=True, backend="aot_eager")


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.capability("K5")
def test_the_form_is_measured_once_and_gives_the_results_of_the_plain_one() -> None:
    log: list[str] = []
    operations = FusedOperations(log.append, least_values=1, compiler=TRACED)
    x, w, scale = leaves((40, 50), (40, 50), (50,))
    for _ in range(2):
        y = operations.bias_relu(x, w)
        assert torch.equal(y, F.relu(x + w))
        given = torch.autograd.grad(y, (x, w), y.detach())
        right = torch.autograd.grad(F.relu(x + w), (x, w), y.detach())
        assert all(torch.equal(a, b) for a, b in zip(given, right, strict=True))
        normed = operations.rms_norm(x, scale)
        assert torch.allclose(normed, x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale)
    assert len(operations.choices) == len(log) == 2
    for choice in operations.choices.values():
        assert set(choice.seconds) == {"plain", "compiled"}
        assert choice.form == min(choice.seconds, key=choice.seconds.__getitem__)
        assert choice.refused["triton"].startswith("there is no GPU")


@pytest.mark.capability("K4")
def test_a_form_with_other_bits_or_an_error_is_not_used_and_the_log_says_why() -> None:
    """The mutation twin: a form that is nearly right is refused where the bits have to be equal."""

    def nearly(x: Tensor, bias: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.relu(x + bias) * (1 + 1e-6)
        return F.relu(x + bias)

    def untraceable(x: Tensor, bias: Tensor) -> Tensor:
        return F.relu(x + bias) if float(x.detach().sum()) > 0 else F.relu(bias + x)

    log: list[str] = []
    own = {"nearly": FusedOperation(nearly, "", is_bitwise=True), "branch": FusedOperation(untraceable, "")}
    operations = FusedOperations(log.append, least_values=1, compiler=TRACED, operations=own)
    x, w = leaves((30, 30), (30, 30))
    for name in own:
        assert torch.equal(operations.apply(name, x, w), F.relu(x + w))
    nearly_choice, branch_choice = operations.choices.values()
    assert nearly_choice.form == branch_choice.form == "plain"
    assert nearly_choice.refused["compiled"] == "its result has other bits than the plain one"
    assert branch_choice.refused["compiled"]
    assert len(log) == 2 and log[0].startswith("nearly: the compiled form is not used: its result has other")
    # Where bits may differ, the same form is close enough.
    close = FusedOperations(
        least_values=1, compiler=TRACED, operations={"nearly": replace(own["nearly"], is_bitwise=False)}
    )
    close.apply("nearly", x, w)
    assert "compiled" not in next(iter(close.choices.values())).refused


@pytest.mark.capability("K5")
def test_without_a_compiler_the_plain_form_is_used_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    log: list[str] = []
    operations = FusedOperations(log.append, least_values=1)
    x, w, scale = leaves((30, 40), (30, 40), (40,))
    assert torch.equal(operations.bias_relu(x, w), F.relu(x + w))
    operations.rms_norm(x, scale)
    assert len(log) == 1 and "C++ compiler" in log[0]
    assert {choice.form for choice in operations.choices.values()} == {"plain"}


@pytest.mark.soak
@pytest.mark.capability("K4")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the processor needs g++")
def test_the_compiled_bias_relu_is_one_kernel_that_moves_3_n_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pointer of the kernel is read or written once for every value; the plain form makes two passes."""
    # The compiler sets it; `monkeypatch` removes it afterwards.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    from torch._inductor.utils import run_and_get_code

    operations = FusedOperations(compiler=partial(torch.compile, fullgraph=True, dynamic=False))
    x, w = leaves((1000, 1000), (1000, 1000))
    operations.bias_relu(x, w)
    (choice,) = operations.choices.values()
    assert "compiled" not in choice.refused and "compiled" in choice.seconds
    torch._dynamo.reset()
    compiled = torch.compile(OPERATIONS["bias_relu"].plain, fullgraph=True, dynamic=False)
    y, (code,) = run_and_get_code(compiled, x.detach(), w.detach())
    assert torch.equal(y, F.relu(x + w))
    kernels = re.findall(r'extern "C"\s+void\s+kernel\((.*?)\)', code, re.DOTALL)
    assert len(kernels) == 1 and len(re.findall(r"(?:in|out)_ptr\d", kernels[0])) == 3, code


N, W, V = 600, 16, 2000


def layer() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = leaves((N, W), (V, W))
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
    targets[::7] = -1
    return hidden, weight, targets


@pytest.mark.capability("K4")
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_the_chunked_loss_is_that_of_pytorch(rows: int) -> None:
    """Sum, count and gradients, with rows that are ignored, and times a factor as of a loss scale."""
    hidden, weight, targets = layer()
    total, count = chunked_cross_entropy(hidden, weight, targets, chunk_rows=rows, ignore_index=-1)
    right = F.cross_entropy((hidden.double() @ weight.double().T), targets, reduction="sum", ignore_index=-1)
    assert int(count) == int((targets != -1).sum()) and total.item() == pytest.approx(right.item(), rel=1e-6)
    mine = torch.autograd.grad(1024 * total / count, (hidden, weight))
    theirs = torch.autograd.grad(1024 * right / count, (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())
    with torch.no_grad():
        again, _ = chunked_cross_entropy(hidden, weight, targets, chunk_rows=rows, ignore_index=-1)
    assert torch.equal(again, total.detach())


@pytest.mark.capability("K4")
def test_its_memory_is_below_a_tenth_and_grows_with_the_chunk() -> None:
    """The mutation twin: a chunk of all rows holds all logits."""
    hidden, weight, targets = layer()
    targets = targets.clamp_min(0)

    def whole() -> None:
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()

    def chunked(rows: int) -> None:
        chunked_cross_entropy(hidden, weight, targets, chunk_rows=rows)[0].backward()

    peaks = [peak_bytes(run) for run in (whole, partial(chunked, 16), partial(chunked, N))]
    assert peaks[1] < 0.1 * peaks[0] < peaks[2], peaks


@pytest.mark.capability("K4")
def test_the_default_chunk_of_a_wide_vocabulary_needs_less_than_a_tenth() -> None:
    hidden = torch.randn(2048, 256, requires_grad=True)
    weight = torch.randn(8192, 256, requires_grad=True)
    targets = torch.randint(8192, (2048,))

    def whole() -> None:
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()

    def chunked() -> None:
        chunked_cross_entropy(hidden, weight, targets)[0].backward()

    expected = peak_bytes(whole)
    # freed outside of the measurement, which would take them for memory that is given back
    hidden.grad = weight.grad = None
    assert peak_bytes(chunked) < 0.1 * expected


def test_the_byte_gpt_trains_with_a_chunked_loss_under_zero_and_refuses_stages() -> None:
    options = {"context": 16, "layers": 1, "heads": 2, "width": 16, "train_tokens": 2000, "loss_chunk": 10}
    recipe = partial(recipe_of, task="byte-gpt", steps=2, options=options | {"held_out_tokens": 500})

    def train(cluster: Cluster) -> tuple[list[bool], str]:
        found = []
        for strategy in ("replicas=2", "replicas=1 shard=2 zero=3"):
            report = compare_with_oracle(recipe(strategy), make_task(recipe(strategy)), cluster, CPU, 2)
            assert report.ok, conclusion_lines(report)
            found.append(report.ok)
        try:
            build_test_session(cluster, recipe("replicas=1 pipeline=2"))
        except TaskError as error:
            return found, error.what
        return found, ""

    for found, refusal in run_ranks(train, 2):
        assert found == [True, True] and "needs the whole output layer" in refusal
