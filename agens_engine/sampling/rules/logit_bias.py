"""Logit bias: a number added to the logits of chosen ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agens_engine.errors import RequestError


def check_logit_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Raise RequestError for an id outside the vocabulary."""
    for token_id in bias:
        if token_id >= vocab_size:
            raise RequestError(
                f"logit_bias names token {token_id}, but token ids end at {vocab_size - 1}; remove that entry",
                param="logit_bias",
            )


def apply_logit_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add values [n] to logits [R, V] at distinct ids [n], in place; a suppressed token stays suppressed."""
    return logits.index_add_(1, ids, values.to(logits.dtype).expand(logits.shape[0], -1))
