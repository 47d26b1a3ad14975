"""The low-bit matmuls against dequantise-and-multiply, in Triton's interpreter: verify (1 to 16 rows) and prefill.

TRITON_INTERPRET is read when a kernel is decorated, so the checks run in a child process (this file as a script)
and each reports its figures; the tests judge them. CASES run by default, each option of the layout once; WIDE, larger
and with repeats, are slow.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agens_quant import format as layout
from agens_quant import pack

Results = dict[str, dict[str, float]]
TOLERANCE = 6e-4  # outliers cost the most: the step is 2**-16 of the largest value in a slab
PREFILL_TOLERANCE = 3e-6  # products are exact, so only float32 accumulation is left
ROOT = Path(__file__).resolve().parents[2]
PREFILL_ROWS = 17  # from here on the prefill kernel is chosen
CASES: dict[str, dict[str, Any]] = {
    "2 bits": {"bits": 2, "n": 63, "k": 300, "rows": 1},
    "2 bits, more splits than tiles": {"bits": 2, "n": 1, "k": 300, "rows": 2, "splits": 3},
    "3 bits, bf16 x, groups of 64": {"bits": 3, "n": 65, "k": 200, "rows": 8, "x": "bfloat16", "group": 64},
    "3 bits, tables per group, zeros": {"bits": 3, "n": 33, "k": 256, "rows": 9, "group_tables": True, "zeros": True},
    "4 bits, columns, fp16 x": {"bits": 4, "n": 60, "k": 200, "rows": 2, "columns": True, "x": "float16"},
    "4 bits, table, zeros, bf16 out": {
        "bits": 4, "n": 40, "k": 250, "rows": 3, "table": True, "zeros": True, "out": "bfloat16"},
    "4 bits, groups of 32, fp32 scales": {"bits": 4, "n": 20, "k": 255, "rows": 16, "group": 32, "fine_scales": True},
    "outliers": {"bits": 4, "n": 64, "k": 256, "rows": 8, "outliers": True},
    "prefill, 2 bits": {"bits": 2, "n": 65, "k": 300, "rows": 17, "x": "bfloat16"},
    "prefill, 3 bits, zeros, groups of 64": {
        "bits": 3, "n": 40, "k": 250, "rows": 65, "x": "bfloat16", "group": 64, "zeros": True},
    "prefill, 4 bits, columns, fp16 x": {
        "bits": 4, "n": 30, "k": 200, "rows": 18, "x": "float16", "columns": True, "outliers": True},
    "prefill, 4 bits, groups of 32, bf16 out": {
        "bits": 4, "n": 20, "k": 255, "rows": 20, "x": "bfloat16", "group": 32, "out": "bfloat16"},
    "prefill, 2 bits, tables per group": {
        "bits": 2, "n": 50, "k": 256, "rows": 33, "x": "bfloat16", "group_tables": True},
}  # fmt: skip
WIDE: dict[str, dict[str, Any]] = {
    "2 bits, 8 rows": {"bits": 2, "n": 63, "k": 1000, "rows": 8},
    "2 bits, splits": {"bits": 2, "n": 65, "k": 700, "rows": 3, "splits": 2},
    "2 bits, zeros, groups of 32": {"bits": 2, "n": 129, "k": 256, "rows": 5, "group": 32, "zeros": True},
    "2 bits, tables per group": {"bits": 2, "n": 100, "k": 257, "rows": 2, "group_tables": True},
    "3 bits": {"bits": 3, "n": 140, "k": 511, "rows": 7},
    "3 bits, 16 rows, groups of 64": {"bits": 3, "n": 70, "k": 256, "rows": 16, "group": 64},
    "4 bits": {"bits": 4, "n": 131, "k": 300, "rows": 1},
    "4 bits, zeros, 9 rows, bf16 out": {"bits": 4, "n": 40, "k": 520, "rows": 9, "zeros": True, "out": "bfloat16"},
    "4 bits, table": {"bits": 4, "n": 128, "k": 256, "rows": 4, "table": True},
    "4 bits, groups of 32, 3 rows": {"bits": 4, "n": 20, "k": 290, "rows": 3, "group": 32},
    "3 bits, bf16 x": {"bits": 3, "n": 64, "k": 384, "rows": 8, "x": "bfloat16"},
    "wide outliers": {"bits": 4, "n": 64, "k": 512, "rows": 8, "outliers": True},
    "prefill, 2 bits, 130 rows": {"bits": 2, "n": 140, "k": 1000, "rows": 130, "x": "bfloat16"},
    "prefill, 3 bits, 65 rows": {"bits": 3, "n": 131, "k": 511, "rows": 65, "x": "bfloat16"},
    "prefill, 4 bits, table, zeros": {
        "bits": 4, "n": 129, "k": 520, "rows": 63, "x": "float16", "table": True, "zeros": True},
}  # fmt: skip
ALL = CASES | WIDE


def make_packed(case: dict[str, Any]) -> layout.PackedTensor:
    rng = np.random.default_rng(7)
    bits, n, k, group = case["bits"], case["n"], case["k"], case.get("group", 128)
    kp = layout.padded(k, 256)
    groups = kp // group
    columns = None
    if case.get("columns"):
        columns = np.full(kp, -1, np.int32)
        columns[rng.choice(kp, k, replace=False)] = rng.permutation(k)
    table = None
    if case.get("table") or (bits < 4 and not case.get("group_tables")):
        table = rng.integers(-128, 128, 1 << bits).astype(np.int8)
    scales = rng.uniform(-0.02, 0.02, (n, groups)).astype(np.float32)
    return pack.assemble(
        rng.integers(0, 1 << bits, (n, kp), dtype=np.uint8),
        scales if case.get("fine_scales") else scales.astype(np.float16).astype(np.float32),
        shape=(n, k),
        bits=bits,
        group_size=group,
        table=table,
        group_tables=rng.integers(-8, 8, (n, groups, 1 << bits)).astype(np.int8) if case.get("group_tables") else None,
        zeros=rng.integers(-8, 8, (n, groups)) if case.get("zeros") else None,
        columns=columns,
    )


def tensors_of(packed: layout.PackedTensor) -> dict[str, torch.Tensor | None]:
    """The sections by the names the kernels use; unsigned tables as signed words of the same bits."""
    names = ("codes", "scales", "zeros", "table", "group_tables", "columns")
    found: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    for name in packed.format.sections(packed.shape[0], packed.padded_columns):
        array = packed.section(name)
        signed = {np.dtype("uint16"): np.int16, np.dtype("uint32"): np.int32}.get(array.dtype)
        found[name] = torch.from_numpy(array if signed is None else array.view(signed))
    return found


def make_x(case: dict[str, Any]) -> torch.Tensor:
    x = torch.randn(case["rows"], case["k"], generator=torch.Generator().manual_seed(3))
    if case.get("outliers"):
        x[:, 5] *= 300
        x[:, 150] *= 1000
    return x.to(getattr(torch, case.get("x", "float32")))


def relative(y: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> float:
    """Largest error in units of the size a random sum would have, |x| |w| / sqrt(K); NaN counts as infinite."""
    return float(((y.double() - wanted).abs() / size).max()) if bool(torch.isfinite(y).all()) else float("inf")


def run_case(case: dict[str, Any], repeat: bool) -> dict[str, float]:
    from agens_kernels import lowbit
    from agens_kernels.lowbit_matmul import Weights
    from agens_kernels.ref import lowbit_matmul as reference

    packed, x = make_packed(case), make_x(case)
    sections: Any = tensors_of(packed)
    weights = Weights(*packed.shape, packed.format.bits, packed.format.group_size, packed.exponent, **sections)
    decoded = reference.decode(shape=packed.shape, bits=packed.format.bits, exponent=packed.exponent, **sections)
    wanted = x.double() @ decoded.double().T
    size = x.double().norm(dim=1)[:, None] * decoded.double().norm(dim=1) / case["k"] ** 0.5
    rows, n, splits = case["rows"], case["n"], case.get("splits", 1)

    def run(activations: torch.Tensor, matrix: Weights) -> torch.Tensor:
        # Bytes of 255 are NaN in every float type; past the end nothing may change.
        used = lowbit.scratch_bytes(matrix, rows, splits)
        scratch = torch.full((used + 256,), 255, dtype=torch.uint8)
        out = torch.full((rows, n), float("nan"), dtype=getattr(torch, case.get("out", "float32")))
        y = lowbit.linear(activations, matrix, out=out, scratch=scratch, splits=splits)
        assert bool((scratch[used:] == 255).all()), "written past the scratch"
        return y

    y = run(x, weights)
    damaged_x = x.clone()
    damaged_x[0] *= 1.01
    damaged_scales = sections["scales"].clone()
    damaged_scales[0, 0, 0, 0] *= 1.01
    scale_damage = run(x, Weights(**{**vars(weights), "scales": damaged_scales}))
    same = x.dtype if x.dtype == torch.float16 else torch.bfloat16  # the type torch would multiply in on a GPU
    low = x.to(same).float() @ decoded.to(same).float().T
    return {
        "error": relative(y, wanted, size),
        "same_dtype": relative(low.bfloat16() if case.get("out") == "bfloat16" else low, wanted, size),
        "repeat": float((run(x, weights) != y).sum()) if repeat else 0.0,
        "damaged_x": relative(run(damaged_x, weights), wanted, size),
        "damaged_scale": float((scale_damage != y).any(0).sum()),
    }


def run_child(which: str, timeout: int) -> Results:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "quant", "kernels")),
    }
    command = [sys.executable, __file__, which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Results = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def results() -> Results:
    return run_child("cases", 280)


@pytest.fixture(scope="module")
def wide_results() -> Results:
    return run_child("wide", 1800)


def judge_error(case: dict[str, Any], found: dict[str, float]) -> None:
    """At most twice the error of torch in the same type, both against float64; and what the method itself promises."""
    assert found["error"] <= 2 * found["same_dtype"], found
    if case.get("out") == "bfloat16":  # both round the result, which is all there is to see
        assert found["error"] <= 1.5 * found["same_dtype"], found
    else:
        assert found["error"] <= (PREFILL_TOLERANCE if case["rows"] >= PREFILL_ROWS else TOLERANCE), found


def judge_damage(case: dict[str, Any], found: dict[str, float]) -> None:
    assert found["damaged_scale"] == 1, "a scale of row 0 belongs to output 0 and to no other"
    if case.get("out") != "bfloat16":
        assert found["damaged_x"] > TOLERANCE, found


@pytest.mark.parametrize("name", CASES)
def test_error_is_within_twice_that_of_the_same_dtype(name: str, results: Results) -> None:
    judge_error(CASES[name], results[name])


@pytest.mark.parametrize("name", CASES)
def test_one_percent_of_damage_is_seen(name: str, results: Results) -> None:
    judge_damage(CASES[name], results[name])


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", WIDE)
def test_wide_cases_are_as_exact_and_bit_identical_when_repeated(name: str, wide_results: Results) -> None:
    judge_error(WIDE[name], wide_results[name])
    judge_damage(WIDE[name], wide_results[name])
    assert wide_results[name]["repeat"] == 0


def small_weights() -> Any:
    from agens_kernels.lowbit_matmul import Weights

    packed = make_packed({"bits": 2, "n": 5, "k": 100})
    sections: Any = tensors_of(packed)
    return Weights(*packed.shape, 2, 128, packed.exponent, **sections)


@pytest.mark.parametrize(
    ("rows", "dtype", "missing", "message"),
    [(17, torch.float32, 0, "above 16 rows"), (4, torch.float32, 1, "scratch"), (17, torch.bfloat16, 1, "scratch")],
)
def test_what_does_not_fit_is_refused(rows: int, dtype: torch.dtype, missing: int, message: str) -> None:
    from agens_kernels import lowbit

    weights = small_weights()
    scratch = torch.empty(lowbit.scratch_bytes(weights, rows) - missing, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        lowbit.linear(torch.zeros(rows, 100, dtype=dtype), weights, out=torch.empty(rows, 5), scratch=scratch)


@pytest.mark.parametrize("k_tiles", [1, 7, 20, 24, 68])
@pytest.mark.parametrize("rows", [1024, 5120, 34816])
def test_splits_fill_the_chip_and_none_is_empty(rows: int, k_tiles: int) -> None:
    from dataclasses import replace

    from agens_kernels import lowbit

    codes = torch.empty(rows // 128, k_tiles, 8192, dtype=torch.uint8, device="meta")
    weights = replace(small_weights(), out_features=rows, in_features=256 * k_tiles, codes=codes)
    splits = lowbit.splits_for(weights, 82)
    per_split = -(-k_tiles // splits)
    assert (splits - 1) * per_split < k_tiles <= splits * per_split
    programs = rows // 128
    assert splits == 1 or per_split >= 4
    assert splits == 1 or (splits - 1) * programs < 4 * 82, "one split fewer would have filled the chip"


@pytest.mark.parametrize("name", ALL)
def test_the_two_references_agree_bit_for_bit(name: str) -> None:
    from agens_kernels.ref import lowbit_matmul as reference

    packed = make_packed(ALL[name])
    sections: Any = tensors_of(packed)
    decoded = reference.decode(shape=packed.shape, bits=packed.format.bits, exponent=packed.exponent, **sections)
    assert np.array_equal(decoded.numpy(), pack.dequantize(packed))


PTX = {"and.b32": operator.and_, "or.b32": operator.or_, "shl.b32": operator.lshift, "shr.u32": operator.rshift}


def run_ptx(code: str, operands: list[int]) -> int:
    """$0 after the few 32-bit instructions the inline blocks are made of. operands are $1, $2, ..."""
    registers = {f"${i}": word for i, word in enumerate(operands, 1)}

    def value(text: str) -> int:
        return int(text, 16) if text.startswith("0x") else int(text) if text.isdigit() else registers[text]

    for line in code.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        target, *given = (part.strip() for part in rest.split(","))
        a, b, *more = map(value, given)
        if name == "prmt.b32":
            source = (a | b << 32).to_bytes(8, "little")
            result = 0
            for i in range(4):
                selector = more[0] >> (4 * i) & 15
                byte = source[selector & 7]
                result |= (byte if selector < 8 else 255 * (byte >> 7)) << (8 * i)
        else:
            result = PTX[name](a, b)
        registers[target] = result & 0xFFFFFFFF
    return registers["$0"]


@pytest.mark.parametrize(("bits", "table"), [(2, 1), (3, 1), (4, 0), (4, 1)])
def test_the_inline_blocks_mean_what_the_plain_path_means(bits: int, table: int) -> None:
    """The interpreter cannot run inline PTX, so its instructions are evaluated here against the layout's words."""
    from agens_kernels import lowbit_matmul as kernel

    rng = np.random.default_rng(bits)
    for _ in range(50):
        low, high = (int(word) for word in rng.integers(0, 1 << 32, 2))
        entries = rng.integers(-128, 128, 1 << bits).astype(np.int8)
        words = [int(word) for word in entries.view(np.uint32)] if table else []
        operands = [low, *([high] if bits == 3 else []), *(word for word in words for _ in range(4))]
        for slab in range(2):
            for slot in range(4):
                result = run_ptx(kernel._slot_asm.fn(bits, slot, slab, table), operands)
                for element in range(4):
                    byte, top = (word >> (8 * element) & 255 for word in (low, high))
                    code = byte >> (4 * (slot % 2)) & 15 if bits == 4 else byte >> (2 * slot) & 3
                    if bits == 3:
                        code |= (top >> (slot % 2 + 2 * slab + 4 * (slot // 2)) & 1) << 2
                    expected = int(entries[code]) if table else 16 * ((code ^ 8) - 8)
                    got = result >> (8 * element) & 255
                    assert (got ^ 128) - 128 == expected, (bits, slab, slot, element)


def test_constants_are_those_of_the_layout() -> None:
    source = (ROOT / "kernels/agens_kernels/lowbit_matmul.py").read_text()
    for name in ("TILE_ROWS", "TILE_COLUMNS", "SLAB", "SLOT"):
        assert f"\n{name} = {getattr(layout, name)}\n" in source


if __name__ == "__main__":
    wide = sys.argv[1] == "wide"
    print(json.dumps({name: run_case(case, repeat=wide) for name, case in (WIDE if wide else CASES).items()}))
