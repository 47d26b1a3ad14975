"""What drafters borrow from the target: its embedding and its output head. Drafters store neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agens_engine.model.volundr import Volundr


@dataclass(frozen=True)
class TargetEnds:
    """The target's two ends.

    embed       ids [...] int64 -> [..., C]
    head        hidden [R, C] -> [R, V] float32
    head_rows   ids [M] int64 -> the head's rows for them, [M, C]
    num_usable  ids at or above it are never drafted (the target cannot emit them)
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    head_rows: Callable[[torch.Tensor], torch.Tensor]
    num_usable: int

    @classmethod
    def of(cls, model: Volundr, num_usable: int | None = None) -> TargetEnds:
        """num_usable: None for the whole vocabulary."""
        return cls(
            embed=model.embed,
            head=model.logits,
            head_rows=model.head_rows,
            num_usable=model.config.vocab_size if num_usable is None else num_usable,
        )
