"""`agens quantize SRC DST --bits B`: make a low-bit Engine build of a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from agens_engine.errors import UsageError
from agens_engine.evaluation import WINDOW_TOKENS, read_text
from agens_engine.model_files import NANO, resolve_model
from agens_engine.quantize import QuantizeOptions, QuantizeResult, quantize
from agens_engine.text.tokenizer import Tokenizer
from agens_quant.format import GROUP_SIZES

MAX_CALIBRATION_TOKENS = 32_768
MIN_CALIBRATION_TOKENS = 64
EMBEDDED_CALIBRATION = "calibration.txt"


def run_quantize(
    source: str,
    target: str,
    bits: float,
    *,
    calibration: str | None = None,
    group_size: int = 128,
    keep: Sequence[str] = (),
    seed: int = 0,
    json_out: bool = False,
) -> QuantizeResult:
    """Quantise `source` to the new folder `target` and print what came out.

    calibration  a text file; nano brings its own
    raises       UsageError for flags and files, CheckpointError for the source, AgensError for a full disk
    """
    if group_size not in GROUP_SIZES:
        raise UsageError(f"--group must be one of {', '.join(map(str, GROUP_SIZES))}, not {group_size}")
    folder = resolve_model(source)
    text = read_text(_calibration_file(source, folder, calibration), "--calibration")
    ids = Tokenizer.load(folder).encode(text, allow_control=True)
    windows = calibration_windows(ids, calibration or EMBEDDED_CALIBRATION)
    options = QuantizeOptions(bits=bits, group_size=group_size, keep=tuple(keep), seed=seed)
    result = quantize(folder, Path(target), options, windows, lambda line: print(line, file=sys.stderr))
    if json_out:
        print(json.dumps(result.as_dict()))
    else:
        counts = ", ".join(f"{n} at {b} bits" for b, n in result.modules_by_bits.items() if n)
        print(f"{target}: {result.bits_per_weight:.3f} bits per weight (scales and tables included); linears: {counts}")
        print(
            f"estimated mean KL {result.estimated_kl:.4f}; measure it with: agens evaluate {source} {target} --text F"
        )
    return result


def calibration_windows(ids: list[int], file: str) -> torch.Tensor:
    """[B, T] token ids: whole windows, spread evenly over a text that is longer than needed."""
    if len(ids) < MIN_CALIBRATION_TOKENS:
        raise UsageError(f"--calibration {file} has {len(ids)} tokens; at least {MIN_CALIBRATION_TOKENS} are needed")
    window = min(WINDOW_TOKENS, len(ids))
    count = len(ids) // window
    whole = torch.tensor(ids[: count * window]).view(count, window)
    wanted = MAX_CALIBRATION_TOKENS // window
    if count <= wanted:
        return whole
    return whole[torch.arange(wanted) * count // wanted].contiguous()


def _calibration_file(source: str, folder: Path, calibration: str | None) -> str:
    if calibration is not None:
        return calibration
    embedded = folder / EMBEDDED_CALIBRATION
    if embedded.is_file():
        return str(embedded)
    raise UsageError(
        f"--calibration is needed: {source} brings no calibration text (only {NANO} does); give a text file like what "
        "the model will be used for, a few hundred kilobytes"
    )
