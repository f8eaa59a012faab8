"""Writing large files to a disk, in a process of low priority; uses the standard library and xxhash only.

Nothing else is imported, so that the process starts in milliseconds; an import of torch would take a second.
"""
