"""Writes packed training data: token ids, a flag per token that the assistant generates, and document offsets.

    python scripts/nano/dataset.py --seed 1 --tokens 16000000 --out FILE.npz [--split heldout] [--workers 2]

File (np.savez)  ids      [N] uint16
                 weights  [N] uint8, 1 where the assistant generates the token (from right after the generation
                          prompt through <|agens_end|>), else 0
                 offsets  [D + 1] int64; document d is ids[offsets[d]:offsets[d + 1]], never longer than 512
                 kinds    [D] uint8, index into kind_names
                 kind_names  [K] str
The result depends on seed, tokens, split and workers only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.nano.corpus import MIX, Mixer, make_document
from scripts.nano.document import Document
from scripts.nano.lexicon import ASSET_DIR, Sampler
from scripts.nano.rendering import render_text

MAX_DOCUMENT_TOKENS = 512
BATCH_DOCUMENTS = 512
Shard = dict[str, np.ndarray]


@cache
def load_tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(ASSET_DIR / "tokenizer.json"))


def render(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """Token ids of the whole document and 1.0 for each token that the assistant generates, 0.0 for the others."""
    ids = tokenizer.encode(render_text(document), add_special_tokens=False).ids
    return ids, [float(flag) for flag in generated_flags(ids, tokenizer, document.enable_thinking)]


def generated_flags(ids: list[int], tokenizer: Tokenizer, thinking: bool) -> bytearray:
    """1 for tokens between a generation prompt and the end of that turn, its end token included."""
    header = _header_ids(tokenizer)
    closed = int(tokenizer.token_to_id("<|agens_end|>") or 0)
    skip = len(header) if thinking else len(header) + 1  # thinking off: the prompt also closes the empty block
    flags = bytearray(len(ids))
    at = 0
    while True:
        try:
            at = ids.index(header[0], at)
        except ValueError:
            return flags
        if ids[at : at + len(header)] == header:
            end = ids.index(closed, at)
            begin = at + skip
            flags[begin : end + 1] = b"\x01" * (end + 1 - begin)
            at = end
        at += 1


@cache
def _header_ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode("<|agens_start|>assistant\n<|think|>", add_special_tokens=False).ids)


def build(seed: int, num_tokens: int, split: str = "train", mix: dict[str, float] | None = None) -> Shard:
    """At least num_tokens tokens of whole documents in the corpus mix, as the arrays of the module docstring."""
    sampler = Sampler(seed, split)
    tokenizer = load_tokenizer()
    mixer = Mixer(mix)
    names = list(MIX)
    mean_tokens = dict.fromkeys(names, 120.0)  # running estimate; exact counts follow after each batch
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    lengths: list[int] = []
    kinds: list[int] = []
    total = 0
    while total < num_tokens:
        planned: list[Document] = []
        guess = Mixer(mix)
        guess.tokens = dict(mixer.tokens)
        for _ in range(BATCH_DOCUMENTS):
            kind = guess.next_kind()
            guess.count(kind, int(mean_tokens[kind]))
            planned.append(make_document(sampler, kind))
        encoded = tokenizer.encode_batch_fast([render_text(d) for d in planned], add_special_tokens=False)
        for document, encoding in zip(planned, encoded, strict=True):
            row = encoding.ids
            if len(row) > MAX_DOCUMENT_TOKENS:
                continue
            if total >= num_tokens:
                break
            ids.append(np.array(row, dtype=np.uint16))
            weights.append(np.frombuffer(generated_flags(row, tokenizer, document.enable_thinking), dtype=np.uint8))
            lengths.append(len(row))
            kinds.append(names.index(document.kind))
            mixer.count(document.kind, len(row))
            mean_tokens[document.kind] += 0.01 * (len(row) - mean_tokens[document.kind])
            total += len(row)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return {
        "ids": np.concatenate(ids),
        "weights": np.concatenate(weights),
        "offsets": offsets,
        "kinds": np.array(kinds, dtype=np.uint8),
        "kind_names": np.array(names),
    }


def join(shards: list[Shard]) -> Shard:
    """Shards one after the other as one."""
    joined = {key: np.concatenate([shard[key] for shard in shards]) for key in ("ids", "weights", "kinds")}
    starts = np.cumsum([0] + [len(shard["ids"]) for shard in shards])
    pieces = [shard["offsets"][:-1] + start for shard, start in zip(shards, starts[:-1], strict=True)]
    joined["offsets"] = np.concatenate([*pieces, starts[-1:]]).astype(np.int64)
    joined["kind_names"] = shards[0]["kind_names"]
    return joined


def table(shard: Shard) -> str:
    """Documents, tokens, share, mean length and generated share per kind."""
    lengths = np.diff(shard["offsets"])
    generated = np.add.reduceat(shard["weights"].astype(np.int64), shard["offsets"][:-1])
    rows = [f"{'kind':<12}{'documents':>10}{'tokens':>12}{'share %':>9}{'mean':>7}{'max':>6}{'generated %':>13}"]
    for number, name in [*enumerate(shard["kind_names"]), (None, "all")]:
        mask = slice(None) if number is None else shard["kinds"] == number
        size = lengths[mask]
        if size.sum():
            rows.append(
                f"{name:<12}{len(size):>10}{size.sum():>12}{100 * size.sum() / lengths.sum():>9.1f}{size.mean():>7.1f}"
                f"{size.max():>6}{100 * generated[mask].sum() / size.sum():>13.1f}"
            )
    return "\n".join(rows)


def parse_mix(text: str | None) -> dict[str, float] | None:
    """`tools=45,chat=5` as shares; every kind must be named, since a kind that is left out is soon forgotten."""
    if text is None:
        return None
    mix = {name: float(share) for name, _, share in (part.partition("=") for part in text.split(","))}
    if mix.keys() != MIX.keys() or min(mix.values()) <= 0:
        raise SystemExit(f"--mix must give a positive share to each of {', '.join(MIX)}")
    return mix


def main() -> None:
    parser = argparse.ArgumentParser(description="Write packed training data for nano.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_000_000, help="how many tokens to write")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--workers", type=int, default=2, help="processes; the result depends on their number")
    parser.add_argument("--mix", help="percent of tokens by kind, tools=45,chat=5,... [default: corpus.MIX]")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    share = -(-args.tokens // args.workers)
    mix = parse_mix(args.mix)
    jobs = [(args.seed * 1000 + worker, share, args.split, mix) for worker in range(args.workers)]
    if args.workers == 1:
        shard = build(*jobs[0])
    else:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            shard = join(pool.starmap(build, jobs))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, **shard)  # type: ignore[arg-type]
    print(table(shard))
    print(f"{len(shard['ids'])} tokens in {time.perf_counter() - began:.0f} s -> {args.out}")


if __name__ == "__main__":
    main()
