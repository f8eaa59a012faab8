"""The files of a recipe: a TOML file and the chain of files that it extends, merged key by key.

`extends = "base.toml"` names a file relative to the file that has the key. Tables are merged key by key;
every other value, lists included, is replaced.

Invariant: every key of the merged recipe has a place, the file and line that decided it, and a level, the
position of that file in the chain.
"""

from __future__ import annotations

import errno
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.strategy import Strategy
from paceline.recipe.toml_text import KeyPath, closest_word, locate_keys, parse_toml, shown_value

EXTENDS = "extends"
"""The key that names the base of a recipe. It belongs to the file: no resolved recipe has it."""

EXCLUSIVE_KEYS: Mapping[KeyPath, str] = {("steps",): "epochs", ("epochs",): "steps"}
"""Keys of which a recipe has only one; a later one, of an override or a file, removes the other."""

_MAX_RECIPE_BYTES = 2**22


@dataclass
class MergedFiles:
    """The keys of a file and of the files that it extends.

    Args:
        values: plain values of the recipe, by key.
        places: "FILE, line N" of every key and table.
        levels: position in the chain, from 0 for its first base, of the file that set a key.
        num_files: length of the chain.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    levels: dict[KeyPath, int] = field(default_factory=dict)
    num_files: int = 0

    def add(self, values: dict[str, Any], places: Mapping[KeyPath, str]) -> None:
        """Put the keys of an extending file over those of its bases."""
        for path, rival in EXCLUSIVE_KEYS.items():
            if path[0] in values and rival not in values:
                self._remove(self.values, (rival,))
        if isinstance(self.values.get("strategy"), str) and isinstance(values.get("strategy"), dict):
            with suppress(StrategyError):  # the text stays, and validation reports it with its place
                self.values["strategy"] = dict(Strategy.parse(self.values["strategy"]))
        self._merge(self.values, values, ())
        self.places |= places
        self.num_files += 1

    def _merge(self, base: dict[str, Any], values: Mapping[str, Any], table: KeyPath) -> None:
        for name, value in values.items():
            path = (*table, name)
            if isinstance(value, dict) and isinstance(base.get(name, {}), dict):
                self._merge(base.setdefault(name, {}), value, path)
            else:
                self._remove(base, path)
                base[name], self.levels[path] = value, self.num_files

    def _remove(self, table: dict[str, Any], path: KeyPath) -> None:
        """Remove a key, with the places of what is inside its value."""
        table.pop(str(path[-1]), None)
        for inner in [inner for inner in self.places if inner[: len(path)] == path]:
            del self.places[inner]


def read_recipe_files(path: Path) -> MergedFiles:
    """Read a recipe file and the files that it extends.

    The task's file of a base is relative to the folder of that base; in the result it is relative to the
    folder of `path`.

    Raises:
        RecipeError: a file cannot be read, is not TOML, or extends itself; names the file, and the line.
    """
    folder, merged = _real_path(path).parent, MergedFiles()
    for name, values, places in reversed(list(_read_chain(path))):
        file, colon, function = str(values.get("task", "")).partition(":")
        home = _real_path(Path(name)).parent
        if file.endswith(".py") and home != folder:
            values["task"] = f"{os.path.relpath(home / file, folder)}{colon}{function}"
        merged.add(values, places)
    return merged


def _read_chain(path: Path) -> Iterator[tuple[str, dict[str, Any], dict[KeyPath, str]]]:
    """Yield the name, the values and the places of a file, of its base, and so on."""
    seen: list[Path] = []
    named_at = ""
    while True:
        text = _read_text(path, named_at)
        values = _parse(text, str(path))
        places = {key: f"{path}, line {line}" for key, line in locate_keys(text).items()}
        seen.append(_real_path(path))
        base = values.pop(EXTENDS, None)
        named_at = places.pop((EXTENDS,), "")
        yield str(path), values, places
        if base is None:
            return
        if not isinstance(base, str) or not base or "\0" in base:
            raise RecipeError(
                f"{EXTENDS}: expected the path of a recipe, found {shown_value(base)}",
                where=named_at,
                next_step='name one TOML file, relative to this one: extends = "base.toml"',
            )
        path = (_real_path(path) if path.is_symlink() else path).parent / base
        if _real_path(path) in seen:
            names = " -> ".join(file.name for file in [*seen, _real_path(path)])
            raise RecipeError(
                f"the recipe extends itself: {names}",
                where=named_at,
                next_step="remove extends from one of these files",
            )


def _real_path(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError on a loop of links


def _read_text(path: Path, named_at: str) -> str:
    """Read a file; `named_at` is the line that extends it, or empty."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise OSError(errno.EINVAL, "not a regular file")
        if path.stat().st_size > _MAX_RECIPE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {_MAX_RECIPE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError("the recipe is not UTF-8 text", where=f"{path}, byte {error.start}") from None
    except OSError as error:
        near = closest_word(path.name, (other.name for other in path.parent.glob("*.toml")))
        advice = f"did you mean {path.parent / near}?" if near else "give the path of a TOML file"
        what = f"the recipe that it extends, {path}" if named_at else "the recipe"
        raise RecipeError(
            f"cannot read {what}: {error.strerror}",
            where=named_at or str(path),
            next_step=advice,
        ) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, name) from None


def _syntax_error(message: str, text: str, name: str) -> RecipeError:
    """Return the error of tomllib with the line that it is about, and the most frequent mistakes."""
    lines = text.splitlines()
    match = re.search(r"at line (\d+), column (\d+)", message)
    line = int(match[1]) if match else len(lines)
    problem = re.sub(r" \(at .*\)$", "", message)
    shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return RecipeError(
        f"not TOML: {problem}" + (f", in: {shown}" if shown else ""),
        where=f"{name}, line {line}",
        next_step='put text in quotes (task = "digits"), write true and false in lower case, each key once',
    )
