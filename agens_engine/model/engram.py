"""Engram: hashed n-gram memory added to a layer's output (spec volundr-model.md section 8)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from agens_engine.memory.host_tables import gather_rows
from agens_engine.model.batch import Batch, scatter
from agens_engine.model.config import EngramConfig
from agens_engine.model.layers import PlainNorm
from agens_kernels.ref import engram as ref


class Table(nn.Module):
    """One hashed table, [rows, dim], in the type it is stored in."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, dim))


class Engram(nn.Module):
    def __init__(self, hidden: int, config: EngramConfig, eps: float) -> None:
        super().__init__()
        total = config.dim * len(config.orders)
        self.tables = nn.ModuleList(Table(config.rows, config.dim) for _ in config.orders)
        self.norm = PlainNorm(total, eps)
        self.gate = nn.Linear(hidden, 1)
        self.value = nn.Linear(total, hidden, bias=False)

    def forward(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The addition to y [T, C]; rows [orders, T] int64 from engram_rows."""
        weights = (cast(Table, table).weight for table in self.tables)
        parts = [gather_rows(weight, rows[j], self.norm.weight) for j, weight in enumerate(weights)]
        gate = torch.sigmoid(self.gate(y))
        return gate * self.value(self.norm(torch.cat(parts, -1)))


def engram_rows(batch: Batch, config: EngramConfig) -> torch.Tensor:
    """Table rows of every row of the step, [orders, T] int64; the same for every Engram layer."""
    parts = []
    for group in batch.recurrent_groups:
        rows = ref.rows(group.take(batch.ids), batch.previous_ids(group), config.orders, config.rows)
        parts.append((group, rows.permute(1, 2, 0)))
    return scatter(parts, batch.ids.shape[0]).T
