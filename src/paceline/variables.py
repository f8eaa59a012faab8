"""What the variables of a worker say about its place: those of torchrun, and those of Paceline's launcher.

Pure: the variables are an argument; only `paceline.cluster` looks at the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError

_LOOPBACK = "127.0.0.1"


def read_place(values: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `Cluster` for a process that has a rank.

    Raises:
        CommunicationError: a variable is missing, or is no number.
    """
    world_size = _integer(values, "WORLD_SIZE")
    alone = world_size == 1
    local_world_size = _integer(values, "LOCAL_WORLD_SIZE", 1 if alone else None)
    return {
        "global_rank": _integer(values, "RANK"),
        "world_size": world_size,
        "local_rank": _integer(values, "LOCAL_RANK", 0 if alone else None),
        "local_world_size": local_world_size,
        "node_rank": _integer(values, "GROUP_RANK", 0 if local_world_size == world_size else None),
        "num_nodes": _integer(values, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        "address": _text(values, "MASTER_ADDR", _LOOPBACK if alone else None),
        "port": _integer(values, _port_name(values), 0 if alone else None),
        "listen_fd": _optional(values, "PACELINE_LISTEN_FD"),
        "store_fd": _optional(values, "PACELINE_STORE_FD"),
        "token": values.get("PACELINE_TOKEN", ""),
        "error_dir": Path(values["PACELINE_ERROR_DIR"]) if values.get("PACELINE_ERROR_DIR") else None,
        "agent_store": values.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not _is_ours(values),
        "attempt": _integer(values, "TORCHELASTIC_RESTART_COUNT", 0),
        "launched": True,
        "beacon_port": _integer(values, "PACELINE_BEACON_PORT", 0),
        "tls": values.get("PACELINE_TLS", "auto"),
        "faults_dir": Path(values["PACELINE_FAULTS"]) if values.get("PACELINE_FAULTS") else None,
    }


def environment_error(what: str) -> CommunicationError:
    """An error in the variables of this process."""
    return CommunicationError(
        what,
        where="the environment variables of this process",
        next_step="start the job with paceline or torchrun, or unset RANK and WORLD_SIZE",
    )


def _is_ours(values: Mapping[str, str]) -> bool:
    """Whether Paceline's launcher has started this process."""
    return "PACELINE_STORE_FD" in values or "PACELINE_STORE_PORT" in values


def _port_name(values: Mapping[str, str]) -> str:
    """The variable with the port of the store; for a script, MASTER_PORT is where torch's own is."""
    return "PACELINE_STORE_PORT" if "PACELINE_STORE_PORT" in values else "MASTER_PORT"


def _optional(values: Mapping[str, str], name: str) -> int | None:
    return _integer(values, name) if name in values else None


def _text(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    value: Any = values.get(name, default)
    if value is None:
        raise environment_error(f"WORLD_SIZE or RANK is set, but {name} is not.")
    return str(value)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = _text(values, name, None if default is None else str(default))
    try:
        return int(text)
    except ValueError as error:
        raise environment_error(f"{name}={text!r} is not an integer.") from error
