"""A server that speaks S3, for the tests of this folder."""

from tests.dist.checkpoint.object_store import object_server, server

__all__ = ["object_server", "server"]
