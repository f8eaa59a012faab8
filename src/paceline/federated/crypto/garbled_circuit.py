"""Garbled circuits: two parties compute a boolean function of their inputs, and learn its result alone.

The garbler gives each wire two labels of 128 bits, one for each value, and sends tables from which the
evaluator gets exactly one label of every wire. XOR and NOT take no table (free-XOR, Kolesnikov and
Schneider 2008), AND takes two rows (half gates, Zahur, Rosulek and Evans 2015), and the last bit of a label
names the row (point and permute). Labels of the evaluator's inputs arrive by oblivious transfer, so the
garbler does not learn those inputs.

For parties that are honest but curious: a garbler that sends tables of another circuit is not noticed. The
hash is SHA-256 of label and gate, and nothing here is constant-time.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import CommunicationError, DataError
from paceline.federated.crypto.oblivious_transfer import (
    MESSAGE_BYTES,
    receive_obliviously,
    send_obliviously,
)
from paceline.federated.crypto.parties import Party

LABEL_BITS = 8 * MESSAGE_BYTES


@dataclass(frozen=True)
class Gate:
    """A gate of a circuit.

    Args:
        kind: "and", "xor" or "not".
        first, second: its input wires; of "not" both are the same.
        output: its output wire.
    """

    kind: str
    first: int
    second: int
    output: int


@dataclass
class Circuit:
    """A boolean circuit of two parties, built gate by gate.

    Wires are numbers: first the inputs of the garbler, then those of the evaluator, then outputs of gates.

    Args:
        num_garbler, num_evaluator: bits of each party's input.
    Attributes:
        gates: in the order of evaluation.
        outputs: wires whose values both parties learn.
    """

    num_garbler: int
    num_evaluator: int
    gates: list[Gate] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        """Number of input wires."""
        return self.num_garbler + self.num_evaluator

    @property
    def num_ands(self) -> int:
        """Number of AND gates, the only ones that cost: 32 bytes each."""
        return sum(gate.kind == "and" for gate in self.gates)

    def add_gate(self, kind: str, first: int, second: int | None = None) -> int:
        """Add a gate and return its output wire."""
        output = self.num_inputs + len(self.gates)
        self.gates.append(Gate(kind, first, first if second is None else second, output))
        return output


def bitwise_circuit(kind: str, bits: int) -> Circuit:
    """Return the circuit of "and" or "xor" of two numbers, bit by bit."""
    circuit = Circuit(bits, bits)
    circuit.outputs = [circuit.add_gate(kind, i, bits + i) for i in range(bits)]
    return circuit


def adder_circuit(bits: int) -> Circuit:
    """Return the circuit of x + y, of `bits` + 1 bits; one AND for each bit."""
    circuit = Circuit(bits, bits)
    carry = circuit.add_gate("xor", 0, 0)
    for x, y in zip(range(bits), range(bits, 2 * bits), strict=True):
        with_x, with_y = circuit.add_gate("xor", x, carry), circuit.add_gate("xor", y, carry)
        circuit.outputs.append(circuit.add_gate("xor", with_x, y))
        carry = circuit.add_gate("xor", carry, circuit.add_gate("and", with_x, with_y))
    circuit.outputs.append(carry)
    return circuit


def comparator_circuit(bits: int) -> Circuit:
    """Return the circuit of x < y for unsigned numbers; one AND for each bit."""
    circuit = Circuit(bits, bits)
    borrow = circuit.add_gate("xor", 0, 0)
    for x, y in zip(range(bits), range(bits, 2 * bits), strict=True):
        # The borrow of x - y is the carry of (not x) + y.
        with_x = circuit.add_gate("xor", circuit.add_gate("not", x), borrow)
        with_y = circuit.add_gate("xor", y, borrow)
        borrow = circuit.add_gate("xor", borrow, circuit.add_gate("and", with_x, with_y))
    circuit.outputs = [borrow]
    return circuit


@dataclass(frozen=True)
class GarbledCircuit:
    """What garbling makes; the garbler keeps `labels` and `difference`.

    Args:
        labels: of value 0, by wire.
        difference: between the labels of 1 and 0 on every wire; its last bit is 1.
        tables: two rows for each AND.
        output_bits: the last bit of the label of 0, of each output: it turns labels into values.
    """

    labels: Sequence[int]
    difference: int
    tables: Sequence[int]
    output_bits: Sequence[int]

    def input_label(self, wire: int, value: int) -> int:
        """Return the label of a value on a wire."""
        return self.labels[wire] ^ (self.difference if value else 0)


def garble(circuit: Circuit, random_bits: Callable[[int], int] = secrets.randbits) -> GarbledCircuit:
    """Draw labels, and encrypt the rows of every AND; a garbled circuit must be evaluated only once."""
    difference = random_bits(LABEL_BITS) | 1
    labels = [random_bits(LABEL_BITS) for _ in range(circuit.num_inputs)]
    tables: list[int] = []
    for number, gate in enumerate(circuit.gates):
        a, b = labels[gate.first], labels[gate.second]
        if gate.kind == "xor":
            labels.append(a ^ b)
        elif gate.kind == "not":
            labels.append(a ^ difference)
        else:
            hashes = [_hash(a, 2 * number), _hash(a ^ difference, 2 * number)]
            hashes += [_hash(b, 2 * number + 1), _hash(b ^ difference, 2 * number + 1)]
            garbler_row = hashes[0] ^ hashes[1] ^ (difference if b & 1 else 0)
            evaluator_row = hashes[2] ^ hashes[3] ^ a
            garbler_half = hashes[0] ^ (garbler_row if a & 1 else 0)
            evaluator_half = hashes[2] ^ (evaluator_row ^ a if b & 1 else 0)
            tables += [garbler_row, evaluator_row]
            labels.append(garbler_half ^ evaluator_half)
    return GarbledCircuit(labels, difference, tables, [labels[wire] & 1 for wire in circuit.outputs])


def evaluate(circuit: Circuit, inputs: Sequence[int], tables: Sequence[int]) -> list[int]:
    """Return the label of each output.

    Args:
        inputs: one label for each input wire.
        tables: of `GarbledCircuit`.
    Raises:
        CommunicationError: these are not labels and tables of this circuit.
    """
    if len(inputs) != circuit.num_inputs or len(tables) != 2 * circuit.num_ands:
        raise CommunicationError("the labels and tables are of another circuit", next_step=_SAME_CIRCUIT)
    labels, rows = list(inputs), iter(tables)
    for number, gate in enumerate(circuit.gates):
        a, b = labels[gate.first], labels[gate.second]
        if gate.kind == "xor":
            labels.append(a ^ b)
        elif gate.kind == "not":
            labels.append(a)
        else:
            garbler_row, evaluator_row = next(rows), next(rows)
            garbler_half = _hash(a, 2 * number) ^ (garbler_row if a & 1 else 0)
            evaluator_half = _hash(b, 2 * number + 1) ^ (evaluator_row ^ a if b & 1 else 0)
            labels.append(garbler_half ^ evaluator_half)
    return [labels[wire] for wire in circuit.outputs]


def run_garbler(party: Party, evaluator: int, circuit: Circuit, value: int) -> int:
    """Compute a circuit with another party, as the garbler.

    Args:
        value: this party's input, unsigned.
    Returns:
        The outputs as a number, the first output as its lowest bit.
    """
    garbled = garble(circuit)
    own = [garbled.input_label(i, bit) for i, bit in enumerate(to_bits(value, circuit.num_garbler))]
    party.send_integers(evaluator, "garbled-tables", garbled.tables, MESSAGE_BYTES)
    party.send_integers(evaluator, "garbler-labels", own, MESSAGE_BYTES)
    party.send_integers(evaluator, "output-bits", garbled.output_bits, 1)
    wires = range(circuit.num_garbler, circuit.num_inputs)
    pairs = [(garbled.input_label(wire, 0), garbled.input_label(wire, 1)) for wire in wires]
    send_obliviously(party, evaluator, [(_to_bytes(zero), _to_bytes(one)) for zero, one in pairs])
    return from_bits(party.receive_integers(evaluator, "outputs"))


def run_evaluator(party: Party, garbler: int, circuit: Circuit, value: int) -> int:
    """Compute a circuit with another party, as the evaluator; see `run_garbler`."""
    tables = party.receive_integers(garbler, "garbled-tables")
    labels = party.receive_integers(garbler, "garbler-labels")
    output_bits = party.receive_integers(garbler, "output-bits")
    received = receive_obliviously(party, garbler, to_bits(value, circuit.num_evaluator))
    labels += [int.from_bytes(label, "little") for label in received]
    outputs = evaluate(circuit, labels, tables)
    if len(output_bits) != len(outputs):
        raise CommunicationError("the outputs are of another circuit", next_step=_SAME_CIRCUIT)
    values = [label & 1 ^ bit for label, bit in zip(outputs, output_bits, strict=True)]
    party.send_integers(garbler, "outputs", values, 1)
    return from_bits(values)


def to_bits(value: int, count: int) -> list[int]:
    """Return the bits of an unsigned number, the lowest first.

    Raises:
        DataError: it has more.
    """
    if not 0 <= value < 1 << count:
        raise DataError(f"{value} is no number of {count} bits", next_step="use a wider circuit")
    return [value >> i & 1 for i in range(count)]


def from_bits(bits: Sequence[int]) -> int:
    """Return the number with these bits, the lowest first."""
    return sum(bit << i for i, bit in enumerate(bits))


def _hash(label: int, tweak: int) -> int:
    digest = hashlib.sha256(_to_bytes(label) + tweak.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:MESSAGE_BYTES], "little")


def _to_bytes(label: int) -> bytes:
    return label.to_bytes(MESSAGE_BYTES, "little")


_SAME_CIRCUIT = "let both parties run the same circuit"
