"""Compares two models on the same text: how much a candidate's predictions differ from the reference's.

Either model runs layer by layer (layerwise.py); final streams of both are kept, logits only for CHUNK rows at a time.
Text is cut into windows that start from an empty state, so results do not depend on its length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from agens_engine.engine_build import read_stored
from agens_engine.errors import AgensError, CheckpointError, UsageError
from agens_engine.layerwise import Layerwise
from agens_engine.model.checkpoint import Checkpoint, open_checkpoint
from agens_engine.text.tokenizer import Tokenizer
from agens_quant.container import container_bits, stored_bits
from agens_quant.report import Quality, QualityMeter

WINDOW_TOKENS = 512
CHUNK_ROWS = 128
Progress = Callable[[str], None]


def read_text(file: str, flag: str) -> str:
    """A text file's content; raises UsageError naming `flag` when it is missing, empty or not text."""
    try:
        raw = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {file} is not UTF-8 text (byte {error.start}); give a plain text file") from error
    if "\0" in text:
        raise UsageError(f"{flag} {file} is not text (it holds NUL characters); give a plain text file")
    if not text.strip():
        raise UsageError(f"{flag} {file} is empty; give a text of at least a few hundred words")
    return text


def cut_windows(ids: list[int], window: int = WINDOW_TOKENS) -> list[Tensor]:
    """[B, window] whole windows and, behind them, [1, rest] where at least two tokens are left."""
    whole = len(ids) // window * window
    parts = [torch.tensor(ids[:whole]).view(-1, window)] if whole else []
    if len(ids) - whole >= 2:
        parts.append(torch.tensor([ids[whole:]]))
    return parts


@torch.no_grad()
def evaluate(reference: Path, candidate: Path, text_file: str, progress: Progress = lambda line: None) -> Quality:
    """Quality of the candidate folder on a text, tokenised by the reference's tokenizer.

    raises  UsageError for the text, CheckpointError for either model or two that do not share a vocabulary
    """
    text = read_text(text_file, "--text")
    ids = Tokenizer.load(reference).encode(text, allow_control=True)
    parts = cut_windows(ids)
    if not parts:
        raise UsageError(f"--text {text_file} has {len(ids)} tokens; at least 2 are needed")
    with open_checkpoint(reference) as a, open_checkpoint(candidate) as b:
        first, second = Layerwise(a), Layerwise(b)
        if first.config.vocab_size != second.config.vocab_size:
            raise CheckpointError(
                f"{reference} has a vocabulary of {first.config.vocab_size}, {candidate} of {second.config.vocab_size}"
            )
        for part in parts:
            first.check_ids(part)
        meter = QualityMeter()
        try:
            for part in parts:
                progress(f"reference, {part.numel()} tokens")
                ours = first.final_streams(part)
                progress(f"candidate, {part.numel()} tokens")
                theirs = second.final_streams(part)
                _measure(meter, first, second, part, ours, theirs)
            return meter.result()
        except ValueError as error:
            raise AgensError(f"{reference} and {candidate} cannot be compared: {error}") from error


def _measure(
    meter: QualityMeter, first: Layerwise, second: Layerwise, ids: Tensor, ours: Tensor, theirs: Tensor
) -> None:
    length = ids.shape[1]
    with first.head() as reference, second.head() as candidate:
        for row, sequence in enumerate(ids):
            for start in range(0, length, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, length)
                rows = slice(row * length + start, row * length + stop)
                meter.add(reference.logits(ours[rows]), candidate.logits(theirs[rows]), sequence[start + 1 : stop + 1])


def bits_per_weight(checkpoint: Checkpoint) -> float:
    """Mean bits of the weights of all linears inside the layers, with scales and tables; containers by the codes they
    really use, others by their type. Embedding, output matrix, Engram tables and norms are not counted."""
    bits = weights = 0
    for module in linear_modules(checkpoint):
        entry = checkpoint.entry(f"{module}.weight")
        n, k = entry.shape
        weights += n * k
        if entry.layout is None:
            bits += 8 * entry.nbytes
            continue
        packed = read_stored(entry.parts["weight_packed"])
        own = stored_bits(n, k, container_bits(entry.layout, packed), 0)
        bits += own + sum(8 * p.nbytes for s, p in entry.parts.items() if s not in ("weight_packed", "weight_shape"))
    return bits / weights


def linear_modules(checkpoint: Checkpoint) -> list[str]:
    """Module names of the linears inside the layers."""
    whole = Layerwise(checkpoint)
    return [name for index in range(whole.config.num_layers) for name in whole.linears(index)]
