"""Paillier encryption: whoever has the public key adds numbers that only the private key can read.

Enc(a) Enc(b) decrypts to a + b, and Enc(a)^k to k a, modulo n; signed integers are those of magnitude below
n / 2. Many small numbers are packed into slots of one plaintext. The primes come from the RSA key
generation of `cryptography`; powers are gmpy2's if it is installed, else Python's. Neither is constant-
time: whoever can measure the time of a decryption may learn of the key. Adding is all: no product of two
ciphertexts.

Source: Paillier 1999, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, with g = n +
1.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import rsa

from paceline.errors import DataError

try:
    from gmpy2 import powmod
except ImportError:
    powmod = pow

modular_power = powmod
"""`pow` with a modulus; of gmpy2 if it is installed, which is faster."""

MIN_KEY_BITS = 2048
_EXPONENT_OF_RSA = 65537  # its generation wants one; it is not used


@dataclass(frozen=True)
class PaillierPublicKey:
    """The key that encrypts and adds.

    Args:
        n: the product of two primes.
    """

    n: int

    @property
    def num_bytes(self) -> int:
        """Size of a ciphertext."""
        return 2 * ((self.n.bit_length() + 7) // 8)

    def encrypt(self, message: int) -> int:
        """Encrypt a signed integer, with randomness of the operating system.

        Raises:
            DataError: its magnitude is n / 2 or more.
        """
        if 2 * abs(message) >= self.n:
            raise DataError("the message is larger than the key", next_step="use fewer slots or more bits")
        square = self.n * self.n
        blinding = modular_power(1 + secrets.randbelow(self.n - 1), self.n, square)
        return int((1 + message % self.n * self.n) * blinding % square)

    def add(self, first: int, second: int) -> int:
        """Return the encryption of the sum."""
        return first * second % (self.n * self.n)

    def multiply(self, ciphertext: int, factor: int) -> int:
        """Return the encryption of a signed integer times the message."""
        return int(modular_power(ciphertext, factor % self.n, self.n * self.n))

    def num_slots(self, slot_bits: int) -> int:
        """Return how many slots a plaintext has; the bits of one stay free for the sign."""
        return (self.n.bit_length() - 2) // slot_bits


@dataclass(frozen=True)
class PaillierPrivateKey:
    """The key that decrypts.

    Args:
        p, q: the primes.
    """

    p: int
    q: int

    @property
    def public(self) -> PaillierPublicKey:
        """The key to give away."""
        return PaillierPublicKey(self.p * self.q)

    def decrypt(self, ciphertext: int) -> int:
        """Return the signed message."""
        p, q = self.p, self.q
        n = p * q
        # Modulo p^2 and q^2 it takes a quarter of the time (Paillier 1999, section 7).
        modulo_p, modulo_q = (
            (int(modular_power(ciphertext, r - 1, r * r)) - 1) // r * pow((n * (r - 1) // r) % r, -1, r) % r
            for r in (p, q)
        )
        message = modulo_q + q * ((modulo_p - modulo_q) * pow(q, -1, p) % p)
        return message - n if 2 * message > n else message


def generate_keys(bits: int = MIN_KEY_BITS) -> PaillierPrivateKey:
    """Generate a private key, which has its public one.

    Args:
        bits: of n; 2048 corresponds to 112 bits of security, 3072 to 128.
    Raises:
        DataError: fewer than 2048 bits.
    """
    if bits < MIN_KEY_BITS:
        raise DataError(
            f"a Paillier key of {bits} bits can be broken", next_step=f"use {MIN_KEY_BITS} bits or more"
        )
    return _generate_keys(bits)


def _generate_keys(bits: int) -> PaillierPrivateKey:
    numbers = rsa.generate_private_key(_EXPONENT_OF_RSA, bits).private_numbers()
    return PaillierPrivateKey(numbers.p, numbers.q)


def pack_slots(values: Sequence[int], slot_bits: int, num_slots: int) -> list[int]:
    """Pack signed integers into plaintexts, `num_slots` in each.

    Sums of plaintexts are the plaintexts of the sums, as long as every sum stays below 2^(slot_bits - 1).

    Raises:
        DataError: a value does not fit its slot.
    """
    limit = 1 << (slot_bits - 1)
    if any(not -limit < value < limit for value in values):
        raise DataError(f"a value does not fit a slot of {slot_bits} bits", next_step="use wider slots")
    groups = [values[start : start + num_slots] for start in range(0, len(values), num_slots)]
    return [sum(value << (slot_bits * place) for place, value in enumerate(group)) for group in groups]


def unpack_slots(plaintexts: Sequence[int], slot_bits: int, num_slots: int, count: int) -> list[int]:
    """Return the `count` signed integers that were packed, or their sums."""
    values: list[int] = []
    for plaintext in plaintexts:
        for _ in range(min(num_slots, count - len(values))):
            value = plaintext & ((1 << slot_bits) - 1)
            value -= (value >> (slot_bits - 1)) << slot_bits
            values.append(value)
            plaintext = (plaintext - value) >> slot_bits
    return values
