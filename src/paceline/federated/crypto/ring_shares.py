"""Arithmetic on additive shares in Z_2^64: the shares of a secret add up to it, modulo 2^64.

A secret is a fixed-point number with 20 fraction bits. Sums are local. A product takes a trusted dealer, a
party of its own that sees no data: it deals random masks a and b with shares of a b (Beaver 1991), the
parties open x - a and y - b, and x y follows. After a product the fraction bits are halved again by a
truncation pair.
Invariant: all that is opened on the way is uniform in the ring; shares come from the system's entropy.

This is correct and slow, for parties that are honest but curious: one that sends a wrong share is not
noticed, and a dealer that colludes with any party reveals everything. Values must stay below 2^22.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CommunicationError, DataError
from paceline.federated.crypto.parties import Party

FRACTION_BITS = 20
_LARGEST = 2.0 ** (62 - 2 * FRACTION_BITS)
_LOW_63 = (1 << 63) - 1

RandomBytes = Callable[[int], bytes]
"""A source of so many random bytes; the operating system's, except in tests."""


def encode_fixed(x: Tensor) -> Tensor:
    """Round to multiples of 2^-20, as int64 of the same shape.

    Raises:
        DataError: a value is not finite, or at least 2^22.
    """
    if not bool((x.abs() < _LARGEST).all()):
        raise DataError(
            f"a value of {x.abs().max().item():g} does not fit the ring: the limit is {_LARGEST:g}",
            next_step="scale the data; nothing is clipped silently",
        )
    return (x.double() * 2**FRACTION_BITS).round().long()


def decode_fixed(x: Tensor) -> Tensor:
    """Return the numbers that ring elements stand for, as float64."""
    return x.double() / 2**FRACTION_BITS


def draw_ring(shape: Sequence[int], random: RandomBytes = secrets.token_bytes) -> Tensor:
    """Draw uniform elements of the ring, int64."""
    count = math.prod(shape)
    body = bytearray(random(8 * count))
    flat = torch.frombuffer(body, dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)
    return flat.view(*shape)


def split_secret(secret: Tensor, num_shares: int, random: RandomBytes = secrets.token_bytes) -> list[Tensor]:
    """Split ring elements, int64, into shares of the same shape; all but one together are uniform."""
    shares = [draw_ring(secret.shape, random) for _ in range(num_shares - 1)]
    return [*shares, secret - sum(shares, torch.zeros_like(secret))]


# By the words of `SharedArithmetic.multiply`. Integer products of PyTorch wrap modulo 2^64.
_PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x*y": lambda x, y: x * y,
    "x@y": lambda x, y: x @ y,
    "x.T@y": lambda x, y: x.T @ y,
    "x@y.T": lambda x, y: x @ y.T,
}


@dataclass(frozen=True)
class MaskedShare:
    """A share of a secret x whose difference to a mask of the dealer has been opened.

    It can be a factor of many products: the difference is opened once, so no more is revealed.

    Args:
        share: of x.
        opened: x - a, known to all computing parties.
        mask: share of a.
        number: of the mask, at the dealer.
    """

    share: Tensor
    opened: Tensor
    mask: Tensor
    number: int


class SharedArithmetic:
    """The side of one computing party. All of them call the same methods in the same order.

    Args:
        party: ranks below `num_computing` compute; the next one runs `serve_dealer`, if there is one.
        num_computing: two or more.
        random: the source of this party's shares.
    Attributes:
        num_opened: elements that were opened.
    """

    def __init__(self, party: Party, num_computing: int, random: RandomBytes = secrets.token_bytes) -> None:
        self.party, self.num_computing, self._random = party, num_computing, random
        self._num_masks = self.num_opened = 0
        self._peers = [rank for rank in party.others if rank < num_computing]

    def share(self, owner: int, secret: Tensor | None = None) -> Tensor:
        """Return this party's share of a secret.

        Args:
            owner: rank of the party that knows it.
            secret: ring elements, int64; None on all parties but the owner.
        """
        if self.party.rank != owner:
            return self.party.receive(owner, "share").tensors[0]
        if secret is None:
            raise DataError(f"party {owner} shares a secret that it does not have", next_step="pass `secret`")
        own, *others = split_secret(secret, self.num_computing, self._random)
        for peer, part in zip(self._peers, others, strict=True):
            self.party.send(peer, "share", [part])
        return own

    def open(self, x: Tensor) -> Tensor:
        """Reveal a secret to all computing parties, and return it."""
        for peer in self._peers:
            self.party.send(peer, "open", [x])
        self.num_opened += x.numel()
        return x + sum(self._part_of(peer, "open", x) for peer in self._peers)

    def reveal(self, x: Tensor, to: int) -> Tensor | None:
        """Reveal a secret to one party, and return it there; None on the others."""
        if self.party.rank != to:
            self.party.send(to, "reveal", [x])
            return None
        return x + sum(self._part_of(peer, "reveal", x) for peer in self._peers)

    def add_public(self, x: Tensor, value: Tensor | int) -> Tensor:
        """Add ring elements that all parties know to a secret."""
        return x + value if self.party.rank == 0 else x

    def mask(self, x: Tensor) -> MaskedShare:
        """Open x minus a new mask of the dealer."""
        number, self._num_masks = self._num_masks, self._num_masks + 1
        self._request("mask", number=number, shape=list(x.shape))
        (mask,) = self._receive_dealt(x)
        return MaskedShare(x, self.open(x - mask), mask, number)

    def multiply(self, x: MaskedShare, y: MaskedShare, how: str = "x*y") -> Tensor:
        """Return a share of a product, truncated to 20 fraction bits.

        Args:
            how: "x*y" by element; "x@y", "x.T@y" or "x@y.T" of matrices.
        """
        product = _PRODUCTS[how]
        self._request("product", x=x.number, y=y.number, how=how)
        (dealt,) = self._receive_dealt(None)
        z = dealt + product(x.opened, y.mask) + product(x.mask, y.opened)
        return self.truncate(self.add_public(z, product(x.opened, y.opened)))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return a share of x times a number that all parties know."""
        return self.truncate(x * encode_fixed(torch.tensor(factor)))

    def truncate(self, x: Tensor) -> Tensor:
        """Divide by 2^20 and round down, with an error of one unit in the last place; |x| is below 2^62.

        The dealer draws r and deals r, its top bit, and the other 63 bits shifted. With x made positive, the
        top bit of the opened x + r tells whether the lower bits wrapped: so no wrap is ever missed, for any
        number of parties. Local truncation (Mohassel and Zhang 2017) misses some with two parties, and with
        three almost all.

        Source: Dalskov, Escudero and Keller 2020, Secure Evaluation of Quantized Neural Networks,
            arXiv:1910.12435 (probabilistic truncation modulo 2^k).
        """
        self._request("truncate", shape=list(x.shape))
        r, shifted, top = self._receive_dealt(x, 3)
        c = self.open(self.add_public(x, 1 << 62) + r)
        c_top = (c >> 63) & 1
        wrapped = self.add_public(top - 2 * c_top * top, c_top)
        moved = self.add_public(-shifted, ((c & _LOW_63) >> FRACTION_BITS) - (1 << (62 - FRACTION_BITS)))
        return moved + wrapped * (1 << (63 - FRACTION_BITS))

    def forget(self, masked: Sequence[MaskedShare]) -> None:
        """Let the dealer drop masks that are used no more."""
        self._request("forget", numbers=[one.number for one in masked])

    def end(self) -> None:
        """Let the dealer return."""
        self._request("end")

    def _request(self, kind: str, **fields: Any) -> None:
        # One party asks for all: the dealer answers each of them.
        if self.party.rank == 0:
            self.party.send(self.num_computing, kind, **fields)

    def _receive_dealt(self, like: Tensor | None, count: int = 1) -> Sequence[Tensor]:
        dealt = self.party.receive(self.num_computing, "dealt").tensors
        if len(dealt) != count or (like is not None and any(one.shape != like.shape for one in dealt)):
            raise CommunicationError("the dealer dealt for another step", next_step=_SAME_STEPS)
        return dealt

    def _part_of(self, peer: int, kind: str, x: Tensor) -> Tensor:
        part = self.party.receive(peer, kind).tensors[0]
        if part.shape != x.shape or part.dtype is not torch.int64:
            raise CommunicationError(
                f"party {peer} opened {list(part.shape)} where this one has {list(x.shape)}",
                next_step=_SAME_STEPS,
            )
        return part


_SAME_STEPS = "let all parties call the same methods in the same order"


def serve_dealer(party: Party, random: RandomBytes = secrets.token_bytes) -> int:
    """Deal masks, products of masks and truncation pairs until the parties end; return the bytes dealt.

    The dealer gets shapes and no data. It is trusted: with any one party it could open everything.
    """
    masks: dict[int, Tensor] = {}

    def deal(*secrets_dealt: Tensor) -> None:
        parts = [split_secret(one, party.rank, random) for one in secrets_dealt]
        for rank in range(party.rank):
            party.send(rank, "dealt", [part[rank] for part in parts])

    while True:
        message = party.receive(0)
        fields = message.fields
        if message.kind == "mask":
            masks[fields["number"]] = draw_ring(fields["shape"], random)
            deal(masks[fields["number"]])
        elif message.kind == "product":
            deal(_PRODUCTS[fields["how"]](masks[fields["x"]], masks[fields["y"]]))
        elif message.kind == "truncate":
            r = draw_ring(fields["shape"], random)
            deal(r, (r & _LOW_63) >> FRACTION_BITS, (r >> 63) & 1)
        elif message.kind == "forget":
            for number in fields["numbers"]:
                del masks[number]
        elif message.kind == "end":
            return party.sent_bytes
        else:
            raise CommunicationError(f"party 0 asked the dealer for '{message.kind}'", next_step=_SAME_STEPS)
