"""`agens evaluate REF CANDIDATE --text FILE`: what a smaller model costs in quality."""

from __future__ import annotations

import json
import sys
from typing import Any

from agens_engine.evaluation import bits_per_weight, evaluate
from agens_engine.model.checkpoint import open_checkpoint
from agens_engine.model_files import resolve_model


def run_evaluate(reference: str, candidate: str, text: str, *, json_out: bool = False) -> dict[str, Any]:
    """Print and return mean_kl, p99_kl, top1_agreement, perplexity_ratio, tokens and bits_per_weight.

    raises  UsageError for the text file, CheckpointError for a model
    """
    first, second = resolve_model(reference), resolve_model(candidate)
    quality = evaluate(first, second, text, lambda line: print(line, file=sys.stderr))
    with open_checkpoint(second) as checkpoint:
        bits = bits_per_weight(checkpoint)
    report: dict[str, Any] = {
        "reference": reference,
        "candidate": candidate,
        "text": text,
        **quality.as_dict(),
        "bits_per_weight": round(bits, 4),
    }
    if json_out:
        print(json.dumps(report))
    else:
        print(f"{candidate} against {reference} on {text}, {quality.tokens} tokens")
        print(f"  bits per weight     {bits:.3f}   (linears inside the layers, scales and tables included)")
        print(f"  mean KL             {quality.mean_kl:.5f}   99th percentile {quality.p99_kl:.4f}")
        print(f"  top-1 agreement     {100 * quality.top1_agreement:.2f} %")
        print(f"  perplexity ratio    {quality.perplexity_ratio:.4f}   (reference {quality.reference_perplexity:.3f})")
    return report
