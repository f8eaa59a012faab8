"""A text for tests of `byte-gpt` that do not ask which."""

import sysconfig
from pathlib import Path

SMALL_TEXT = str(Path(sysconfig.get_path("stdlib"), "asyncio"))
"""Some thirty files, half a megabyte; to open all of the standard library takes every rank 0.08 s."""
