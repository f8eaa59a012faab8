"""Watching of runs from another process: metrics, exporter, live page, alerts and diagnosis.

Invariant: everything here reads run folders and is never called inside a step, so it cannot slow a job down,
and works on a job that is dead or on another host.
"""
