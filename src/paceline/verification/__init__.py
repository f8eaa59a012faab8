"""Prove that a strategy computes what one process would have computed, or say where and why it does not."""

from paceline.verification.job import build_oracle, compare_with_oracle, verify
from paceline.verification.oracle import Oracle
from paceline.verification.report import Report
from paceline.verification.run import Verifier

__all__ = ["Oracle", "Report", "Verifier", "build_oracle", "compare_with_oracle", "verify"]
