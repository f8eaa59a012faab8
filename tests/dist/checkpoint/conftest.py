"""A server that speaks S3, for the tests of this folder."""

from tests.dist.checkpoint.object_store import server

__all__ = ["server"]
