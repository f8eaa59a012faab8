"""Text for a terminal that may come from a file of another user, as the records of a run do.

Invariant: what is printed moves no cursor, changes no colour and no title, and reads in the order in which it
was written.
"""

from __future__ import annotations

import re

# C0 and C1 controls but the tab and the newline, and the characters that change the direction of the text
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Return a text with its control characters written out, such as \\x1b."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
