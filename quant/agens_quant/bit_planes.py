"""Codes to indices by logic on whole planes of bits: no table, no unpacking.

    4 half-rows of nibbles ──transpose──► 4 planes, one per bit of a code ──circuit──► planes of the index ──► layout

The index of a code in its set is 2 or 3 Boolean functions of the code's 4 bits, with every code outside the set free
to give anything; one more function tells the codes outside. A plane holds the same bit of 64 codes in every word, so
a gate serves 64 codes at once. Sets are searched once each: a list of all short formulas, and what is computed already.
Names: half-rows a, b are the two of slab 0, c, d of slab 1; L and H the low and high nibble of a byte (format.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from agens_quant.code_sets import codes_of

# Truth tables over the 16 codes, code c at bit c: VARIABLES[i] is bit i of the code.
VARIABLES = (0xAAAA, 0xCCCC, 0xF0F0, 0xFF00)
_NIBBLES, _PAIRS, _BITS = (np.uint64(int(f"0x{byte * 8}", 16)) for byte in ("0F", "33", "55"))

_MOST_GATES = 9  # that a function of four bits takes as a formula

# An expression: None is constant 0, an int is a bit of the code, else ("not", x) or (gate, x, y).
Expression = None | int | tuple
Planes = tuple[np.ndarray | None, np.ndarray | None]
_GATES: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


@dataclass(frozen=True)
class Circuit:
    """Gates over registers; registers 0 .. 3 hold the code's bits at the start and may be overwritten.

    steps      (gate, registers read, register written)
    outputs    registers of the index's bits, then of "outside the set"; None is constant 0
    registers  how many there are
    """

    steps: tuple[tuple[Callable[..., np.ndarray], tuple[int, ...], int], ...]
    outputs: tuple[int | None, ...]
    registers: int


@cache
def circuit_of(mask: int, bits: int) -> Circuit:
    """The circuit that gives each code of a set (16-bit mask, at most 2**bits codes) its rank."""
    codes, outside = codes_of(mask), ~mask & 0xFFFF
    tables = [sum(1 << code for rank, code in enumerate(codes) if rank >> bit & 1) for bit in range(bits)]
    targets = [*((ones, mask & ~ones) for ones in tables), (outside, mask)]
    circuits = []
    for first in range(bits + 1):  # what is found first is there for the rest to use
        known: dict[int, Expression] = {table: bit for bit, table in enumerate(VARIABLES)}
        order = [*range(first, bits + 1), *range(first)]
        found = {output: _express(targets[output][0], targets[output][1], known) for output in order}
        circuits.append(_schedule([found[output] for output in range(bits + 1)]))
    return min(circuits, key=lambda circuit: (len(circuit.steps), circuit.registers))


@cache
def _formulas() -> tuple[np.ndarray, np.ndarray, dict[int, tuple]]:
    """A shortest formula of every function of four bits, listed once a process in a tenth of a second.

    returns  truth tables, fewest gates first; how many have at most 0, 1, .. gates; {table: (gate, tables it reads)}
    """
    levels = [np.array(VARIABLES, np.uint16)]
    made: dict[int, tuple] = {}
    seen = np.zeros(1 << 16, bool)
    seen[levels[0]] = True
    for gates in range(1, _MOST_GATES + 1):
        level = []
        for gate, left, right in [
            ("not", levels[gates - 1], levels[0][:1]),
            *((g, levels[i], levels[gates - 1 - i]) for i in range((gates + 1) // 2) for g in ("and", "or", "xor")),
        ]:
            if seen.all():
                break
            grid = ~left if gate == "not" else _GATES[gate](left[:, None], right)
            fresh = np.flatnonzero(~seen[grid])
            tables, first = np.unique(grid.reshape(-1)[fresh], return_index=True)
            seen[tables] = True
            level.append(tables)
            rows, columns = np.divmod(fresh[first], right.size)
            for table, x, y in zip(tables.tolist(), left[rows].tolist(), right[columns].tolist(), strict=True):
                made[table] = (gate, x) if gate == "not" else (gate, x, y)
        levels.append(np.concatenate(level))
    return np.concatenate(levels), np.cumsum([level.size for level in levels]), made


def _express(ones: int, zeros: int, known: dict[int, Expression]) -> Expression:
    """A function that is 1 on `ones`, 0 on `zeros`, anything elsewhere, in few new gates.

    ones, zeros  disjoint sets of codes as 16-bit truth tables; zeros is not empty
    known        {truth table: expression} of what is there already; gains the parts of the answer
    """
    if not ones:
        return None
    for table, expression in known.items():
        if table & (ones | zeros) == ones:
            return expression
    tables, ends, made = _formulas()

    def formula(table: int) -> Expression:
        if table not in known:
            gate, *reads = made[table]
            known[table] = (gate, *(formula(read) for read in reads))
        return known[table]

    def shortest(ones: int, zeros: int, below: int) -> int:
        """Place of the first formula that will do, `below` if none comes before that."""
        fits = (tables[:below] & np.uint16(ones | zeros)) == ones
        place = int(fits.argmax()) if below else 0
        return place if below and fits[place] else below

    alone = shortest(ones, zeros, tables.size)
    gates = int(np.searchsorted(ends, alone, side="right"))
    # or one gate on something known, whose other operand is a formula for what that leaves to be done
    best, chosen = int(ends[gates - 2]) if gates >= 2 else 0, None
    for table in list(known):
        options = [("xor", (ones ^ table) & (ones | zeros), (zeros ^ table) & (ones | zeros))]
        if not ones & ~table:
            options.append(("and", ones, zeros & table))
        if not zeros & table:
            options.append(("or", ones & ~table, zeros))
        for gate, on, off in options:
            if (place := shortest(on, off, best)) < best:
                best, chosen = place, (gate, table)
    if chosen is not None:
        node = (chosen[0], known[chosen[1]], formula(int(tables[best])))
        made_table = int(_GATES[chosen[0]](np.uint16(chosen[1]), tables[best]))
        return known.setdefault(made_table, node)
    return formula(int(tables[alone]))


def _schedule(outputs: Sequence[Expression]) -> Circuit:
    """Put the gates in order, equal ones once, and reuse a register after its value's last reader."""
    order: list[Expression] = []

    def visit(node: Expression) -> None:
        if isinstance(node, tuple) and node not in order:
            for child in node[1:]:
                visit(child)
            order.append(node)

    for output in outputs:
        visit(output)
    last = {child: i for i, node in enumerate(order) for child in node[1:]}  # type: ignore[index]
    last.update({node: len(order) for node in outputs if node is not None})
    register: dict[Expression, int] = {bit: bit for bit in range(4)}
    idle = [bit for bit in range(4) if bit not in last]
    count = 4
    steps = []
    for i, node in enumerate(order):
        assert isinstance(node, tuple)
        read = tuple(register[child] for child in node[1:])
        idle += {register[child] for child in node[1:] if last[child] == i}
        if not idle:
            idle.append(count)
            count += 1
        register[node] = idle.pop()
        steps.append((_GATES[node[0]], read, register[node]))
    return Circuit(tuple(steps), tuple(None if o is None else register[o] for o in outputs), count)


def _swap(a: np.ndarray, b: np.ndarray, t: np.ndarray, width: int, mask: np.uint64, out: Planes = (None, None)) -> None:
    """a = low fields of a, b; b = their high fields. Fields of `width` bits; mask covers the low ones."""
    shift = np.uint64(width)
    np.right_shift(a, shift, out=t)
    np.bitwise_xor(t, b, out=t)
    np.bitwise_and(t, mask, out=t)
    np.bitwise_xor(b, t, out=b if out[1] is None else out[1])
    np.left_shift(t, shift, out=t)
    np.bitwise_xor(a, t, out=a if out[0] is None else out[0])


def scratch_registers(circuit: Circuit) -> int:
    """How many registers `compact` wants: the circuit's and one for its own use."""
    return circuit.registers + 1


def compact(registers: np.ndarray, circuit: Circuit, out: np.ndarray) -> bool:
    """Nibbles of four half-rows to the planes of the layout; False when a code lies outside the set.

    registers  uint64 [at least scratch_registers, tiles, 512]: 0 .. 3 hold half-rows a, b, c, d; all are overwritten
    out        uint64 [tiles, 2 or 3, 512], planes of format.py at 2 or 3 bits
    """
    a, b, c, d = registers[:4]
    t = registers[circuit.registers]
    *index, outside = circuit.outputs
    # The third plane keeps the order of bits made here. For two planes L and H are parted at the end, where it is half
    # the work: until then a bit plane holds aL bL cL dL aH bH cH dH.
    if len(index) == 3:
        for left, right in ((a, b), (c, d)):  # a = aL bL, b = aH bH; c and d alike
            _swap(left, right, t, 4, _NIBBLES)
    for left, right in ((a, c), (b, d)):  # a = aL cL bL dL of bits 0 and 1, c of bits 2 and 3; b and d the H nibbles
        _swap(left, right, t, 2, _PAIRS)
    for left, right in ((a, b), (c, d)):  # a = bit 0 of aL aH cL cH bL bH dL dH, b bit 1, c bit 2, d bit 3
        _swap(left, right, t, 1, _BITS)
    for gate, read, written in circuit.steps:
        gate(*(registers[r] for r in read), out=registers[written])
    if outside is not None and np.bitwise_or.reduce(registers[outside], axis=None):
        return False
    if len(index) == 3:
        out[:, 2] = 0 if index[2] is None else registers[index[2]]
    first, second = (None if r is None else registers[r] for r in index[:2])
    if first is None or second is None or index[0] == index[1]:  # a set of one or two codes
        first, second = (np.zeros_like(t) if plane is None else plane.copy() for plane in (first, second))
    _swap(first, second, t, 1, _BITS)
    if len(index) == 3:
        _swap(first, second, t, 2, _PAIRS, out=(out[:, 0], out[:, 1]))
        return True
    _swap(first, second, t, 4, _NIBBLES)
    _swap(first, second, t, 2, _PAIRS, out=(out[:, 0], out[:, 1]))
    return True
