"""The DFlash2 selector: walk the slots of a block, choosing one candidate per slot given the token before it.

Math    score(u, c) = unary[c] + < predecessor[u] * gate, successor[c] >;  greedy: arg max, the first of equals;
        sampled: q = softmax(score / T), the chosen index is the number of cumulative sums of q at or below the uniform
Layout  ids [B, S, k] candidates; unary [B, S, k] fp32; gate [B, S, R]; codebooks [V, R]
Test    tests/parity/test_golden_drafters.py, tests/unit/model/test_drafters_walk.py
Source  spec drafters.md A.5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Codebooks:
    """The selector's two tables, [V, R] each."""

    predecessor: torch.Tensor
    successor: torch.Tensor


def pair_scores(
    unary: torch.Tensor, gate: torch.Tensor, predecessor: torch.Tensor, successors: torch.Tensor
) -> torch.Tensor:
    """unary [..., k], gate and predecessor [..., R], successors [..., k, R] -> scores [..., k]."""
    return unary + torch.einsum("...r,...kr->...k", predecessor * gate, successors)


def choose(
    scores: torch.Tensor, temperature: torch.Tensor | None, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one candidate per row.

    scores        [B, k]
    temperature   [B] float32; 0 is greedy, other values are raised to at least 1e-5; None: all greedy
    uniforms      [B] float64 in [0, 1); not read by greedy rows
    returns       index [B] int64 and q [B, k] float32, the distribution the index was drawn from (one-hot when greedy)
    """
    best = scores.argmax(-1)
    one_hot = torch.zeros_like(scores).scatter_(-1, best.unsqueeze(-1), 1.0)
    if temperature is None:
        return best, one_hot
    greedy = temperature <= 0
    q = (scores / temperature.clamp_min(MIN_TEMPERATURE).unsqueeze(-1)).softmax(-1)
    cumulative = q.double().cumsum(-1)
    # the rounded sum of q is not quite 1, and a candidate of probability 0 must never be drawn
    total = cumulative[:, -1]
    target = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = (cumulative <= target.unsqueeze(-1)).sum(-1).clamp_max(scores.shape[-1] - 1)
    return torch.where(greedy, best, drawn), torch.where(greedy.unsqueeze(-1), one_hot, q)


def walk(
    ids: torch.Tensor,
    unary: torch.Tensor,
    gate: torch.Tensor | None,
    codebooks: Codebooks | None,
    *,
    predecessor: torch.Tensor,
    first_slot: torch.Tensor,
    temperature: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk slots first_slot .. S - 1 of every row.

    gate, codebooks   None: no selector, the score is unary alone
    predecessor       [B] int64, the token before the row's first slot
    first_slot        [B] int64, 0 <= first_slot <= S
    temperature       [B] float32, see choose
    uniforms          [B, S] float64, one per slot
    returns           tokens [B, S] int64, -1 where not walked; q [B, S, k] float32, 0 where not walked; ok [B] bool,
                      False where a visited score was NaN or infinite: the tokens of that row are then all -1
    """
    batch, num_slots, _ = ids.shape
    tokens = torch.full((batch, num_slots), -1, dtype=torch.long, device=ids.device)
    q = torch.zeros_like(unary)
    ok = torch.ones(batch, dtype=torch.bool, device=ids.device)
    for slot in range(num_slots):
        active = first_slot <= slot
        scores = unary[:, slot]
        if gate is not None and codebooks is not None:
            successors = codebooks.successor[ids[:, slot]]
            scores = pair_scores(scores, gate[:, slot], codebooks.predecessor[predecessor], successors)
        ok &= ~active | scores.isfinite().all(-1)
        index, row_q = choose(scores, temperature, uniforms[:, slot])
        token = ids[:, slot].gather(1, index.unsqueeze(-1)).squeeze(-1)
        tokens[:, slot] = torch.where(active, token, tokens[:, slot])
        q[:, slot] = torch.where(active.unsqueeze(-1), row_q, q[:, slot])
        predecessor = torch.where(active, token, predecessor)
    return tokens.masked_fill(~ok.unsqueeze(-1), -1), q, ok
