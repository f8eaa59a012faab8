"""Choosers that measure this machine and its links: precision, threads, stages, codec, route, buckets."""
