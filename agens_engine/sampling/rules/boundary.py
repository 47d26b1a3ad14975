"""The cut that top-k and top-p share: keep the largest values of a row, an exact number of them."""

from __future__ import annotations

import torch


def keep_largest(logits: torch.Tensor, lowest_kept: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """Set everything below the cut to -inf, in place.

    logits       [R, V]
    lowest_kept  [R, 1], the smallest value that stays
    num_kept     [R, 1] int, how many stay; among equal values at the cut the lowest ids stay, as in arg max
    """
    logits.masked_fill_(logits < lowest_kept, -torch.inf)
    surplus = (logits > -torch.inf).sum(dim=-1, keepdim=True) - num_kept
    if bool((surplus > 0).any()):
        at_cut = (logits == lowest_kept) & (logits > -torch.inf)
        num_ties_kept = at_cut.sum(dim=-1, keepdim=True) - surplus
        logits.masked_fill_(at_cut & (at_cut.cumsum(dim=-1) > num_ties_kept), -torch.inf)
    return logits
