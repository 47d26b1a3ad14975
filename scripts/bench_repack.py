"""Throughput of the repack at load: GB/s of container bytes on one core, beside a plain copy of the same bytes.

    python scripts/bench_repack.py [--rows 8192] [--columns 5120] [--repeats 7]

Parity first: every case is decoded both ways and must agree bit for bit, or no number is printed. One thread, CPU
seconds of that thread, so that a busy machine slows the figures less; the ratio to the copy is the robust one.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import combinations

import numpy as np
import torch

from agens_quant import bit_planes, pack
from agens_quant.compressed_tensors import PackedLayout, dequantize, infer_layout, pack_codes
from agens_quant.format import empty_blob
from agens_quant.repack import repack_tensor


def _most_gates(size: int, bits: int) -> tuple[int, ...]:
    """The set of codes whose index takes the longest logic (bit_planes.py), among every eleventh."""
    sets = list(combinations(range(16), size))[::11]
    return max(sets, key=lambda codes: len(bit_planes.circuit_of(sum(1 << c for c in codes), bits).steps))


CASES: dict[str, Iterable[int]] = {
    "int4, all 16 codes": range(16),
    "4-bit container, 8 codes -> 3 bits": range(4, 12),
    "4-bit container, 4 codes -> 2 bits": (3, 7, 8, 12),
    "the same, the 8 codes with most gates": _most_gates(8, 3),
    "the same, the 4 codes with most gates": _most_gates(4, 2),
}


def make(codes: np.ndarray) -> tuple[PackedLayout, dict[str, torch.Tensor]]:
    n, k = codes.shape
    scales = np.random.default_rng(1).uniform(1e-3, 2e-3, (n, k // 128)).astype(np.float32)
    parts = {
        "weight_packed": torch.from_numpy(pack_codes(codes, 4)),
        "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
    }
    return infer_layout((n, k), {name: tuple(part.shape) for name, part in parts.items()}), parts


def cpu_seconds(action: Callable[[], object], repeats: int) -> list[float]:
    action()
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        action()
        seconds.append(time.thread_time() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    print(f"one thread, [{options.rows}, {options.columns}], medians of {options.repeats} (fastest .. slowest)")
    results = {}
    for name, allowed in CASES.items():
        codes = rng.choice(np.array(list(allowed), np.uint8), (options.rows, options.columns))
        layout, parts = make(codes)
        nbytes = sum(part.nbytes for part in parts.values())
        packed = repack_tensor(layout, parts, workers=1)
        wanted = dequantize(layout, parts["weight_packed"], parts["weight_scale"]).numpy()
        if not np.array_equal(pack.dequantize(packed), wanted):
            print(f"{name}: the repacked tensor decodes differently; no numbers")
            return 1
        buffer = empty_blob(packed.nbytes)  # as an arena would: the cost of fresh pages is not the repack's
        words = parts["weight_packed"].numpy()
        target = np.empty_like(words)
        repacking = cpu_seconds(
            lambda layout=layout, parts=parts, buffer=buffer: repack_tensor(  # type: ignore[misc]
                layout, parts, workers=1, allocate=lambda _: buffer
            ),
            options.repeats,
        )
        copying = cpu_seconds(lambda target=target, words=words: np.copyto(target, words), options.repeats)  # type: ignore[misc]
        speed = nbytes / statistics.median(repacking) / 1e9
        copy_speed = words.nbytes / statistics.median(copying) / 1e9
        results[name] = {
            "gb_per_s": round(speed, 3),
            "copy_gb_per_s": round(copy_speed, 3),
            "ratio": round(speed / copy_speed, 3),
            "bits_per_weight": round(packed.bits_per_weight, 4),
        }
        spread = f"{nbytes / max(repacking) / 1e9:.2f} .. {nbytes / min(repacking) / 1e9:.2f}"
        print(
            f"  {name:36} {speed:5.2f} GB/s ({spread})   copy {copy_speed:5.2f} GB/s   "
            f"ratio {speed / copy_speed:.2f}   {packed.bits_per_weight:.3f} bits a weight"
        )
    print(
        json.dumps({"results": results, "numpy": np.__version__, "torch": torch.__version__, "cpu": platform.machine()})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
