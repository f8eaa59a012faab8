"""The words of a strategy as users write them: each is known, and its argument fits.

Raises: what `refused` makes of them; names the nearest right spelling.
"""

from __future__ import annotations

from typing import Any

from paceline.recipe.channel_words import ChannelSpec
from paceline.recipe.phases import choices_of, phases_of
from paceline.recipe.problems import found_instead, refused
from paceline.recipe.specs import (
    CodecSpec,
    LayoutSpec,
    RouteSpec,
    ScheduleSpec,
    Spec,
    SyncSpec,
    find,
    known,
    plugged_in,
)
from paceline.schedule import as_word

_CHOSEN = "auto:every-step,diloco:8"


def check_word(text: str, kind: type[Spec]) -> str:
    """A word of a choice with its argument, as it is written."""
    word, colon, argument = text.partition(":")
    spec = find(kind, word)
    if spec is None:
        words = tuple(known(kind))
        raise refused(found_instead("one of " + ", ".join(words), text, words))
    if spec.argument is None and colon:
        raise refused(found_instead(f'"{word}" without an argument', text))
    if not colon and spec.argument_may_be_missing:
        return text
    if spec.argument is not None and not (argument and spec.argument.fits(argument)):
        raise refused(found_instead(f'{spec.argument.says}, as in "{spec.example}"', text))
    return text


def check_sync(text: str) -> str:
    """Every rule of a run, or every-step and what it may choose instead."""
    words = known(SyncSpec)
    specs = [words[check_word(p.rule, SyncSpec).partition(":")[0]] for p in phases_of(text)]
    fits = not any(spec.chooses for spec in specs)
    if allowed := choices_of(text):
        fits &= all((spec.sums or spec.sends) and not spec.needs_server for spec in specs)
        fits &= allowed[0] == "every-step" and 1 < len(allowed) == len({*allowed})
    if not fits:
        rules = "every-step, then local:H, diloco:H or gossip:S by comma"
        raise refused(found_instead(f"{rules}, as in {_CHOSEN}", text))
    return text


def check_codec(text: str) -> str:
    """A codec, a chain of them, or some to choose from."""
    word, _, allowed = text.partition(":")
    whole = find(CodecSpec, word)
    if whole is not None and whole.chooses:
        for one in allowed.split(",") if allowed else ():
            if check_codec(one).partition(":")[0] in (word, "fp32"):
                raise refused(found_instead(f"codecs by comma behind {word}", one))
        return text
    return "+".join(check_word(link, CodecSpec) for link in text.split("+"))


def check_route(text: str) -> str:
    """A route."""
    return check_word(text, RouteSpec)


def check_channel(text: str) -> str:
    """A channel."""
    return check_word(text, ChannelSpec)


def check_schedule(text: str) -> str:
    """A schedule."""
    return check_word(as_word(text), ScheduleSpec)


def check_stages(text: str) -> str:
    """How a pipeline is cut: a word, or a number of modules for each of its stages."""
    counts = text.split(",")
    if text in ("parameters", "time") or all(n.isdecimal() and int(n) > 0 for n in counts):
        return text
    words = ("parameters", "time")
    raise refused(found_instead("parameters, time, or numbers of modules as in 3,5", text, words))


def check_rechunk(text: str) -> str:
    """In how many parts stages run micro-batches: a number for each stage."""
    if all(n.isdecimal() and int(n) > 0 for n in text.split(",") if text):
        return text
    raise refused(found_instead("a number of parts for each stage, as in 1,4", text))


def numbers_in(text: str) -> list[int]:
    """What stands between commas, once it was checked."""
    return [int(n) for n in text.split(",") if n]


_PARTITIONS = ("fixed", "min-size:BYTES", "max-size:BYTES")


def check_partition(text: str) -> str:
    """How tensors are cut for several servers."""
    kind, _, count = text.partition(":")
    if text == "fixed" or (kind in ("min-size", "max-size") and count.isdecimal() and int(count) > 0):
        return text
    raise refused(found_instead("fixed, min-size:BYTES or max-size:BYTES", text, _PARTITIONS))


def check_cut(text: str) -> str:
    """A cut that an installed package brings."""
    words = tuple(plugged_in(LayoutSpec))
    if text and text not in words:
        installed = f"one of {', '.join(words)}" if words else "nothing, as no installed package brings a cut"
        raise refused(found_instead(installed, text, words))
    return text


def all_is_none(value: Any) -> Any:
    """`replicas=all`."""
    return None if value == "all" else value
