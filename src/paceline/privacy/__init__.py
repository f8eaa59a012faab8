"""Differential privacy: what was released with noise, its epsilon, and the noise itself; without torch.

`accountant` computes epsilon of releases, `privacy_ledger` counts the releases of a run and its budget.
"""
