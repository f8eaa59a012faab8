"""How a forked command ends: as Python ends it, without taking apart what it shares with its server.

Python clears every module at its end. In a forked process each object that is touched is a page that is
copied: 0.36 s of the processor for all that a fork server has imported, and 0.06 s without. Processes of
`multiprocessing` end like this, too.

Invariant: threads are waited for, what `atexit` knows is run, and no file lacks what was written to it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import runpy
import sys
import threading
from contextlib import suppress

_C = ctypes.CDLL(None)  # loaded before a fork, not after it
_PLAIN = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BytesIO)


def run_to_its_end(module: str) -> None:
    """Run a module as `python -m` does, and end this process; raises where Python has to end it."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # it has a text to show
        code = end.code or 0
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # nobody can read it: Python says so
    _close_files()
    _C.fflush(None)
    os._exit(code & 0xFF)


def _close_files() -> None:
    """Files that are still open get what was written to them; those around others come first."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    found = [one for one in objects if type(one) in kinds]
    standard = {id(one) for one in (sys.stdin, sys.stdout, sys.stderr)}
    texts = [one for one in found if isinstance(one, io.TextIOWrapper) and id(one) not in standard]
    others = [one for one in found if isinstance(one, io.BufferedIOBase) and type(one) not in _PLAIN]
    for one in (*texts, *others):
        with suppress(Exception):
            one.close()
    for one in found:
        with suppress(Exception):
            one.flush()
