"""Repetition, presence and frequency penalties, evaluated per row.

Rows of a verify step differ in their history: row j is scored as if the drafts before it had been emitted. So the
counts are given per row, over a short list of ids instead of the whole vocabulary.

    repetition   prompt and output: a positive logit is divided by it, a negative one multiplied
    presence     output: subtracted once from every token that occurred
    frequency    output: subtracted once per occurrence
"""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    ids: torch.Tensor,
    seen: torch.Tensor,
    output_counts: torch.Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """Penalise the listed ids, in place.

    logits         [R, V] float
    ids            [n] int64, each at most once
    seen           [R, n] bool: the id occurs in the prompt or in the output of this row
    output_counts  [R, n] float: occurrences in the output of this row
    returns        logits; formulas of the OpenAI API (presence, frequency) and of CTRL (repetition, arXiv:1909.05858)
    """
    if ids.numel() == 0:
        return logits
    values = logits.index_select(1, ids)
    if repetition != 1.0:
        penalised = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen, penalised, values)
    if presence != 0.0 or frequency != 0.0:
        values = values - frequency * output_counts - presence * (output_counts > 0)
    return logits.index_copy_(1, ids, values.to(logits.dtype))
