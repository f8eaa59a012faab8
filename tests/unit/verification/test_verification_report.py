"""The certificate of a verification: a class, an error and a bound for every tensor."""

from __future__ import annotations

import pytest

from paceline.verification.error_bounds import TensorComparison
from paceline.verification.verification_report import VerificationReport, certificate


@pytest.mark.capability("Z2")
@pytest.mark.parametrize(
    ("errors", "kind", "ok"),
    [((0.0, 0.0), "bitwise", True), ((0.0, 7.45e-9), "rounding", True), ((0.0, 1e-3), "rounding", False)],
)
def test_a_tensor_with_an_error_has_the_class_rounding(
    errors: tuple[float, ...], kind: str, ok: bool
) -> None:
    report = VerificationReport("replicas=2", 2, steps=1)
    report.add([TensorComparison(0, "gradient", "weight", errors, bound=6e-8)])
    (row,) = certificate(report)["tensors"]
    assert (row["class"], row["ok"], row["error"]) == (kind, ok, max(errors))
    assert report.ok == ok


def test_the_worst_comparison_of_a_tensor_is_kept() -> None:
    report = VerificationReport("replicas=2", 2)
    for step, error in enumerate((1e-9, 3e-9, 2e-9)):
        report.add([TensorComparison(step, "state", "model/weight", (error,), bound=1e-8)])
    assert report.worst["state", "model/weight"].step == 1
