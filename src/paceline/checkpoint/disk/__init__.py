"""Large files to a disk: sent early and forgotten, and by a process of its own that takes what others leave.

On the standard library alone: the process that writes begins in milliseconds.
"""
