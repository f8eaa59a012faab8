"""What a script or a notebook calls: here, as one of the ranks, or on processes that the call starts.

Invariant: a call on processes of its own gives what the same call gives on each of them, as rank 0 sees it,
and leaves none of them behind.
"""

from paceline.api.calls import train, verify

__all__ = ["train", "verify"]
