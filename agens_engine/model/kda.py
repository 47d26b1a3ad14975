"""The KDA mixer: gated delta-rule linear attention with a short convolution (spec volundr-model.md section 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.memory.state import KdaRows
from agens_engine.model.batch import Batch, Group, scatter
from agens_engine.model.config import KdaConfig
from agens_engine.model.layers import PlainNorm
from agens_kernels.ref import kda as ref
from agens_kernels.ref.norm import l2_normalise


class KdaMixer(nn.Module):
    """`kda_index` counts KDA layers from 0 and names this layer's slot in the recurrent state."""

    def __init__(self, hidden: int, config: KdaConfig, kda_index: int, eps: float) -> None:
        super().__init__()
        c = config
        self.config, self.kda_index = c, kda_index
        gates = c.num_value_heads * c.key_head_dim
        self.in_proj_qkv = nn.Linear(hidden, c.conv_channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, c.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, c.num_value_heads, bias=False)
        self.f_down = nn.Linear(hidden, c.gate_rank, bias=False)
        self.f_up = nn.Linear(c.gate_rank, gates, bias=False)
        self.conv1d = nn.Conv1d(c.conv_channels, c.conv_channels, c.conv_kernel, groups=c.conv_channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(c.num_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(gates))
        self.norm = PlainNorm(c.value_head_dim, eps)
        self.out_proj = nn.Linear(c.value_dim, hidden, bias=False)

    def forward(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        """h [T, C] -> [T, C]. Rows of up to NUM_VERIFY_ROWS run as a recurrence, longer ones in chunks."""
        c = self.config
        u = self.in_proj_qkv(h)
        beta = torch.sigmoid(self.in_proj_b(h))
        raw = self.f_up(self.f_down(h)).unflatten(-1, (c.num_value_heads, c.key_head_dim))
        g = ref.log_decay(raw, self.A_log, self.dt_bias)
        mixed = scatter(((grp, self._mix(batch, grp, u, g, beta)) for grp in batch.recurrent_groups), h.shape[0])
        gate = F.silu(self.in_proj_z(h)).view_as(mixed)
        return self.out_proj((self.norm(mixed) * gate).flatten(-2))

    def _mix(self, batch: Batch, group: Group, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Rows of one group -> [B, n, Hv, Dv]."""
        c = self.config
        u, g, beta = group.take(u), group.take(g), group.take(beta)
        tail, state = batch.recurrent(self.kda_index, group)
        s = ref.causal_conv(u, tail, self.conv1d.weight.squeeze(1))
        q, k, v = s.split((c.key_dim, c.key_dim, c.value_dim), -1)
        repeat = c.num_value_heads // c.num_key_heads
        q = l2_normalise(q.unflatten(-1, (c.num_key_heads, -1))) * c.key_head_dim**-0.5
        k = l2_normalise(k.unflatten(-1, (c.num_key_heads, -1)))
        q, k = q.repeat_interleave(repeat, -2), k.repeat_interleave(repeat, -2)
        v = v.unflatten(-1, (c.num_value_heads, -1))
        form = ref.recurrent if group.length <= NUM_VERIFY_ROWS else ref.chunked
        out, final = form(q, k, v, g, beta, state)
        batch.keep_recurrent(self.kda_index, group, KdaRows(u, k, v, g, beta, final))
        return out
