"""Every parser of what others may have written: the inputs that it is given, and what calls it with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from paceline.checkpoint.safetensors_file import decode_tensors
from paceline.comm.channel import FRAME_LENGTHS, ChannelMessage
from paceline.comm.channel.message_channel import as_bytes
from paceline.job.handshake import decode_hello, encode_hello
from paceline.job.launcher_reports import read_node_list, read_phase
from paceline.job.store_protocol import StoreMessage as Asked
from paceline.job.store_protocol import decode_members, encode_message, pop_message
from paceline.launch.fork_server import ForkRequest
from paceline.recipe.toml_text import parse_toml
from tests.hostile import formats
from tests.hostile import parser_checks as checks
from tests.hostile.formats import changed, damaged, encoded, lines_of, record_of, tensor_file, values
from tests.hostile.notice_server import read_notice, urls

HEAD, BODIES = ChannelMessage("x", {"a": 1}, [torch.ones(3)]).encode()
FRAME = b"".join((HEAD, *BODIES))
lengths = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)).map(
    lambda two: FRAME_LENGTHS.pack(*two)
)
LETTER = len(encoded(formats.ORDER)).to_bytes(8, "big") + encoded(formats.ORDER)
HELLO = encode_hello(1, bytes(range(32))) + bytes(32)

PARSERS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], checks.Check]] = {
    "recipe": (lambda: st.one_of(damaged(formats.RECIPE), st.binary(max_size=200)), checks.read_recipe),
    "override": (
        lambda: st.one_of(
            st.text(max_size=40),
            st.tuples(st.sampled_from(["steps=", "options.x=", "batch.size="]), st.text(max_size=30)).map(
                "".join
            ),
        ),
        checks.read_override,
    ),
    "toml": (lambda: st.text(max_size=200), checks.refuses(ValueError)(parse_toml)),
    "manifest": (lambda: st.one_of(changed(formats.MANIFEST), values), checks.read_shelf),
    "small files of a run": (
        lambda: st.tuples(record_of(formats.IDENTITY), record_of({"3": 0.5}), record_of(formats.MANIFEST)),
        checks.read_small_files,
    ),
    "report of a rank": (
        lambda: st.one_of(changed({"files": [formats.FILE], "scalars": formats.SCALARS}), values),
        checks.read_part,
    ),
    "tensor file": (
        lambda: st.one_of(
            changed(formats.TENSORS).map(tensor_file),
            damaged(tensor_file(formats.TENSORS)),
            st.binary(max_size=80),
        ),
        checks.refuses(ValueError)(lambda data: decode_tensors(bytearray(data))),
    ),
    "weights": (
        lambda: st.one_of(changed(formats.WEIGHTS).map(tensor_file), damaged(tensor_file(formats.WEIGHTS))),
        checks.read_weights,
    ),
    "weights in parts": (lambda: record_of(formats.INDEX), checks.read_index),
    "frame": (
        lambda: st.tuples(record_of(formats.HEADER), st.sampled_from([0, 3, 16, 19]).map(bytearray)),
        checks.refuses(ValueError)(lambda found: ChannelMessage.decode(found[0], as_bytes(found[1]), 1)),
    ),
    "frames on a channel": (
        lambda: st.one_of(
            damaged(FRAME), damaged(2 * FRAME), st.tuples(lengths, st.binary(max_size=60)).map(b"".join)
        ),
        checks.read_stream,
    ),
    "hello": (lambda: st.binary(max_size=80), checks.refuses(ValueError)(decode_hello)),
    "callers of a hub": (lambda: st.one_of(damaged(HELLO), st.binary(max_size=90)), checks.read_hub),
    "message to the store": (
        lambda: st.one_of(
            st.binary(max_size=80), damaged(encode_message(Asked(1, b"W", (b"0.1", b"1,2", b"key"))))
        ),
        checks.refuses(ValueError)(lambda found: pop_message(bytearray(found))),
    ),
    "members": (lambda: st.binary(max_size=40), checks.refuses(ValueError)(decode_members)),
    "order of a worker": (
        lambda: st.tuples(st.one_of(changed(formats.ORDER), values), st.lists(st.integers(3, 9), max_size=6)),
        lambda found: ForkRequest.read(*found),
    ),
    "messages of a fork server": (
        lambda: st.one_of(damaged(LETTER), damaged(2 * LETTER), st.binary(max_size=60)),
        checks.read_messages,
    ),
    "error of a worker": (lambda: record_of(formats.ERROR), checks.read_report),
    "phase": (
        lambda: record_of({"what": "training", "until": 3.0}),
        lambda data: read_phase(checks.written("rank-0.phase", data).parent, 0),
    ),
    "roster": (
        lambda: record_of([{"rank": 1, "host": "h", "address": "10.0.0.1", "port": 5}]),
        lambda data: read_node_list(checks.written("roster.json", data).parent),
    ),
    "metrics": (
        lambda: st.tuples(
            st.one_of(
                st.one_of(changed(formats.METRICS), values).map(lines_of), damaged(lines_of(formats.METRICS))
            ),
            record_of(formats.CERTIFICATE),
        ),
        checks.read_metrics,
    ),
    "tokenizer": (lambda: record_of(formats.right_tokenizer()), checks.read_tokenizer),
    "notice": (urls, read_notice),
}

CHANGES = {"notice": 1, "order of a worker": 0}
"""Of an input that is a tuple, the only part that `havoc` changes: a URL would lead away from this host, and
the numbers of files are the kernel's."""
