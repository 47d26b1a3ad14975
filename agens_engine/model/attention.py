"""Gated softmax attention, dense (spec volundr-model.md 7.1, 7.2); bcsa.py adds the window and the far blocks."""

from __future__ import annotations

import torch
from torch import nn

from agens_engine.model.batch import Batch, scatter
from agens_engine.model.config import ModelConfig
from agens_engine.model.layers import GemmaNorm
from agens_kernels.ref import attention as ref

Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin [T, rotary_dims / 2]


class GatedAttention(nn.Module):
    """Causal attention over all positions with a sigmoid output gate per head."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer, self.num_heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = GemmaNorm(c.head_dim, c.rms_eps)
        self.k_norm = GemmaNorm(c.head_dim, c.rms_eps)

    def forward(self, h: torch.Tensor, batch: Batch, rope: Rope) -> torch.Tensor:
        """h [T, C] -> [T, C]."""
        q, gate, k, v = self._project(h, rope)
        parts = []
        for unit in batch.attention_units:
            read = batch.extend_dense(self.layer, unit, unit.take(k), unit.take(v))
            parts.append((unit, ref.causal_attention_over(unit.take(q), read, first=unit.first)))
        return self._output(scatter(parts, h.shape[0]), gate)

    def _project(self, h: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, gate [T, H, D] and k, v [T, Hkv, D]; per head the q_proj rows are query first, gate second."""
        q, gate = self.q_proj(h).unflatten(-1, (self.num_heads, 2, self.head_dim)).unbind(-2)
        q = ref.apply_rope(self.q_norm(q), *rope)
        k = ref.apply_rope(self.k_norm(self.k_proj(h).unflatten(-1, (self.kv_heads, -1))), *rope)
        v = self.v_proj(h).unflatten(-1, (self.kv_heads, -1))
        return q, gate, k, v

    def _output(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj((attended * torch.sigmoid(gate)).flatten(-2))
