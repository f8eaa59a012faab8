"""What `tc` is told: token buckets for rates, netem for delays where there is one. Pure but for the probe.

A rate counts Ethernet frames without preamble and check sequence: of 1,514 bytes of a full frame 1,448 are
payload of TCP (with its time stamps), so TCP's goodput is 95.6 % of the rate at most. A bucket holds 1 ms
of the rate: a message that is smaller leaves at once, a stream has the rate. Frames wait up to 50 ms, then
they are lost, as in a switch.
"""

from __future__ import annotations

from paceline.errors import LabError
from paceline.lab.namespaces import Space
from paceline.lab.topology import Wire

UNLIMITED_BITS = 100e9
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
_BURST_SECONDS, _LEAST_BURST_BYTES = 1e-3, 6000
_QUEUE_SECONDS, _LEAST_QUEUE_BYTES = 0.05, 128 * 1024


def render_rate(device: str, wire: Wire, verb: str = "add") -> str:
    """The `tc -batch` line for a rate; a link without a limit has a bucket that never fills, which counts."""
    rate = wire.rate_bits or UNLIMITED_BITS
    burst = max(_LEAST_BURST_BYTES, int(min(rate, 10e9) / 8 * _BURST_SECONDS))
    limit = burst + max(_LEAST_QUEUE_BYTES, int(min(rate, 10e9) / 8 * _QUEUE_SECONDS))
    return f"qdisc {verb} dev {device} root handle 1: tbf rate {rate:.0f}bit burst {burst} limit {limit}"


def render_netem(device: str, wire: Wire, seed: int, verb: str = "add") -> str:
    """The `tc -batch` line for a delay, inside the token bucket of the same device."""
    jitter = f" {wire.jitter_seconds * 1e6:.0f}us" if wire.jitter_seconds else ""
    loss = f" loss {wire.loss * 100:g}%" if wire.loss else ""
    delay = f"delay {wire.latency_seconds * 1e6:.0f}us{jitter}{loss}"
    return f"qdisc {verb} dev {device} parent 1:1 handle 10: netem limit 100000 {delay} seed {seed}"


def render_redirect(device: str, tap: str) -> list[str]:
    """The `tc -batch` lines that send everything that arrives on a port to the forwarder's device."""
    return [
        f"qdisc add dev {device} handle ffff: ingress",
        f"filter add dev {device} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {tap}",
    ]


def has_netem(space: Space) -> bool:
    """Whether the kernel has netem: tried on the loopback of a namespace, where it disturbs nobody."""
    try:
        space.tool(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except LabError:
        return False
    space.tool(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True
