"""BCSA: a window of recent positions plus the best far blocks, chosen by a small indexer (spec section 7.3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from agens_engine.memory.kv import WindowView
from agens_engine.model.attention import GatedAttention, Rope
from agens_engine.model.batch import Batch, Group, scatter
from agens_engine.model.config import ModelConfig
from agens_engine.model.layers import GemmaNorm
from agens_kernels.ref import attention as ref

# called with (query [B, T, H, D], index query [B, T, Di], the view); a trainer teaches the indexer through it
IndexerHook = Callable[[Group, torch.Tensor, torch.Tensor, WindowView], None]
SelectionHook = Callable[[torch.Tensor, torch.Tensor], None]


class BcsaAttention(GatedAttention):
    """Softmax over W local positions and the topk best visible far blocks of C positions each."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.bcsa is not None
        self.bcsa = b = config.bcsa
        self.idx_q = nn.Linear(config.hidden_size, b.indexer_heads * b.indexer_dim, bias=False)
        self.idx_k = nn.Linear(config.hidden_size, b.indexer_dim, bias=False)
        self.idx_norm = GemmaNorm(b.indexer_dim, config.rms_eps)
        self.on_indexer: IndexerHook | None = None
        self.on_selection: SelectionHook | None = None

    def forward(self, h: torch.Tensor, batch: Batch, rope: Rope) -> torch.Tensor:
        """h [T, C] -> [T, C]."""
        b = self.bcsa
        q, gate, k, v = self._project(h, rope)
        index_query, index_key = self.index(h)
        parts = []
        for unit in batch.attention_units:
            view = batch.extend_window(self.layer, unit, unit.take(k), unit.take(v), unit.take(index_key))
            query, iq = unit.take(q), unit.take(index_query)
            if self.on_indexer is not None:
                self.on_indexer(unit, query, iq, view)
            attended = ref.window_far_attention(
                query,
                view.k,
                view.v,
                first=unit.first,
                key_start=view.key_start,
                far=view.far,
                index_query=iq,
                window=b.window,
                compress=b.compress,
                topk=b.topk,
                on_selection=self.on_selection,
            )
            parts.append((unit, attended))
        return self._output(scatter(parts, h.shape[0]), gate)

    def index(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's query (its heads averaged, scaled: scores are linear in them) and key, both [T, Di]."""
        b = self.bcsa
        heads = self.idx_norm(self.idx_q(h).unflatten(-1, (b.indexer_heads, b.indexer_dim)))
        return heads.mean(-2) * b.indexer_dim**-0.5, self.idx_norm(self.idx_k(h))
