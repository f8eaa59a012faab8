"""Pipeline schedules as data: tables, where they come from, and what is proven of them. Torch-free."""

from paceline.schedule.families import gpipe, interleaved, one_f_one_b, zero_bubble
from paceline.schedule.file import as_word, is_file, read_table, write_rows
from paceline.schedule.picture import facts, svg, text_lines
from paceline.schedule.proof import Proof, Row, prove
from paceline.schedule.table import Action, MakeTable, Table, after, before

__all__ = [
    "Action",
    "MakeTable",
    "Proof",
    "Row",
    "Table",
    "after",
    "as_word",
    "before",
    "facts",
    "gpipe",
    "interleaved",
    "is_file",
    "one_f_one_b",
    "prove",
    "read_table",
    "svg",
    "text_lines",
    "write_rows",
    "zero_bubble",
]
