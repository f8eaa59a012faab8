"""Choosers that measure this machine and its links, then decide: precision, threads, codec, route, buckets."""
