"""Offline compile gate: every Triton kernel for every target, no GPU needed.

    python scripts/compile_kernels.py --targets sm_86,sm_89,sm_90,sm_120 [--only WORD]

Prints registers, spill bytes, shared memory against the chip's limit, 128-bit loads, and for the matmuls the
instructions of the inner loop per weight and lane, and the bytes the loop loads over the bytes it needs, counted in
the machine code. Exit 1 on a spill, on shared memory over the limit, on a verify matmul whose packed words are not
loaded 16 bytes at a time, on more than 1.05 times the needed bytes, on unpacked weights that travel through shared
memory, or on more than 2.8 instructions a weight at 2 bits. The last line is JSON.

How bytes are counted. Loaded: every global load of the loop times its width times the lanes, whether a predicate turns
a lane off or not. Of a verify matmul that is the stream from memory alone, which comes in two widths: packed words are
the only 16-byte loads, scales, zero points and tables of groups the only 2-byte and 1-byte ones; the activations (4
and 8 bytes a lane, the same few KiB for all programs) come from the L2 cache and are left out. Of a prefill matmul
packed words and activations count together, scales do not. What padding to 128 rows and 256 columns adds is a property
of the matrix, not of the code: the second table counts it from the launch geometry for every linear of Volundr 32B.

Pointers count as 16-byte aligned and row lengths as divisible by 16, as at a launch (without that the code would be
another). Limits of shared memory a block are the documented ones. What this cannot show: speed; nothing here has been
measured on a GPU. Only the loop's static count is given: predicated instructions count whether they act or not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled; it is read when they are decorated
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "kernels", "quant")]
from agens_kernels import lowbit_matmul, lowbit_prefill  # noqa: E402
from agens_quant.format import DeviceFormat, padded  # noqa: E402
from scripts.linear_shapes import linear_shapes  # noqa: E402

SHARED_LIMIT = {"sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_120": 101376}
MAX_INSTRUCTIONS_AT_2_BITS = 2.8
MAX_BYTES_RATIO = 1.05
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Case:
    """One kernel with one set of constants.

    weights  how many a lane unpacks in one pass of the inner loop
    needed   by width of load in bytes (several widths may share a line): what a pass of the inner loop must load
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 1
    divisible: frozenset[str] = frozenset()
    weights: float = 0.0
    fast: bool = True
    needed: Mapping[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Outcome:
    registers: int
    spill_bytes: int
    shared: int
    loads_128: int
    per_weight: float | None = None
    bytes_ratio: float | None = None
    faults: list[str] = field(default_factory=list)


_MATMUL_TYPES = {
    "x_parts": "*i8", "x_scale": "*fp32", "x_sum": "*i32", "codes": "*u8", "w_scales": "*fp16", "zeros": "*i8",
    "tables": "*i32", "group_tables": "*i16", "out": "*fp32", "rows": "i32", "N": "i32", "k_tiles": "i32",
    "tiles_per_split": "i32", "factor": "fp32",
}  # fmt: skip


def matmul(bits: int, rows: int, *, group: int = 128, table: int | None = None, zero: bool = False) -> Case:
    kind = table if table is not None else (lowbit_matmul.TABLE_NONE if bits == 4 else lowbit_matmul.TABLE_TENSOR)
    block_n, warps, stages = lowbit_matmul.block_sizes(bits, rows, group)
    constants = {"BITS": bits, "GROUP": group, "TABLE": kind, "ZERO": zero, "FAST": True, "BM": rows, "BN": block_n}
    kinds = {lowbit_matmul.TABLE_NONE: "", lowbit_matmul.TABLE_TENSOR: " table", lowbit_matmul.TABLE_GROUP: " g-tables"}
    name = f"matmul {bits} bits g{group} rows {rows}{kinds[kind]}{' zeros' if zero else ''}"
    types = dict(_MATMUL_TYPES)
    if bits == 3:
        types["group_tables"] = "*i32"
    tile = DeviceFormat(bits, group).tile_bytes if bits == 4 else DeviceFormat(bits, group, "int8").tile_bytes
    table_bytes = 2 if kind == lowbit_matmul.TABLE_GROUP else 0  # at 2 bits, the only ones among the cases
    beside = lowbit_matmul.TILE_COLUMNS // group * block_n * (2 + zero + table_bytes)
    return Case(
        name,
        lowbit_matmul._lowbit_matmul_kernel,
        types,
        constants,
        warps,
        stages,
        frozenset({"N"}),
        block_n * lowbit_matmul.TILE_COLUMNS / (32 * warps),
        kind != lowbit_matmul.TABLE_GROUP,
        {(16,): tile * block_n // lowbit_matmul.TILE_ROWS, (1, 2): beside},
    )


def prefill(bits: int, *, group: int = 128, table: int | None = None, zero: bool = False) -> Case:
    verify = matmul(bits, 8, group=group, table=table, zero=zero)
    block_n, block_m, warps, stages = lowbit_prefill.BLOCKS[group]
    kept = ("codes", "w_scales", "zeros", "tables", "group_tables", "rows", "N", "k_tiles", "factor")
    types = {"x": "*bf16", **{name: verify.types[name] for name in kept}, "out": "*bf16"}
    order = ("x", "codes", "w_scales", "zeros", "tables", "group_tables", "out", "rows", "N", "k_tiles", "factor")
    tile = verify.needed[16,] * block_n // verify.constants["BN"]
    return Case(
        verify.name.replace("matmul", "prefill").replace(" rows 8", ""),
        lowbit_prefill._prefill_kernel,
        {name: types[name] for name in order},
        {**verify.constants, "BM": block_m, "BN": block_n},
        warps,
        stages,
        frozenset({"N"}),
        block_n * lowbit_matmul.TILE_COLUMNS / (32 * warps),
        verify.fast,
        {(4, 8, 16): tile + block_m * lowbit_matmul.TILE_COLUMNS * 2},
    )


def cases() -> list[Case]:
    prepare = {"x": "*bf16", "columns": "*i32", "x_parts": "*i8", "x_scale": "*fp32", "x_sum": "*i32", "rows": "i32",
               "K": "i32", "row_stride": "i32"}  # fmt: skip
    add = {"partial": "*fp32", "out": "*bf16", "size": "i32"}
    return [
        *(matmul(bits, rows) for bits in (2, 3, 4) for rows in (8, 16)),
        matmul(2, 8, zero=True),
        *(matmul(bits, 8, group=group) for bits in (2, 3, 4) for group in (64, 32)),
        matmul(2, 16, group=64),
        matmul(2, 8, table=lowbit_matmul.TABLE_GROUP),
        matmul(4, 8, zero=True),
        matmul(4, 8, table=lowbit_matmul.TABLE_TENSOR),
        *(prefill(bits) for bits in (2, 3, 4)),
        prefill(2, zero=True),
        *(prefill(bits, group=group) for bits, group in ((3, 64), (2, 32), (3, 32), (4, 32))),
        prefill(2, table=lowbit_matmul.TABLE_GROUP),
        Case(
            "order rows",
            lowbit_prefill._order_rows_kernel,
            {"x": "*bf16", "columns": "*i32", "ordered": "*bf16", "K": "i32", "row_stride": "i32", "slabs": "i32"},
            {"GROUP": 128, "MAPPED": False},
            1,
            divisible=frozenset({"K", "row_stride"}),
        ),
        Case(
            "prepare rows",
            lowbit_matmul._prepare_rows_kernel,
            prepare,
            {"GROUP": 128, "BM": 8, "MAPPED": False},
            1,
            divisible=frozenset({"K", "row_stride"}),
        ),
        Case("add 4 splits", lowbit_matmul._add_splits_kernel, add, {"SPLITS": 4, "BLOCK": 1024}, 4),
    ]


def build(case: Case, target: str) -> Outcome:
    signature = {**case.types, **dict.fromkeys(case.constants, "constexpr")}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in case.divisible
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    registers, spills = usage(compiled.asm["ptx"])
    code = instructions(compiled.asm["cubin"])
    names = Counter(name for name, _, _ in code)
    outcome = Outcome(
        registers,
        spills,
        compiled.metadata.shared,
        sum(n for name, n in names.items() if name.startswith(("LDG", "LDGSTS")) and ".128" in name),
    )
    if spills:
        outcome.faults.append(f"{spills} bytes spilled")
    if outcome.shared > SHARED_LIMIT[target]:
        outcome.faults.append(f"shared memory {outcome.shared} over {SHARED_LIMIT[target]}")
    if case.weights:
        loop = inner_loop(code)
        outcome.per_weight = sum(loop.values()) / case.weights
        judge_matmul(case, outcome, loop)
    return outcome


def loaded_bytes(loop: Counter[str], warps: int) -> Counter[int]:
    """Width of load in bytes -> bytes that all lanes of a block load in one pass, by the names of the instructions."""
    found: Counter[int] = Counter()
    for name, count in loop.items():
        if name.startswith("LDG") and not name.startswith("LDGDEPBAR"):
            bits = re.search(r"\.[US]?(8|16|64|128)(?=\.|$)", name)
            width = int(bits[1]) // 8 if bits else 4
            found[width] += count * width * 32 * warps
    return found


def judge_matmul(case: Case, outcome: Outcome, loop: Counter[str]) -> None:
    if not loop:
        outcome.faults.append("no loop with tensor-core instructions found")
    if case.fast and any(name.startswith("STS") and ".128" in name for name in loop):
        outcome.faults.append("unpacked weights travel through shared memory")
    loaded = loaded_bytes(loop, case.warps)
    ratios = [sum(loaded[width] for width in widths) / needed for widths, needed in case.needed.items()]
    outcome.bytes_ratio = round(max(ratios), 4)
    if outcome.bytes_ratio > MAX_BYTES_RATIO:
        outcome.faults.append(f"loads {outcome.bytes_ratio} times the bytes it needs")
    if min(ratios) < 1.0:
        outcome.faults.append("some needed bytes are not loaded at the width they should be (packed words: 16 bytes)")
    main_case = (case.constants["BITS"], case.constants["GROUP"], case.constants["BM"]) == (2, 128, 8)
    if case.fast and main_case and (outcome.per_weight or 0) > MAX_INSTRUCTIONS_AT_2_BITS:
        outcome.faults.append(f"{outcome.per_weight:.2f} instructions a weight")


def geometry(rows: int = 8) -> tuple[list[str], float]:
    """Lines of the table of what padding adds for each linear of Volundr 32B, and bytes loaded / needed of them all.

    Loaded: the packed matrix with its padding, and the prepared activations once. Needed: codes, fp16 scales and bf16
    activations without padding. Left out on both sides: further reads of the activations and the partial sums of a
    split, which stay in the L2 cache (8 rows of 5,120 are 40 KB and 160 KB a split).
    """
    lines, totals = (
        [f"{'linear':26} {'N':>7} {'K':>6} {'count':>5}   loaded / needed at 2, 3, 4 bits, {rows} rows"],
        [0.0, 0.0],
    )
    for shape in linear_shapes():
        n, k = shape.out_features, shape.in_features
        kp = padded(k, lowbit_matmul.TILE_COLUMNS)
        ratios = []
        for bits in (2, 3, 4):
            loaded = DeviceFormat(bits, 128, "none" if bits == 4 else "int8").nbytes(n, kp) + rows * kp * 2
            needed = n * k * bits / 8 + n * -(-k // 128) * 2 + rows * k * 2
            totals[0] += shape.count * loaded
            totals[1] += shape.count * needed
            ratios.append(loaded / needed)
        lines.append(f"{shape.name:26} {n:7} {k:6} {shape.count:5}   " + "  ".join(f"{r:.3f}" for r in ratios))
    return lines, totals[0] / totals[1]


def usage(ptx: str) -> tuple[int, int]:
    """(registers, bytes of spill stores and loads) as the assembler reports them."""
    chip = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert chip is not None
    assembler = TOOLS / ("ptxas-blackwell" if chip[1].startswith(("sm_10", "sm_12")) else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "k.ptx"
        file.write_text(ptx)
        command = [str(assembler), "-v", "--gpu-name", chip[1], str(file), "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers is not None and spills, log
    return int(registers[1]), sum(map(int, spills))


def instructions(cubin: bytes) -> list[tuple[str, str, str | None]]:
    """(name, operands, label in front of it) of every machine instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(TOOLS / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found: list[tuple[str, str, str | None]] = []
    label = None
    for line in listing.splitlines():
        if mark := re.match(r"\s*(\.L_\w+):", line):
            label = mark[1]
        if text := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", line):
            found.append((text[1], text[2], label))
            label = None
    return found


def inner_loop(code: list[tuple[str, str, str | None]]) -> Counter[str]:
    """The instructions of the shortest backward-branch loop that uses the tensor cores, NOPs left out."""
    where = {label: i for i, (_, _, label) in enumerate(code) if label}
    best: Counter[str] = Counter()
    for i, (name, operands, _) in enumerate(code):
        target = re.search(r"\.L_\w+", operands) if name.startswith("BRA") else None
        start = where.get(target[0], len(code)) if target else len(code)
        if start <= i and any("MMA" in n for n, _, _ in code[start : i + 1]):
            body = Counter(n for n, _, _ in code[start : i + 1] if n != "NOP")
            if not best or sum(body.values()) < sum(best.values()):
                best = body
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="sm_86,sm_89,sm_90,sm_120")
    parser.add_argument("--only", default="", help="compile only kernels whose name contains this")
    options = parser.parse_args()
    targets = options.targets.split(",")
    if unknown := [t for t in targets if t not in SHARED_LIMIT]:
        parser.error(f"unknown targets {unknown}; known: {', '.join(SHARED_LIMIT)}")
    chosen = [case for case in cases() if options.only in case.name]
    if not chosen:
        parser.error(f"no kernel is named like {options.only!r}")

    print(
        f"{'kernel':42} {'target':7} {'regs':>4} {'spill':>5} {'shared':>7} /{'limit':>7} "
        f"{'128-bit':>7} {'per weight':>10} {'bytes':>6}",
        flush=True,
    )
    report: list[dict[str, Any]] = []
    for case in chosen:
        for target in targets:
            outcome = build(case, target)
            per_weight = "" if outcome.per_weight is None else f"{outcome.per_weight:.2f}"
            ratio = "" if outcome.bytes_ratio is None else f"{outcome.bytes_ratio:.3f}"
            print(
                f"{case.name:42} {target:7} {outcome.registers:4} {outcome.spill_bytes:5} {outcome.shared:7} /"
                f"{SHARED_LIMIT[target]:7} {outcome.loads_128:7} {per_weight:>10} {ratio:>6}  "
                f"{'; '.join(outcome.faults)}",
                flush=True,
            )
            report.append({"kernel": case.name, "target": target, **vars(outcome)})
    failed = sum(bool(row["faults"]) for row in report)
    lines, whole = geometry()
    print("\n".join(["", *lines, f"all linears of a step: {whole:.4f} (at most {MAX_BYTES_RATIO})", ""]))
    failed += whole > MAX_BYTES_RATIO
    print(f"{len(report)} compiled, {failed} failed; not yet measured on a GPU")
    print(json.dumps({"triton": triton.__version__, "failed": failed, "bytes_ratio": whole, "kernels": report}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
