"""What a run cost, as parts of the page: the time of every rank, and the bytes that it sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.balance import HEAD, balance, balance_rows, balance_words
from paceline.report.closed_form import sent
from paceline.report.facts import spell_bytes, spell_seconds, spell_share
from paceline.report.html import Html, join, table, tag
from paceline.report.read import Record, Run
from paceline.report.shares import PARTS, RankTime, rank_times

_TIMES = (
    "Time inside the steps, between marks of each process. Transfer and waiting are the communication that "
    "a rank saw; waiting is what it waited longer than the rank that waited least in the same round."
)
_BYTES = (
    "Counted: what was passed to the collectives inside the steps. Closed form: 2 (P − 1) / P times the "
    "bytes of gradient and tally once a round, from the size of the model and the number of ranks P alone."
)
_LIGHT_PARTS = ("waiting", "other")


def times(runs: Sequence[Run]) -> Html:
    """Stacked shares of every rank, and a table of what its process used."""
    found = [(run, rank) for run in runs for rank in rank_times(run)]
    if not found:
        return Html("")
    keys = [tag("span", tag("i", style=f"background: var(--{part})"), part) for part in PARTS]
    bars = [_bar(_rank_name(runs, run, rank), rank) for run, rank in found]
    rows = [[_rank_name(runs, run, rank), *_used(rank)] for run, rank in found]
    head = ["", "mean step", "slowest step", "hidden communication", "cores busy", "peak memory"]
    card = tag(
        "div", tag("div", keys, class_="legend"), tag("div", bars, class_="bars"), class_="card shares"
    )
    return join(
        [
            tag("h2", "Where the time goes"),
            card,
            tag("p", _TIMES, class_="note"),
            table(head, rows, style="margin-top: 12px"),
        ]
    )


def _used(rank: RankTime) -> list[str]:
    return [
        spell_seconds(rank.seconds / rank.rounds),
        spell_seconds(rank.slowest_seconds),
        spell_share(rank.hidden_fraction) if rank.hidden_seconds else "–",
        f"{rank.cpu_seconds / rank.seconds:.2f}" if rank.seconds else "–",
        spell_bytes(rank.peak_bytes),
    ]


def _rank_name(runs: Sequence[Run], run: Run, rank: RankTime) -> str:
    return f"rank {rank.rank}" if len(runs) == 1 else f"{run.name}, rank {rank.rank}"


def _bar(name: str, rank: RankTime) -> Html:
    parts = [_piece(rank, part) for part in PARTS if rank.share(part) >= 0.0005]
    return tag("div", tag("span", name), tag("div", parts), class_="bar")


def _piece(rank: RankTime, part: str) -> Html:
    share = rank.share(part)
    seconds = spell_seconds(rank.parts[part] / rank.rounds)
    return tag(
        "b",
        f"{100 * share:.0f}%" if share >= 0.05 else "",
        class_="light" if part in _LIGHT_PARTS else None,
        style=f"width: {100 * share:.3f}%; background: var(--{part})",
        data_tip=f"{part}: {100 * share:.1f} % · {seconds} a round",
    )


def evenness(run: Run) -> Html:
    """Seconds, bytes and memory of every rank in one table, and what is uneven in words."""
    shares = balance(run)
    if not shares:
        return Html("")
    lines = [tag("p", line) for line in balance_words(shares)]
    shown = table(list(HEAD), balance_rows(shares))
    return join([tag("h2", "How even the ranks are"), shown, tag("div", lines, class_="card words")])


# -- bytes -------------------------------------------------------------------------------------------------


def traffic(runs: Sequence[Run]) -> Html:
    """Bytes of every rank against the closed form, and the ledger of rank 0."""
    rows = []
    for run in runs:
        for one in sent(run) if run.ranks > 1 else ():
            expected = "–" if one.expected_bytes is None else spell_bytes(one.expected_bytes / one.rounds)
            name = f"rank {one.rank}" if len(runs) == 1 else f"{run.name}, rank {one.rank}"
            counted = spell_bytes(one.counted_bytes / one.rounds)
            rows.append([name, f"{one.rounds:,}", counted, expected, _verdict(one.agrees)])
    if not rows:
        return Html("")
    head = ["", "rounds", "counted, a round", "closed form", ""]
    books = _books(runs[0]) if len(runs) == 1 else Html("")
    return join([tag("h2", "What is sent"), table(head, rows), tag("p", _BYTES, class_="note"), books])


def _verdict(agrees: bool | None) -> Html:
    if agrees is None:
        return tag("span", "no form known")
    return tag("span", "equal", class_="ok") if agrees else tag("span", "differs", class_="no")


def _books(run: Run) -> Html:
    books = [record for record in run.last_trained if record.get("event") == "communication"]
    if not books:
        return Html("")
    ledger = table(
        ["operation, group", "calls", "payload", "sent", "hidden"],
        [_entry(name, row) for name, row in sorted(books[-1]["rows"].items())],
    )
    return tag("details", tag("summary", "Every collective of rank 0, also outside of the steps"), ledger)


def _entry(name: str, row: Record) -> list[str]:
    sizes = [spell_bytes(row["payload_bytes"]), spell_bytes(row["sent_bytes"])]
    return [name, f"{row['calls']:,}", *sizes, spell_share(row["hidden_fraction"])]
