"""Index circuits, judged on their truth tables; and a code outside the set is always noticed."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from agens_quant import bit_planes, pack

FOUR = list(combinations(range(16), 4))
EIGHT = list(combinations(range(16), 8))[::17]
FEW = [codes for size in (1, 2, 3) for codes in combinations(range(16), size)]
MIDDLE = list(combinations(range(16), 5))[::17] + list(combinations(range(16), 7))[::31]


def outputs_of(codes: tuple[int, ...], bits: int) -> list[int]:
    """Truth tables of the circuit's outputs: its registers hold 16-bit words, one bit a code."""
    circuit = bit_planes.circuit_of(sum(1 << code for code in codes), bits)
    registers = np.zeros((circuit.registers, 1), np.uint16)
    registers[:4, 0] = bit_planes.VARIABLES
    for gate, read, written in circuit.steps:
        gate(*(registers[r].copy() for r in read), out=registers[written])
    return [0 if output is None else int(registers[output, 0]) for output in circuit.outputs]


@pytest.mark.parametrize(("bits", "sets"), [(2, FOUR), (2, FEW), (3, EIGHT), (3, MIDDLE)])
def test_every_code_gets_its_rank_and_the_rest_is_outside(bits: int, sets: list[tuple[int, ...]]) -> None:
    for codes in sets:
        *index, outside = outputs_of(codes, bits)
        assert outside == 0xFFFF & ~sum(1 << code for code in codes)
        ranks = [sum((table >> code & 1) << bit for bit, table in enumerate(index)) for code in codes]
        assert ranks == list(range(len(codes)))


def half_rows(codes: np.ndarray) -> np.ndarray:
    """[128, 256] codes of one tile -> [4, 1, 512] uint64 half-rows of a container's bytes."""
    joined = codes[:, 0::2] | codes[:, 1::2] << 4  # [128, 128]: 32 bytes a half-row
    return np.ascontiguousarray(joined.reshape(128, 4, 32).transpose(1, 0, 2)).view(np.uint64).reshape(4, 1, 512)


@pytest.mark.parametrize(
    ("bits", "codes"), [(2, (3, 7, 8, 12)), (2, (5,)), (2, (0, 15)), (3, (0, 1, 4, 7, 10, 11, 13))]
)
def test_a_tile_becomes_the_planes_of_the_plain_packing(bits: int, codes: tuple[int, ...]) -> None:
    ranks = np.random.default_rng(bits).integers(0, len(codes), (128, 256), dtype=np.uint8)
    values = np.array(codes, np.uint8)[ranks]
    circuit = bit_planes.circuit_of(sum(1 << code for code in codes), bits)
    out = np.full((1, bits, 512), 0x5A5A, np.uint64)
    registers = np.zeros((bit_planes.scratch_registers(circuit), 1, 512), np.uint64)
    registers[:4] = half_rows(values)
    assert bit_planes.compact(registers, circuit, out)
    assert np.array_equal(out.view(np.uint8).reshape(-1), pack.pack_codes(ranks, bits).reshape(-1))

    values[77, 131] = next(code for code in range(16) if code not in codes)
    registers[:4] = half_rows(values)
    assert not bit_planes.compact(registers, circuit, out)
