"""The low-bit matmul on a GPU: every linear of Volundr 32B at 1, 8, 16 rows and in a prefill chunk.

    python scripts/bench_matmul_gpu.py [--bits 2,3,4] [--rows 1,8,16,2048] [--only WORD] [--repeats 20]

Not yet measured on a GPU: its parts have run on a CPU, the whole has not. Without a GPU it says so and exits with 2.
Parity first: each case is compared with the reference on the same device (ref/lowbit_matmul.py) and may err at most
twice as much as torch in bfloat16, both against float64; one failure, and no number is printed (exit 1).

The denominator is measured in the same run: the read bandwidth of summing a buffer far larger than any cache. GB/s are
those of the packed matrix, padding included, activations not. Each call gets another copy of the matrix, in turn, until
the copies together exceed the L2 cache four times, so that no byte is found there. Times are CUDA events around one
call; a median and the fastest and slowest are printed. Prefill lines give TFLOP/s too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "kernels", "quant")]
from agens_kernels import lowbit  # noqa: E402
from agens_kernels.lowbit_matmul import MAX_ROWS, Weights  # noqa: E402
from agens_kernels.ref import lowbit_matmul as reference  # noqa: E402
from agens_quant.format import DeviceFormat, padded  # noqa: E402
from scripts.linear_shapes import LinearShape, linear_shapes  # noqa: E402

READ_BUFFER_BYTES = 4 << 30
MAX_COPIES = 64
REFERENCE_ROWS = 2048  # of the matrix at once in the reference: 40 MB of float32 at K = 5,120


def random_weights(shape: LinearShape, bits: int, device: torch.device) -> Weights:
    """Random codes, scales and a table in the layout; timing depends on none of them."""
    n, kp = shape.out_features, padded(shape.in_features, 256)
    fmt = DeviceFormat(bits, 128, "none" if bits == 4 else "int8")
    sections = fmt.sections(n, kp)
    generator = torch.Generator(device).manual_seed(bits)
    codes = torch.randint(256, sections["codes"].shape, dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand(sections["scales"].shape, dtype=torch.float32, device=device, generator=generator)
    table = None if bits == 4 else torch.arange(-(1 << bits) // 2, (1 << bits) // 2, dtype=torch.int8, device=device)
    return Weights(n, shape.in_features, bits, 128, 0, codes, (scales * 0.02 + 1e-3).half(), table=table)


def relative_errors(x: Tensor, weights: Weights, y: Tensor) -> tuple[float, float]:
    """(error of y, error of torch in bfloat16): the largest, in units of the size of a random sum, against float64."""
    ours, theirs = 0.0, 0.0
    exact = x.double()
    for first in range(0, weights.out_features, REFERENCE_ROWS):
        last = min(first + REFERENCE_ROWS, weights.out_features)
        tiles = slice(first // 128, -(-last // 128))
        decoded = reference.decode(
            weights.codes[tiles],
            weights.scales[tiles],
            shape=(last - first, weights.in_features),
            bits=weights.bits,
            table=weights.table,
        )
        wanted = exact @ decoded.double().T
        size = exact.norm(dim=1)[:, None] * decoded.double().norm(dim=1) / weights.in_features**0.5
        bf16 = torch.nn.functional.linear(x, decoded.bfloat16())
        found = y[:, first:last].double()
        if not bool(torch.isfinite(found).all()):
            return float("inf"), 1.0
        ours = max(ours, float(((found - wanted).abs() / size).max()))
        theirs = max(theirs, float(((bf16.double() - wanted).abs() / size).max()))
    return ours, theirs


def milliseconds(call: Callable[[int], object], repeats: int) -> list[float]:
    """Device time of single calls; call gets 0, 1, 2, ... to choose its copy of the data."""
    for i in range(3):
        call(i)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(marks):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def read_bandwidth(device: torch.device) -> float:
    """GB/s of reading a large buffer once."""
    size = min(READ_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / min(milliseconds(lambda _: buffer.sum(), 10)) / 1e6


def copies_of(weights: Weights, device: torch.device) -> list[Weights]:
    """Enough copies of the codes to exceed the L2 cache four times; the small sections are shared."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MAX_COPIES, 1 + 4 * cache // weights.codes.nbytes)
    return [weights, *(replace(weights, codes=weights.codes.clone()) for _ in range(count - 1))]


def measure(shape: LinearShape, bits: int, rows: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Parity, then times, of one linear."""
    weights = random_weights(shape, bits, device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = 1 if rows > MAX_ROWS else lowbit.splits_for(weights, multiprocessors)
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, shape.in_features, device=device, generator=generator).bfloat16()
    out = torch.full((rows, shape.out_features), float("nan"), dtype=torch.bfloat16, device=device)
    scratch = torch.empty(lowbit.scratch_bytes(weights, rows, splits), dtype=torch.uint8, device=device)
    fine = torch.full_like(out, float("nan"), dtype=torch.float32)  # bfloat16's last rounding would hide what is judged
    ours, theirs = relative_errors(x, weights, lowbit.linear(x, weights, out=fine, scratch=scratch, splits=splits))
    del fine
    result = {"error": ours, "bf16_error": theirs, "splits": float(splits)}
    if ours > 2 * theirs:
        return result
    copies = copies_of(weights, device)
    times = milliseconds(
        lambda i: lowbit.linear(x, copies[i % len(copies)], out=out, scratch=scratch, splits=splits), repeats
    )
    nbytes = weights.codes.nbytes + weights.scales.nbytes
    middle = statistics.median(times)
    flop = 2 * rows * shape.weights
    return {
        **result,
        "ms": middle,
        "ms_fastest": min(times),
        "ms_slowest": max(times),
        "gb_per_s": nbytes / middle / 1e6,
        "tflop_per_s": flop / middle / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--rows", default="1,8,16,2048")
    parser.add_argument("--only", default="", help="only linears whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    shapes = [shape for shape in linear_shapes() if options.only in shape.name]
    if not shapes:
        parser.error(f"no linear is named like {options.only!r}")
    if not torch.cuda.is_available():
        print(
            "no GPU: torch sees no CUDA device, so there is nothing to measure (parity and code: tests, compile gate)"
        )
        return 2
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    bandwidth = read_bandwidth(device)
    print(f"{name}, measured read {bandwidth:.0f} GB/s; GB/s of the packed matrix, medians (fastest .. slowest)")
    results: list[dict[str, Any]] = []
    for bits in map(int, options.bits.split(",")):
        for rows in map(int, options.rows.split(",")):
            for shape in shapes:
                found = measure(shape, bits, rows, options.repeats, device)
                if "ms" not in found:
                    print(f"{shape.name} {bits} bits {rows} rows: error {found['error']:.2e}, over twice bfloat16's "
                          f"{found['bf16_error']:.2e}; no numbers")  # fmt: skip
                    return 1
                found["share_of_read"] = found["gb_per_s"] / bandwidth
                results.append({"linear": shape.name, "bits": bits, "rows": rows, **found})
                torch.cuda.empty_cache()
    for row in results:
        rate = (
            f"{row['tflop_per_s']:7.1f} TFLOP/s" if row["rows"] > MAX_ROWS else f"{row['share_of_read']:7.2f} of read"
        )
        print(
            f"{row['linear']:26} {row['bits']} bits {row['rows']:5} rows  {row['ms']:8.4f} ms "
            f"({row['ms_fastest']:.4f} .. {row['ms_slowest']:.4f})  {row['gb_per_s']:7.0f} GB/s  {rate}  "
            f"error {row['error']:.1e} (bf16 {row['bf16_error']:.1e})"
        )
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    print(json.dumps({"gpu": name, "read_gb_per_s": bandwidth, **versions, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
