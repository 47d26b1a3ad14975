"""Offline compile gate: every Triton kernel for every target, no GPU needed.

    python scripts/compile_kernels.py --targets sm_86,sm_89,sm_90,sm_120 [--only WORD]

Prints registers, spill bytes, shared memory against the chip's limit, 128-bit loads, and for the matmul the
instructions of the inner loop per weight and lane, counted in the machine code. Exit 1 on a spill, on shared memory
over the limit, on a matmul whose packed words are not loaded 16 bytes at a time, whose unpacked weights travel through
shared memory, or which needs more than 2.8 instructions a weight at 2 bits. The last line is JSON.

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

from agens_kernels import lowbit_matmul

SHARED_LIMIT = {"sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_120": 101376}
MAX_INSTRUCTIONS_AT_2_BITS = 2.8
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Case:
    """One kernel with one set of constants. weights: how many a lane unpacks in one pass of the inner loop."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 1
    divisible: frozenset[str] = frozenset()
    weights: float = 0.0
    fast: bool = True


@dataclass
class Outcome:
    registers: int
    spill_bytes: int
    shared: int
    loads_128: int
    per_weight: float | None = None
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


def judge_matmul(case: Case, outcome: Outcome, loop: Counter[str]) -> None:
    if not loop:
        outcome.faults.append("no loop with tensor-core instructions found")
    if not any(name.startswith(("LDG", "LDGSTS")) and ".128" in name for name in loop):
        outcome.faults.append("the loop loads no packed words 16 bytes at a time")
    if case.fast and any(name.startswith("STS") and ".128" in name for name in loop):
        outcome.faults.append("unpacked weights travel through shared memory")
    main_case = case.fast and (case.constants["BITS"], case.constants["GROUP"], case.constants["BM"]) == (2, 128, 8)
    if main_case and (outcome.per_weight or 0) > MAX_INSTRUCTIONS_AT_2_BITS:
        outcome.faults.append(f"{outcome.per_weight:.2f} instructions a weight")


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
        f"{'128-bit':>7} {'per weight':>10}",
        flush=True,
    )
    report: list[dict[str, Any]] = []
    for case in chosen:
        for target in targets:
            outcome = build(case, target)
            per_weight = "" if outcome.per_weight is None else f"{outcome.per_weight:.2f}"
            print(
                f"{case.name:42} {target:7} {outcome.registers:4} {outcome.spill_bytes:5} {outcome.shared:7} /"
                f"{SHARED_LIMIT[target]:7} {outcome.loads_128:7} {per_weight:>10}  {'; '.join(outcome.faults)}",
                flush=True,
            )
            report.append({"kernel": case.name, "target": target, **vars(outcome)})
    failed = sum(bool(row["faults"]) for row in report)
    print(f"{len(report)} compiled, {failed} failed; not yet measured on a GPU")
    print(json.dumps({"triton": triton.__version__, "failed": failed, "kernels": report}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
