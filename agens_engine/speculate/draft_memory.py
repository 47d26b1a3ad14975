"""K/V storage of a drafter for every sequence of the engine, claimed once; a request holds one slot of it."""

from __future__ import annotations

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.memory.state import Claim
from agens_engine.model.draft_kv import rows_for


class DraftMemory:
    """Storage of all layers, given out by slot.

    windows     one entry per layer: positions a row sees, or None for all
    temporary   most rows of a block or chain that are written and then dropped
    raises      PlanError when the plan's line does not hold it
    """

    def __init__(
        self,
        claim: Claim,
        line: str,
        *,
        num_slots: int,
        context_tokens: int,
        windows: tuple[int | None, ...],
        temporary: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        block = max(temporary, NUM_VERIFY_ROWS)
        most = context_tokens + block
        rows = [most if window is None else min(rows_for(window, block), most) for window in windows]
        self._layers = [claim(line, (num_slots, 2, n, kv_heads, head_dim)) for n in rows]
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}

    def take(self, request_id: str) -> list[torch.Tensor]:
        """One [2, n, Hkv, D] per layer for this request; what an earlier request left in it is never read."""
        self._slots[request_id] = slot = self._free.pop()
        return [layer[slot] for layer in self._layers]

    def give_back(self, request_id: str) -> None:
        """Unknown requests are ignored."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._free.append(slot)

    def check(self) -> None:
        """Assert that no slot is lost or shared."""
        held = [*self._slots.values(), *self._free]
        assert sorted(held) == list(range(len(held))), f"drafter slots lost or shared: {sorted(held)}"
