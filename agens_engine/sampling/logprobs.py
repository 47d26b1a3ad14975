"""What the `logprobs` field reports.

The distribution is the softmax of a row after the unused-token mask, penalties, logit bias and row rules, and before
temperature, top-k, top-p and min-p. Temperature 0 thus still gives finite, useful numbers, and every alternative is
comparable. A row is the same with and without drafts, and so are its log-probabilities (cases H3, H5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agens_engine.core import TokenLogprob


def token_logprobs(scores: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token per row, natural log.

    scores     [R, V] float, -inf where a token is ruled out; row j is the one token j was chosen from
    token_ids  at most R tokens; further rows are ignored
    num_top    how many alternatives to list, best first, equal ones by lowest id; ruled-out tokens are not listed
    """
    if not token_ids:
        return []
    logprobs = torch.log_softmax(scores[: len(token_ids)].float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])[:, 0].tolist()
    tops = _top_alternatives(logprobs, num_top)
    return [TokenLogprob(t, lp, top) for t, lp, top in zip(token_ids, chosen, tops, strict=True)]


def _top_alternatives(logprobs: torch.Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    num_top = min(num_top, logprobs.shape[-1])
    if num_top == 0:
        return [()] * logprobs.shape[0]
    lowest = logprobs.topk(num_top, dim=-1).values[:, -1:]
    rows = []
    # topk may pick any of several equal values at its end; collect them all and take the lowest ids
    for row, enough in zip(logprobs, logprobs >= lowest, strict=True):
        ids = enough.nonzero()[:, 0]
        pairs = zip(ids.tolist(), row[ids].tolist(), strict=True)
        best = sorted((p for p in pairs if p[1] > -torch.inf), key=lambda p: (-p[1], p[0]))
        rows.append(tuple(best[:num_top]))
    return rows
