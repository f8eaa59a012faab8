"""`paceline.train`, `paceline.tune` and `paceline.verify`, for scripts and notebooks.

A call runs in this process as one of the ranks, or on processes that it starts. Invariant: on its own
processes it returns what the same call returns on each of them, as rank 0 sees it, and leaves none of them
behind.
"""

from paceline.api.calls import train, tune, verify

__all__ = ["train", "tune", "verify"]
