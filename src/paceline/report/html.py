"""HTML from Python values: elements with escaped text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already; everything else is escaped."""

    __slots__ = ()


def tag(name: str, *children: str | Iterable[str], **attributes: str | None) -> Html:
    """One element.

    Args:
        children: text, elements, or lists of them.
        attributes: `class_` for class, `data_tip` for data-tip; None leaves one out.
    """
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{spelled}>{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Html:
    """Elements and escaped text, one after another."""
    return Html("".join(_to_html(child) for child in children))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "scroll", style: str | None = None
) -> Html:
    """A table that scrolls sideways where it is too wide; the first column is the name of the row."""
    body = [tag("tr", tag("th", name, scope="row"), [tag("td", cell) for cell in cs]) for name, *cs in rows]
    headline = tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head]))
    return tag("div", tag("table", headline, tag("tbody", body)), class_=kind, style=style)


def _to_html(child: str | Iterable[str]) -> str:
    if isinstance(child, Html):
        return child
    return escape(child) if isinstance(child, str) else join(child)
