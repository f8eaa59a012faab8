"""A traceback as its reader needs it: the frames of the user's code, and how many of ours were folded.

Pure. A frame is folded if its file is Paceline's, a library's or Python's own; where no frame is left, or the
last one is Paceline's, nothing is folded: then the mistake may be ours.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_HERE = str(Path(__file__).resolve().parents[1])
_FOLDED = (_HERE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def render_trace(error: BaseException) -> str:
    """The traceback of an error and of what caused it, with our frames folded."""
    told = traceback.TracebackException.from_exception(error)
    return "".join(_chain(told))


def _chain(told: traceback.TracebackException) -> list[str]:
    before = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    lines = [] if before is None else [*_chain(before), "\nThe above led to:\n\n"]
    shown = [frame for frame in told.stack if not is_folded(frame.filename)]
    if not shown or told.stack[-1].filename.startswith(_HERE):
        shown = list(told.stack)
    folded = len(told.stack) - len(shown)
    said = f"; {folded} frames of Paceline and of libraries are folded" if folded else ""
    head = [f"Traceback (most recent call last{said}):\n"] if shown else []
    frames = traceback.StackSummary.from_list(shown).format()
    return [*lines, *head, *frames, *told.format_exception_only()]


def is_folded(filename: str) -> bool:
    """Whether a frame of this file is no code of the user's."""
    return filename.startswith(("<frozen", *_FOLDED))
