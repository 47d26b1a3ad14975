"""First rule: ids that no text maps to are never generated (spec serving.md sections 1 and 6).

The embedding has more rows than the tokenizer has entries; the spare rows get -inf before every other rule, so neither
a logit bias nor a penalty can bring them back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class UnusedTokens:
    """The ids to suppress, one object for the whole model.

    A run of ids up to the end of the vocabulary (the usual case) is kept as a slice, anything else as an index tensor.
    """

    def __init__(self, vocab_size: int, ids: Iterable[int] = ()) -> None:
        wanted = sorted(set(ids))
        if wanted and not (wanted[0] >= 0 and wanted[-1] < vocab_size):
            raise ValueError(f"unused ids must lie in 0..{vocab_size - 1}, got {wanted[0]}..{wanted[-1]}")
        if len(wanted) == vocab_size:
            raise ValueError("every id of the vocabulary is listed as unused")
        self.vocab_size = vocab_size
        self.ids = tuple(wanted)
        self._tail_start = wanted[0] if wanted and wanted[0] == vocab_size - len(wanted) else None
        self._index = torch.tensor(wanted, dtype=torch.int64)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Write -inf over the unused ids of logits [R, V], in place."""
        if self._tail_start is not None:
            logits[:, self._tail_start :] = -torch.inf
        elif self.ids:
            if self._index.device != logits.device:
                self._index = self._index.to(logits.device)
            logits.index_fill_(1, self._index, -torch.inf)
        return logits
