"""Codes to indices by logic on whole planes of bits: no table, no unpacking.

    4 half-rows of nibbles ──transpose──► 4 planes, one per bit of a code ──circuit──► planes of the index ──► layout

The index of a code in its set is 2 or 3 Boolean functions of the code's 4 bits, with every code outside the set free
to give anything; one more function tells the codes outside. A plane holds the same bit of 64 codes in every word, so
a gate serves 64 codes at once. Sets are searched once each, by decomposing on one bit at a time.
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

# An expression: None is constant 0, an int is a bit of the code, else ("not", x) or (gate, x, y).
Expression = None | int | tuple
Planes = tuple[np.ndarray | None, np.ndarray | None]
_GATES: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


@cache
def cheapest(ones: int, zeros: int, free: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, Expression]:
    """(gates, expression) of a function that is 1 on `ones`, 0 on `zeros`, anything elsewhere; few gates, not fewest.

    ones, zeros  disjoint sets of codes as 16-bit truth tables; zeros is not empty
    free         the bits it may still depend on
    """
    if not ones:
        return 0, None
    for bit in free:
        table = VARIABLES[bit]
        if not ones & ~table and not zeros & table:
            return 0, bit
        if not ones & table and not zeros & ~table:
            return 1, ("not", bit)
    return min((option for bit in free for option in _decompositions(ones, zeros, bit, free)), key=lambda o: o[0])


def _decompositions(ones: int, zeros: int, bit: int, free: tuple[int, ...]) -> list[tuple[int, Expression]]:
    """Ways to write the function as (function where the bit is 0, function where it is 1)."""
    rest = tuple(b for b in free if b != bit)
    table, step = VARIABLES[bit], 1 << bit
    ones_0, zeros_0 = (t & ~table | (t & ~table) << step for t in (ones, zeros))
    ones_1, zeros_1 = (t & table | (t & table) >> step for t in (ones, zeros))
    found: list[tuple[int, Expression]] = []

    def add(cost: int, gate: str, left: Expression, ones: int, zeros: int) -> None:
        if ones and zeros:
            gates, inner = cheapest(ones, zeros, rest)
            found.append((gates + cost, (gate, left, inner)))

    if not (ones_0 & zeros_1 or ones_1 & zeros_0):
        return [cheapest(ones_0 | ones_1, zeros_0 | zeros_1, rest)]
    if not (ones_0 & ones_1 or zeros_0 & zeros_1):
        add(1, "xor", bit, ones_0 | zeros_1, zeros_0 | ones_1)
    if not ones_0:
        add(1, "and", bit, ones_1, zeros_1)
    if not zeros_1:
        add(1, "or", bit, ones_0, zeros_0)
    if not ones_1:
        add(2, "and", ("not", bit), ones_0, zeros_0)
    if not zeros_0:
        add(2, "or", ("not", bit), ones_1, zeros_1)
    if ones_0 and zeros_0 and ones_1 and zeros_1:
        (gates_0, when_0), (gates_1, when_1) = (
            cheapest(ones_0, zeros_0, rest),
            cheapest(ones_1, zeros_1, rest),
        )
        found.append((gates_0 + gates_1 + 3, ("xor", when_0, ("and", bit, ("xor", when_0, when_1)))))
    return found


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
    codes = codes_of(mask)
    tables = [sum(1 << code for rank, code in enumerate(codes) if rank >> bit & 1) for bit in range(bits)]
    wanted = [cheapest(ones, mask & ~ones)[1] for ones in tables]
    outside = ~mask & 0xFFFF
    return _schedule([*wanted, cheapest(outside, mask)[1] if outside else None])


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
    for left, right in ((a, b), (c, d)):  # a = aL bL, b = aH bH; c and d alike
        _swap(left, right, t, 4, _NIBBLES)
    for left, right in ((a, c), (b, d)):  # a = aL cL bL dL of bits 0 and 1, c of bits 2 and 3; b and d the H nibbles
        _swap(left, right, t, 2, _PAIRS)
    for left, right in ((a, b), (c, d)):  # a = aL aH cL cH bL bH dL dH of bit 0, b of bit 1, c of bit 2, d of bit 3
        _swap(left, right, t, 1, _BITS)
    for gate, read, written in circuit.steps:
        gate(*(registers[r] for r in read), out=registers[written])
    *index, outside = circuit.outputs
    if outside is not None and np.bitwise_or.reduce(registers[outside], axis=None):
        return False
    if len(index) == 3:  # that order of bits is the third plane's own
        out[:, 2] = 0 if index[2] is None else registers[index[2]]
    first, second = (None if r is None else registers[r] for r in index[:2])
    if first is None or second is None or index[0] == index[1]:  # a set of one or two codes
        first, second = (np.zeros_like(t) if plane is None else plane.copy() for plane in (first, second))
    _swap(first, second, t, 1, _BITS)
    _swap(first, second, t, 2, _PAIRS, out=(out[:, 0], out[:, 1]))
    return True
