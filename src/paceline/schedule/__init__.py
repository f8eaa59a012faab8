"""Pipeline schedules as data: tables, where they come from, and what is proven of them. Torch-free."""

from paceline.schedule.families import gpipe, interleaved, one_f_one_b, two_buffered, zero_bubble
from paceline.schedule.file import as_word, is_file, read_table, write_rows
from paceline.schedule.picture import facts, svg, text_lines
from paceline.schedule.proof import Proof, Row, prove
from paceline.schedule.table import (
    Action,
    MakeTable,
    Place,
    Table,
    after,
    arrivals,
    before,
    fit_together,
    on_the_way,
    parts_within,
    samples_of,
)

__all__ = [
    "Action",
    "MakeTable",
    "Place",
    "Proof",
    "Row",
    "Table",
    "after",
    "arrivals",
    "as_word",
    "before",
    "facts",
    "fit_together",
    "gpipe",
    "interleaved",
    "is_file",
    "on_the_way",
    "one_f_one_b",
    "parts_within",
    "prove",
    "read_table",
    "samples_of",
    "svg",
    "text_lines",
    "two_buffered",
    "write_rows",
    "zero_bubble",
]
