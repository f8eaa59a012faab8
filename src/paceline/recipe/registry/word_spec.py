"""The base of all word specifications, and the one function that parses a word of a strategy.

A strategy string such as `sync=diloco:16 codec=topk:0.01+int4` is made of words with arguments. Each word
has a specification (`WordSpec`), without torch and before anything is built: from it follow parsing,
support, refusals, checkpointing, closed forms, and the function that builds the object. A word is specified
in one line of `registry/*_specs.py`, or by an installed package, as an entry point of the group
`paceline.CHOICE`.

Invariant: `parse_word` is the only code that splits a word from its argument. Everything else gets a
`ParsedWord` and reads attributes of its specification, so no other module compares names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from paceline.recipe.validation import expected_message, value_error

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


class WordArgument(NamedTuple):
    """The argument of a word: the text after its colon.

    Args:
        example: a valid one.
        says: the description of valid arguments, for error messages.
        parse: returns the value of a text that is not empty, or raises ValueError.
    """

    example: str
    says: str
    parse: Callable[[str], Any]


class StrategyRefusal(NamedTuple):
    """A combination that a word does not support: the reason in one line, and the test for it."""

    reason: str
    holds: Callable[[Strategy], bool]


@dataclass(frozen=True, kw_only=True)
class WordSpec:
    """The specification of a word.

    Args:
        word: as users write it.
        summary: a few words on what it does.
        argument: what is expected after a colon; None: no argument.
        argument_may_be_missing: the word may stand alone, and its argument is then None.
        build: `module:name` of the function that builds the object; empty: not implemented yet.
        with_terms: further terms of the smallest strategy that shows it.
        refusals: the combinations that it does not support.
        chooses: it stands for one of several words until measurements show which is fastest.
    """

    choice: ClassVar[str]
    word: str
    summary: str = ""
    argument: WordArgument | None = None
    argument_may_be_missing: bool = False
    build: str = ""
    with_terms: str = ""
    refusals: tuple[StrategyRefusal, ...] = ()
    chooses: bool = False

    @property
    def example(self) -> str:
        """Return the word as it is written, with an argument if it needs one."""
        if self.argument is None or self.argument_may_be_missing:
            return self.word
        return f"{self.word}:{self.argument.example}"

    @property
    def is_built(self) -> bool:
        """Return whether the word can run."""
        return bool(self.build)

    def load(self) -> Any:
        """Import and return the function that builds the object."""
        return import_object(self.build)


S = TypeVar("S", bound=WordSpec)


class ParsedWord(NamedTuple, Generic[S]):
    """A word of a strategy, parsed.

    Args:
        spec: its specification.
        argument: the value that `spec.argument.parse` made; None if the word stands alone.
    """

    spec: S
    argument: Any


@lru_cache(maxsize=512)
def _parse_word(kind: Any, text: str) -> ParsedWord[Any]:
    word, colon, argument = text.partition(":")
    spec = find_spec(kind, word)
    if spec is None:
        words = tuple(known_specs(kind))
        raise value_error(expected_message("one of " + ", ".join(words), text, words))
    if spec.argument is None and colon:
        raise value_error(expected_message(f'"{word}" without an argument', text))
    if spec.argument is None or (not colon and spec.argument_may_be_missing):
        return ParsedWord(spec, None)
    try:
        value = spec.argument.parse(argument) if argument else None
    except ValueError:
        value = None
    if value is None:
        raise value_error(expected_message(f'{spec.argument.says}, as in "{spec.example}"', text))
    return ParsedWord(spec, value)


def parse_word(kind: type[S], text: str) -> ParsedWord[S]:
    """Parse a word with its argument, such as `diloco:16`.

    Args:
        kind: the class of the specification, which decides between words of the same name.
    Raises:
        PydanticCustomError: the word is unknown, or its argument is not valid.
    """
    # Strategies are asked for their words in every step of a run, so results are cached. Errors are not.
    hashable: Any = kind
    return cast("ParsedWord[S]", _parse_word(hashable, text))


def import_object(path: str) -> Any:
    """Import the module of `module:name`, and return the object."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def integer_argument(smallest: int, example: str, largest: int = 1 << 31) -> WordArgument:
    """Return an argument that is an integer from `smallest` to `largest`."""
    says = f"an integer >= {smallest}" if largest == 1 << 31 else f"an integer from {smallest} to {largest}"

    def parse(text: str) -> int:
        if not (text.isdecimal() and smallest <= int(text) <= largest):
            raise ValueError(text)
        return int(text)

    return WordArgument(example, says, parse)


def parse_counts(text: str) -> list[int]:
    """Return the integers between commas of a text that was checked before."""
    return [int(number) for number in text.split(",") if number]


# ---------------------------------------------------------------------- all words, and those of plug-ins


def find_spec(kind: type[S], word: str) -> S | None:
    """Return the specification of a word; None: the word is unknown."""
    return builtin_specs(kind).get(word) or plugin_specs(kind).get(word)


def known_specs(kind: type[S]) -> dict[str, S]:
    """Return all specifications of a kind by word, built-in ones first.

    An installed package cannot change the meaning of a built-in word.
    """
    return {**builtin_specs(kind), **plugin_specs(kind), **builtin_specs(kind)}


def builtin_specs(kind: type[S]) -> Mapping[str, S]:
    """Return the specifications that come with this package, by word."""
    from paceline.recipe.registry import SPECS_BY_CHOICE  # the package imports this module first

    return SPECS_BY_CHOICE[kind.choice]


@cache
def _load_plugins(choice: str) -> tuple[WordSpec, ...]:
    return tuple(entry.load() for entry in entry_points(group=f"paceline.{choice}"))


def plugin_specs(kind: type[S]) -> dict[str, S]:
    """Return the specifications of other installed packages, by word; they are looked up once."""
    return {spec.word: spec for spec in _load_plugins(kind.choice) if isinstance(spec, kind)}


def forget_plugins() -> None:
    """Look installed packages up again at the next use."""
    _load_plugins.cache_clear()
    _parse_word.cache_clear()
