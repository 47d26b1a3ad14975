"""Top-p (nucleus): keep the smallest set of most likely tokens whose probability reaches p (arXiv:1904.09751)."""

from __future__ import annotations

import torch

from agens_engine.sampling.rules.boundary import keep_largest

FIRST_CANDIDATES = 256  # sorting this many is enough for most rows, and sorting a whole vocabulary is slow


def apply_top_p(logits: torch.Tensor, top_p: float, num_candidates: int = FIRST_CANDIDATES) -> torch.Tensor:
    """Cut each row of logits [R, V] to its nucleus, in place; at least one token stays. top_p = 1 keeps all.

    num_candidates   how many of the largest logits to sort at first; rows whose nucleus is larger are sorted whole, so
                     the result does not depend on it (after top-k, the k is a good value)
    """
    if top_p >= 1.0:
        return logits
    vocab_size = logits.shape[-1]
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    largest = logits.topk(min(max(num_candidates, 1), vocab_size), dim=-1, sorted=True).values  # [R, n], descending
    mass = (largest - log_total).exp().cumsum(dim=-1, dtype=torch.float64)
    num_kept = (mass < top_p).sum(dim=-1, keepdim=True) + 1
    num_kept.clamp_(max=vocab_size)
    lowest_kept = largest.gather(1, num_kept.clamp(max=largest.shape[-1]) - 1)
    short = (num_kept > largest.shape[-1])[:, 0].nonzero()[:, 0]
    if short.numel():
        ordered = logits[short].sort(dim=-1, descending=True).values
        mass = (ordered - log_total[short]).exp().cumsum(dim=-1, dtype=torch.float64)
        num_kept[short] = ((mass < top_p).sum(dim=-1, keepdim=True) + 1).clamp_(max=vocab_size)
        lowest_kept[short] = ordered.gather(1, num_kept[short] - 1)
    return keep_largest(logits, lowest_kept, num_kept)
