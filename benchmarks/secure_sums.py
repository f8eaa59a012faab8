"""What secure sums cost: CPU time of a client, bytes, cohorts with lost clients, and the error of a mean.

One thread, CPU time of one process. The time of a client is that of its four messages, without training.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.report import Options, Report, Table, present
from paceline.federated.ring_sum import Ring, RingLayout, RingWords
from paceline.federated.secure_masks import (
    KEYS_BYTES,
    SEALED_BYTES,
    MaskClient,
    MaskServer,
    MaskTerms,
    RoundTerms,
    add_mask,
)
from paceline.federated.shamir import SHARE_BYTES
from paceline.privacy.entropy import Entropy
from paceline.state.slot import TensorSlot

_NUMBERS = 5  # weight, samples, steps, sum of losses, count


class Round:
    """One round among clients in this process.

    Args:
        size: of the cohort.
        neighbours: of each client; 0: all.
        num_values: of an update.
        ring: of the sum.
    """

    def __init__(self, size: int, neighbours: int, num_values: int, ring: Ring | None = None) -> None:
        like = torch.zeros(num_values, dtype=torch.float64)
        self.slot = TensorSlot.whole("update", like)
        self.layout = RingLayout(ring or Ring(), {self.slot: like}, _NUMBERS)
        names = {position: f"client-{position}" for position in range(size)}
        identities = {name: Ed25519PrivateKey.generate() for name in names.values()}
        known = {name: key.public_key() for name, key in identities.items()}
        terms = RoundTerms(MaskTerms(bytes(16), 0.51, neighbours), 0, bytes(32), names)
        self._parts = terms, identities, known
        self.sent = dict.fromkeys(range(size), 0)
        self.server = MaskServer(terms)
        self.clients = {position: self.build_client(position) for position in names}

    def build_client(self, position: int) -> MaskClient:
        """A client with fresh secrets."""
        terms, identities, known = self._parts
        return MaskClient(terms, position, identities[terms.names[position]], known, Entropy())

    def run(self, updates: dict[int, torch.Tensor]) -> tuple[RingWords, RingWords, float, int]:
        """Return the unmasked sum, the same without masks, the CPU time of the unmasking and its masks.

        Args:
            updates: of the clients that are not lost after their shares.
        """
        forwarded = self.server.forward_keys({p: c.advertise().to_bytes() for p, c in self.clients.items()})
        sealed = self.server.forward_shares({p: c.share(forwarded) for p, c in self.clients.items()})
        total, plain = self.layout.zeros(), self.layout.zeros()
        for p, update in updates.items():
            words = self.layout.encode({self.slot: update}, [1.0] * _NUMBERS, client=str(p), weight=1.0)
            plain.add(words)
            self.clients[p].mask(sealed[p], words)
            total.add(words)
        survivors, lost = self.server.requests([*updates])
        answers = {p: self.clients[p].reveal(survivors, lost) for p in survivors}
        began, num_masks = time.process_time(), 0
        for mask in self.server.masks_left(survivors, lost, answers):
            add_mask(total, mask.key, mask.sign)
            num_masks += 1
        return total, plain, time.process_time() - began, num_masks


def client_rows(options: Options, data: dict[str, Any]) -> list[list[str]]:
    """CPU seconds and bytes of a client; only one of the cohort masks its values."""
    rows, num_values = [], 10_000 if options.quick else 1_000_000
    update = torch.randn(num_values, dtype=torch.float64).clamp(-4, 4)
    cases = [(11, 0, Ring())] if options.quick else []
    cases += [] if options.quick else [(100, 10, Ring()), (100, 0, Ring()), (100, 0, Ring(32, 12))]
    for size, neighbours, ring in cases:
        round_, degree = Round(size, neighbours, num_values, ring=ring), neighbours or size - 1
        seconds = times_of_one_client(round_, update, repeats=1 if options.quick else 5)
        words = ring.bits // 8 * num_values + 8 * _NUMBERS
        extra = KEYS_BYTES + degree * SEALED_BYTES + (degree + 1) * SHARE_BYTES
        assert round_.sent[0] == words + extra, (round_.sent[0], words + extra)
        name = f"{size} clients, {degree} neighbours, ring {ring.bits}"
        data[name] = seconds
        goal = "0.1" if degree == 10 else "1"
        found = [f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}", goal]
        rows.append([name, *found, f"{words:,}", f"{extra:,}", f"{round_.sent[0]:,}"])
    return rows


def times_of_one_client(round_: Round, update: torch.Tensor, repeats: int) -> list[float]:
    """Return the CPU seconds of the four messages of client 0, and count its bytes."""
    clients = round_.clients
    forwarded = round_.server.forward_keys({p: c.advertise().to_bytes() for p, c in clients.items()})
    sealed = round_.server.forward_shares({p: client.share(forwarded) for p, client in clients.items()})
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        round_.build_client(0)
        keys = clients[0].advertise().to_bytes()
        shares = clients[0].share(forwarded)
        numbers = [1.0] * _NUMBERS
        words = round_.layout.encode({round_.slot: update}, numbers, client="0", weight=1.0)
        clients[0].mask(sealed[0], words)
        answer = clients[0].reveal([*clients], [])
        seconds.append(time.process_time() - began)
    round_.sent[0] = len(keys) + sum(map(len, shares.values())) + len(words.to_bytes())
    round_.sent[0] += SHARE_BYTES * len(answer)
    return seconds


def lost_rows(options: Options, data: dict[str, Any]) -> list[list[str]]:
    """A hundred clients of which some are lost, and the server's part."""
    rows, num_values = [], 100 if options.quick else 10_000
    for neighbours in (60,) if options.quick else (60, 0):
        for lost in (10,) if options.quick else (0, 10, 30):
            round_ = Round(100, neighbours, num_values)
            updates = {
                p: torch.randn(num_values, dtype=torch.float64).clamp(-4, 4) for p in range(100 - lost)
            }
            total, plain, seconds, num_masks = round_.run(updates)
            bound = lost * (neighbours or 99) + 100
            same = total.to_bytes() == plain.to_bytes()
            assert same and num_masks <= bound
            found = ["yes" if same else "no", str(num_masks), str(bound), f"{seconds:.2f}"]
            rows.append([str(neighbours or 99), f"{lost} %", *found])
            data[f"{neighbours or 99} neighbours, {lost} lost"] = seconds
    return rows


def error_of_mean() -> float:
    """The largest error of the weighted mean of ten clients, of a thousand values each."""
    layout = Round(10, 0, 1000).layout
    (slot,), total, exact, weights = (
        layout.tensors,
        layout.zeros(),
        torch.zeros(1000, dtype=torch.float64),
        0.0,
    )
    for client in range(10):
        generator = torch.Generator().manual_seed(client)
        update = torch.randn(1000, dtype=torch.float64, generator=generator).clamp(-8, 8)
        weight = float(10 + 37 * client)
        words = layout.encode({slot: weight * update}, [weight] * _NUMBERS, client=str(client), weight=weight)
        total.add(words)
        exact += weight * update
        weights += weight
    sums, numbers = layout.decode(total)
    return float((sums[slot] / numbers[0] - exact / weights).abs().max())


def measure(options: Options) -> Report:
    """All tables."""
    torch.set_num_threads(1)
    data: dict[str, Any] = {}
    clients = Table(
        f"CPU seconds and bytes of a client, {10_000 if options.quick else 1_000_000:,} values",
        ("cohort", "seconds, median", "least", "goal", "bytes: values", "protocol", "counted"),
        client_rows(options, data),
        ["counted bytes are those of the closed form: 8 n or 4 n, and a term of the number of neighbours"],
    )
    lost = Table(
        f"100 clients, {100 if options.quick else 10_000:,} values, threshold 0.51",
        ("neighbours", "lost", "equal to the bit", "masks removed", "at most", "CPU seconds of the server"),
        lost_rows(options, data),
        ["lost x neighbours + all masks is the most that the server computes"],
    )
    data["error"] = error_of_mean()
    mean = Table(
        "Error of the weighted mean of ten clients, largest of 1,000 values",
        ("ring 64, 32 fraction bits", "goal"),
        [[f"{data['error']:.2g}", "1e-9"]],
        [],
    )
    return Report("What secure sums cost.", [clients, lost, mean], data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
