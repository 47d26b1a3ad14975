"""How memory and decode time follow a very long context, on a tiny model on the CPU; a red gate ends it.

    python scripts/bench_long_context.py [--context 262144] [--windows 128,4096] [--skip-reference] [--skip-nano]

A random 8-layer model (6 KDA, 2 BCSA; one BCSA layer's far pool resident, the other in host memory behind a hot cache)
runs random tokens in chunks under a real plan. At each context of the table some tokens are decoded one at a time; the
time is shown with the scan of block keys apart, because that scan is linear in the context by design (CPU time of the
one thread, which other load on the machine disturbs less than the clock on the wall). Device bytes are
what the arena counted, against the plan. Resident memory (RSS) is measured twice: how it grows with the planned context
when sequence memory is claimed, against the bytes per token that the paged storage documents, and that it stays put
while the context fills. At the end the logits are compared with a run of the same tokens with all far pools resident.

Random tokens on random weights select blocks at random: the worst case for the hot cache. The second part asks nano the
prompts of its suites with every far layer in host memory and reports the hit rates of several cache sizes.
Not measured on a GPU: this says nothing about the bus or about kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.memory.arena import Arena  # noqa: E402
from agens_engine.memory.far_pool import TAG_WORDS, HotCache  # noqa: E402
from agens_engine.memory.pages import PagedRows, PagePool, PageTable  # noqa: E402
from agens_engine.memory.state import SequenceState, StatePool, unplanned  # noqa: E402
from agens_engine.model.batch import StepBatch  # noqa: E402
from agens_engine.model.config import expected_shapes, parse_config  # noqa: E402
from agens_engine.model.loading import load_model  # noqa: E402
from agens_engine.model.volundr import Volundr  # noqa: E402
from agens_engine.planning import PlanRequest, build_question, make_plan  # noqa: E402
from agens_kernels.ref import attention  # noqa: E402

CPU = torch.device("cpu")
TOLERANCE = 2e-4
FIRST_CONTEXT = 8192
DECODED = 40  # tokens decoded at each context of the table
NANO_CACHES = (0, 16, 32, 64, 128, 256)


@dataclass
class Row:
    """One line of the table. CPU milliseconds per decoded token, scan and rest being its two parts."""

    context: int
    device_bytes: int
    planned_bytes: int
    rss_growth_bytes: int  # since the start, when all sequence memory was claimed and touched
    bytes_per_token: float
    decode_ms: float
    scan_ms: float
    rest_ms: float
    hit_rate: float | None
    miss_bytes_per_token: float


def tiny_model(folder: Path, window: int, context: int) -> Path:
    """A random checkpoint: small enough for a core, with the real model's proportions of layers."""
    text: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "mixer_types": ["kda", "kda", "bcsa", "kda", "kda", "kda", "bcsa", "kda"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "kda_gate_rank": 8,
        "bcsa_window": window, "bcsa_compress": 4, "bcsa_topk": 16, "bcsa_indexer_dim": 16,
        "mhc_streams": 1, "engram_layers": [],
    }  # fmt: skip
    raw = {"model_type": "volundr", "text_config": text}
    indexer = {f"model.layers.{n}.self_attn.idx_q.weight": (32, 32) for n in (2, 6)}
    indexer |= {f"model.layers.{n}.self_attn.idx_k.weight": (16, 32) for n in (2, 6)}
    config = parse_config(raw, indexer)
    gen = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_shapes(config).items():
        scale = 1.0 if "embed_tokens" in name else 1.0 * (shape[-1] if len(shape) > 1 else 4) ** -0.5
        weights[name] = torch.randn(shape, generator=gen) * scale
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


class ScanClock:
    """Sums the time of block selection while it is the module's select_blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._original = attention.select_blocks

    def __enter__(self) -> ScanClock:
        def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
            started = time.thread_time()
            try:
                return self._original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        attention.select_blocks = timed
        return self

    def __exit__(self, *_: object) -> None:
        attention.select_blocks = self._original


def low_ms(seconds: Sequence[float]) -> float:
    """Lower quartile in milliseconds without the first few: other load only ever adds."""
    return 1e3 * statistics.quantiles(seconds[8:], n=4)[0]


def rss_bytes() -> int:
    """Resident memory after the allocator gave back what it only keeps for later (glibc)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def claimed_bytes_per_token(model: Volundr, chunk: int, contexts: Sequence[int]) -> float:
    """How resident memory grows with the context that sequence memory is claimed for, which happens at start-up."""
    grown = []
    for context in (contexts[0], contexts[-1]):
        before = rss_bytes()
        pool = StatePool(model.state_shapes(), 1, unplanned(CPU), context_tokens=context, chunk_tokens=chunk)
        grown.append(rss_bytes() - before)
        del pool
    return (grown[1] - grown[0]) / max(1, contexts[-1] - contexts[0])


def contexts_of(context: int) -> list[int]:
    """FIRST_CONTEXT, then four times as much again and again, up to and including the longest."""
    found = [min(FIRST_CONTEXT, context)]
    while found[-1] * 4 <= context:
        found.append(found[-1] * 4)
    return found if found[-1] == context else [*found, context]


@torch.inference_mode()
def follow(
    model: Volundr, state: SequenceState, ids: Sequence[int], chunk: int, contexts: Sequence[int], *,
    decoded: int = DECODED, at: Callable[[int, list[float], list[float]], None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the ids in chunks, the last `decoded` before each context one by one; returns the logits of the last one.

    at   called at each context with the seconds of its decoded tokens, whole and scanning
    """
    hidden = torch.empty(0)
    for context in contexts:
        while (left := context - decoded - state.num_tokens) > 0:
            part = ids[state.num_tokens : state.num_tokens + min(chunk, left)]
            model(StepBatch([(state, part)], CPU))
            state.commit(len(part))
        whole, scans = [], []
        while state.num_tokens < context:
            with ScanClock() as clock:
                started = time.thread_time()
                hidden, _ = model(StepBatch([(state, [ids[state.num_tokens]])], CPU))
                state.commit(1)
                whole.append(time.thread_time() - started)
            scans.append(clock.seconds)
        if at is not None:
            at(context, whole, scans)
    return model.logits(hidden[-1:])


def measure(folder: Path, window: int, context: int, chunk: int, hot: int, reference: bool) -> dict[str, Any]:
    """One model under one plan; raises AssertionError when the logits or the bytes are not what they should be."""
    question = build_question(
        PlanRequest(
            model=str(tiny_model(folder, window, context)), profile="cpu", context=str(context), sequences="1",
            settings=("far_resident_layers=1", f"hot_cache_blocks={hot}", "snapshot_bytes=0",
                      f"chunk_tokens_max={chunk}", f"chunk_tokens_min={chunk}"),
        ),
        environ={},
    )  # fmt: skip
    plan = make_plan(question)
    arena = Arena.of_plan(plan, CPU)
    model = load_model(folder, device=CPU, memory=arena)
    pool = StatePool(
        model.state_shapes(), 1, arena.claim, context_tokens=context, chunk_tokens=plan.choice.chunk_tokens,
        far_resident_layers=plan.choice.far_resident_layers, hot_cache_blocks=plan.hot_cache_blocks,
    )  # fmt: skip
    ids = torch.randint(0, 96, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    state, rows = pool.create(), list[Row]()
    assert pool.far is not None
    counts = pool.far.counts
    started, before = time.perf_counter(), rss_bytes()
    seen = [0, 0, 0]

    def at(length: int, whole: list[float], scans: list[float]) -> None:
        now = [counts.hits, counts.misses, counts.miss_bytes]
        hits, misses, missed = (a - b for a, b in zip(now, seen, strict=True))
        seen[:] = now
        rows.append(
            Row(
                context=length,
                device_bytes=arena.peak_device_bytes,
                planned_bytes=plan.planned_peak_bytes,
                rss_growth_bytes=rss_bytes() - before,
                bytes_per_token=pool.page_bytes / pool.pages.page_tokens,
                decode_ms=low_ms(whole),
                scan_ms=low_ms(scans),
                rest_ms=low_ms([a - b for a, b in zip(whole, scans, strict=True)]),
                hit_rate=hits / (hits + misses) if hits + misses else None,
                miss_bytes_per_token=missed / len(whole),
            )
        )
        print(table_row(rows[-1]), flush=True)

    print(f"\nwindow {window:,}, chunk {chunk:,}, hot cache {hot} blocks\n{HEAD}", flush=True)
    contexts = contexts_of(context)
    logits = follow(model, state, ids, chunk, contexts, at=at)
    seconds = time.perf_counter() - started
    pool.check([state])
    arena.check()
    assert arena.peak_device_bytes <= plan.planned_peak_bytes
    result: dict[str, Any] = {
        "window": window,
        "seconds": seconds,
        "rows": [asdict(row) for row in rows],
        "decode_ratio_without_scan": rows[-1].rest_ms / rows[0].rest_ms,
        "host_planned_bytes": plan.planned_host_bytes,
        "staged_bytes": counts.staged_bytes,
    }
    if len(rows) > 1:
        result["rss_bytes_per_token"] = claimed_bytes_per_token(model, chunk, contexts)
        result["rss_growth_while_running_bytes"] = rows[-1].rss_growth_bytes - rows[0].rss_growth_bytes
    if reference:
        other = StatePool(model.state_shapes(), 1, unplanned(CPU), context_tokens=context, chunk_tokens=chunk)
        expected = follow(model, other.create(), ids, chunk, contexts)
        result["max_logit_difference"] = float((logits - expected).abs().max())
        result["bit_identical"] = bool(torch.equal(logits, expected))
        assert result["max_logit_difference"] <= TOLERANCE, result["max_logit_difference"]
    return result


HEAD = (
    f"{'context':>9} {'device':>10} {'planned':>10} {'RSS growth':>11} {'paged bytes':>11} "
    f"{'CPU ms':>9} {'scan':>7} {'rest':>7} {'hits':>6} {'missed B/token':>15}"
)


def table_row(row: Row) -> str:
    rate = "-" if row.hit_rate is None else f"{100 * row.hit_rate:.1f}%"
    return (
        f"{row.context:>9,} {row.device_bytes / 2**20:>6.1f} MiB {row.planned_bytes / 2**20:>6.1f} MiB "
        f"{row.rss_growth_bytes / 2**20:>7.1f} MiB {row.context * row.bytes_per_token / 2**20:>7.1f} MiB "
        f"{row.decode_ms:>9.2f} {row.scan_ms:>7.2f} {row.rest_ms:>7.2f} {rate:>6} {row.miss_bytes_per_token:>15,.0f}"
    )


@torch.inference_mode()
def nano_hit_rates(prompts: int, tokens: int, caches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Cache size -> hit rate and bytes per token of greedy answers to nano's suites, all far layers in host memory.

    The answers are made once, without a cache; what each layer selected is then played to a cache of each size.
    """
    from agens_engine.model_files import resolve_model
    from agens_engine.text.template import ChatTemplate
    from agens_engine.text.tokenizer import Tokenizer

    folder = resolve_model("nano")
    model, tokenizer = load_model(folder, device=CPU), Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer)
    pool = StatePool(
        model.state_shapes(), 1, unplanned(CPU), context_tokens=4096, chunk_tokens=256, far_resident_layers=0
    )
    assert pool.far is not None
    streams: list[dict[int, list[torch.Tensor]]] = []
    fetch = pool.far.fetch

    def recorded(layer: int, slot: int, blocks: torch.Tensor, source: Any) -> Any:
        streams[-1].setdefault(layer, []).append(blocks)
        return fetch(layer, slot, blocks, source)

    pool.far.fetch = recorded  # type: ignore[method-assign]
    for file in sorted((ROOT / "agens_engine" / "assets" / "suites").glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8"))["cases"][:prompts]:
            prompt = template.render(case["messages"], case.get("tools"), enable_thinking=case.get("enable_thinking"))
            streams.append({})
            _answer(model, pool, prompt.token_ids, tokens)
    steps = max(1, pool.far.counts.verify_steps)
    found = {}
    for hot in caches:
        hits, misses = _played(streams, hot)
        rate = hits / (hits + misses) if hits + misses else 0.0
        found[str(hot)] = {"hit_rate": rate, "miss_bytes_per_token": misses * pool.far.block_bytes / steps}
    return found


def _answer(model: Volundr, pool: StatePool, prompt: Sequence[int], tokens: int) -> None:
    state = pool.create()
    for first in range(0, len(prompt), 256):
        hidden, _ = model(StepBatch([(state, prompt[first : first + 256])], CPU))
        state.commit(len(prompt[first : first + 256]))
    for _ in range(tokens):
        hidden, _ = model(StepBatch([(state, [int(model.logits(hidden[-1:]).argmax())])], CPU))
        state.commit(1)
    state.free()


def _played(streams: Sequence[dict[int, list[torch.Tensor]]], hot: int) -> tuple[int, int]:
    """(hits, misses) of one cache per sequence and layer."""
    looked_up = misses = 0
    for layers in streams:
        for steps in layers.values():
            cache = HotCache(torch.zeros(2, hot, 1, 1), torch.zeros(hot, TAG_WORDS, dtype=torch.int32))
            table = PageTable(PagePool(1, 4096), CPU)
            table.reserve(1)
            rows = PagedRows(torch.zeros(1, 4096, 1, 1), table)
            for blocks in steps:
                looked_up += blocks.shape[0]
                misses += cache.fetch(blocks, (rows, rows))[1]
    return looked_up - misses, misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=262_144)
    parser.add_argument("--windows", default="128,4096")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--hot", type=int, default=256, help="cached blocks of the host layer")
    parser.add_argument("--skip-reference", action="store_true", help="half the time, no comparison of logits")
    parser.add_argument("--skip-nano", action="store_true")
    parser.add_argument("--nano-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for window in () if args.nano_only else map(int, args.windows.split(",")):
            results.append(
                measure(Path(folder) / str(window), window, args.context, args.chunk, args.hot, not args.skip_reference)
            )
            r = results[-1]
            print(f"decode without scan, last against first: {r['decode_ratio_without_scan']:.2f}x", end="")
            if "rss_bytes_per_token" in r:
                documented = r["rows"][0]["bytes_per_token"]
                print(f"; RSS {r['rss_bytes_per_token']:.1f} B a planned token, documented {documented:.1f}", end="")
                print(f", {r['rss_growth_while_running_bytes'] / 2**20:+.1f} MiB from first to last context", end="")
            if "bit_identical" in r:
                print(f"; logits against all resident: {r['max_logit_difference']:.1e} apart", end="")
            print(f"; {r['seconds']:.0f} s", flush=True)
    nano = {} if args.skip_nano else nano_hit_rates(2, 64, NANO_CACHES)
    for size, found in nano.items():
        print(
            f"nano, {size:>4} cached blocks a layer: {100 * found['hit_rate']:.1f}% hits, "
            f"{found['miss_bytes_per_token']:,.0f} B a token over the bus"
        )
    environment = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    print(json.dumps({"long_context": results, "nano_hot_cache": nano, "environment": environment}))


if __name__ == "__main__":
    main()
