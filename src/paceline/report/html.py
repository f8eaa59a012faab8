"""HTML elements from Python values, with escaped text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """A string that is HTML already; all other strings are escaped."""

    __slots__ = ()


def tag(name: str, *children: str | Iterable[str], **attributes: str | None) -> Html:
    """Return one element.

    Args:
        children: text, elements, or lists of them.
        attributes: `class_` for class, `data_tip` for data-tip; an attribute that is None is left out.
    """
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Html:
    """Return elements and escaped text, one after another."""
    return Html("".join(_to_html(child) for child in children))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "scroll", style: str | None = None
) -> Html:
    """Return a table that scrolls sideways if it is too wide; the first column names the rows."""
    body = [tag("tr", tag("th", name, scope="row"), [tag("td", cell) for cell in cs]) for name, *cs in rows]
    headline = tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head]))
    return tag("div", tag("table", headline, tag("tbody", body)), class_=kind, style=style)


def _to_html(child: str | Iterable[str]) -> str:
    if isinstance(child, Html):
        return child
    return escape(child) if isinstance(child, str) else join(child)
