"""Oblivious transfer: the receiver gets one of two messages, and the sender does not learn which.

For parties that are honest but curious. Each transfer takes a few powers in a group of 2048 bits, so this
is for hundreds of transfers; there is no extension to millions. Python's powers are not constant-time.

Source: Naor and Pinkas 2001, Efficient Oblivious Transfer Protocols, protocol 3.1, in the group 14 of RFC
3526.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from paceline.errors import CommunicationError
from paceline.federated.crypto.paillier import modular_power
from paceline.federated.crypto.parties import Party

# 2^2048 - 2^1984 - 1 + 2^64 (floor(2^1918 pi) + 124476), a safe prime; 2 generates the squares.
PRIME_2048 = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_GENERATOR = 2
_ELEMENT_BYTES = 256
MESSAGE_BYTES = 16


def send_obliviously(party: Party, to: int, pairs: Sequence[tuple[bytes, bytes]]) -> None:
    """Send one message of each pair, without learning which.

    Args:
        pairs: messages of 16 bytes.
    """
    # The receiver knows the logarithm of one of two keys whose product is `product`, not of both.
    product = _power(_GENERATOR, _draw_exponent())
    exponent = _draw_exponent()
    power = _power(_GENERATOR, exponent)
    party.send_integers(to, "transfer-begin", [product, power], _ELEMENT_BYTES)
    keys = party.receive_integers(to, "transfer-keys")
    if len(keys) != len(pairs) or any(not 1 < key < PRIME_2048 - 1 for key in keys):
        raise CommunicationError(
            f"party {to} asked for {len(keys)} of {len(pairs)} transfers, or with keys outside the group",
            next_step="let both parties run the same circuit",
        )
    product_power = _power(product, exponent)
    encrypted = []
    for number, (key, messages) in enumerate(zip(keys, pairs, strict=True)):
        shared = _power(key, exponent)
        other = product_power * pow(shared, -1, PRIME_2048) % PRIME_2048
        pads = (_pad(shared, number, 0), _pad(other, number, 1))
        encrypted += [int.from_bytes(m, "little") ^ pad for m, pad in zip(messages, pads, strict=True)]
    party.send_integers(to, "transfer-messages", encrypted, MESSAGE_BYTES)


def receive_obliviously(party: Party, sender: int, choices: Sequence[int]) -> list[bytes]:
    """Receive the message of each pair that the choice, 0 or 1, names."""
    begin = party.receive_integers(sender, "transfer-begin")
    if len(begin) != 2 or any(not 1 < one < PRIME_2048 - 1 for one in begin):
        raise CommunicationError(f"party {sender} began a transfer with no elements of the group")
    product, power = begin
    exponents = [_draw_exponent() for _ in choices]
    keys = []
    for choice, exponent in zip(choices, exponents, strict=True):
        known = _power(_GENERATOR, exponent)
        keys.append(product * pow(known, -1, PRIME_2048) % PRIME_2048 if choice else known)
    party.send_integers(sender, "transfer-keys", keys, _ELEMENT_BYTES)
    encrypted = party.receive_integers(sender, "transfer-messages")
    if len(encrypted) != 2 * len(choices):
        raise CommunicationError(f"party {sender} sent messages of another number of transfers")
    received = []
    for number, (choice, exponent) in enumerate(zip(choices, exponents, strict=True)):
        pad = _pad(_power(power, exponent), number, choice)
        received.append((encrypted[2 * number + choice] ^ pad).to_bytes(MESSAGE_BYTES, "little"))
    return received


def _power(base: int, exponent: int) -> int:
    return int(modular_power(base, exponent, PRIME_2048))


def _draw_exponent() -> int:
    # Uniform modulo the order of the group: short exponents would only be faster.
    return 1 + secrets.randbelow((PRIME_2048 - 1) // 2 - 1)


def _pad(element: int, number: int, which: int) -> int:
    body = element.to_bytes(_ELEMENT_BYTES, "little") + number.to_bytes(4, "little") + bytes([which])
    return int.from_bytes(hashlib.sha256(body).digest()[:MESSAGE_BYTES], "little")
