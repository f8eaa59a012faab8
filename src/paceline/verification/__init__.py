"""Verification that a strategy computes the steps of one process, and a diagnosis where it does not."""

from paceline.verification.federated_oracle import FederatedOracle
from paceline.verification.oracle import Oracle
from paceline.verification.verification_report import VerificationReport
from paceline.verification.verifier import StrategyVerifier
from paceline.verification.verify_on_rank import build_oracle, compare_with_oracle, verify

__all__ = [
    "FederatedOracle",
    "Oracle",
    "StrategyVerifier",
    "VerificationReport",
    "build_oracle",
    "compare_with_oracle",
    "verify",
]
