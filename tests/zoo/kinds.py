"""All kinds of models, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zoo.changing import CHANGING
from tests.zoo.computed import COMPUTED
from tests.zoo.kind import Kind
from tests.zoo.stored import STORED

KINDS: Mapping[str, Kind] = {**STORED, **COMPUTED, **CHANGING}
