"""The layer stack: a table of mixers over one block recipe (spec volundr-model.md section 4).

    streams -> mix -> norm -> mixer -> norm -> MLP -> optional Engram -> combine -> streams

One forward serves prefill chunks, decode and verify rows; what they read and leave behind is the Batch's business.
Parameter names are the checkpoint's names after prefix normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from agens_engine.memory.host_tables import gather_rows
from agens_engine.memory.state import StateShapes
from agens_engine.model.attention import GatedAttention, Rope
from agens_engine.model.batch import Batch, FreshBatch, FreshShapes
from agens_engine.model.bcsa import BcsaAttention
from agens_engine.model.config import ModelConfig
from agens_engine.model.engram import Engram, engram_rows
from agens_engine.model.kda import KdaMixer
from agens_engine.model.layers import GemmaNorm, Mlp
from agens_engine.model.lowbit_linear import LowbitLinear
from agens_engine.model.mhc import StreamMixer
from agens_kernels.ref.attention import rope_tables

LayerHook = Callable[[int, torch.Tensor], None]


class Layer(nn.Module):
    """Mixer, MLP and optional Engram; returns what the layer adds to its input."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        c, kind = config, config.mixers[index]
        self.input_layernorm = GemmaNorm(c.hidden_size, c.rms_eps)
        self.post_attention_layernorm = GemmaNorm(c.hidden_size, c.rms_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        if kind == "kda":
            assert c.kda is not None
            self.linear_attn = KdaMixer(c.hidden_size, c.kda, c.layers_of("kda").index(index), c.rms_eps)
        else:
            self.self_attn = BcsaAttention(c, index) if kind == "bcsa" else GatedAttention(c, index)
        if c.engram is not None and index in c.engram.layers:
            self.engram = Engram(c.hidden_size, c.engram, c.rms_eps)
        self.is_kda, self.has_engram = kind == "kda", hasattr(self, "engram")

    def forward(self, x: torch.Tensor, batch: Batch, rope: Rope, rows: torch.Tensor | None) -> torch.Tensor:
        h = self.input_layernorm(x)
        mixed = self.linear_attn(h, batch) if self.is_kda else self.self_attn(h, batch, rope)
        y = x + mixed
        delta = mixed + (m := self.mlp(self.post_attention_layernorm(y)))
        if self.has_engram:
            assert rows is not None
            delta = delta + self.engram(y + m, rows)
        return delta


class Body(nn.Module):
    """Everything under the `model.` prefix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_layers))
        self.norm = GemmaNorm(c.hidden_size, c.rms_eps)
        if c.num_streams > 1:
            self.mhc = nn.ModuleList(
                StreamMixer(c.hidden_size, c.num_streams, c.sinkhorn_iters, c.rms_eps) for _ in range(c.num_layers)
            )


class Volundr(nn.Module):
    """Text model. `forward` gives final hidden states, `logits` the head over chosen rows of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tie_embeddings:
            self.lm_head: nn.Linear | LowbitLinear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.on_layer: LayerHook | None = None  # called with (layer, streams [T, S, C]) after each layer

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the stack over the batch.

        returns  hidden [T, C] after the final norm (stream 0), and stream 0 [T, C] after each layer named in `taps`
        """
        c, body = self.config, self.model
        rope = rope_tables(batch.positions, c.rope.rotary_dims, c.rope.theta)
        rows = engram_rows(batch, c.engram) if c.engram is not None else None
        embedded = self.embed(batch.ids)
        streams = embedded.unsqueeze(1).expand(-1, c.num_streams, -1).contiguous()
        tapped = {}
        for i, layer in enumerate(body.layers):
            if c.num_streams > 1:
                mixer = cast(StreamMixer, body.mhc[i])
                x, post, res = mixer.mix(streams)
                streams = StreamMixer.combine(streams, res, post, layer(x, batch, rope, rows))
            else:
                streams = streams + layer(streams[:, 0], batch, rope, rows).unsqueeze(1)
            if i in taps:
                tapped[i] = streams[:, 0]
            if self.on_layer is not None:
                self.on_layer(i, streams)
        return body.norm(streams[:, 0]), [tapped[i] for i in taps]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] int64 -> [..., C]; the table may lie on the host, in a narrower type."""
        return gather_rows(self.model.embed_tokens.weight, ids, self.model.norm.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, V] float32."""
        if self.config.tie_embeddings:
            return F.linear(hidden, self.model.embed_tokens.weight).float()
        return self.lm_head(hidden).float()

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the head's matrix: ids [M] int64 -> [M, C]."""
        if self.config.tie_embeddings:
            return self.model.embed_tokens.weight[ids]
        return self.lm_head.rows(ids) if isinstance(self.lm_head, LowbitLinear) else self.lm_head.weight[ids]

    def state_shapes(self) -> StateShapes:
        """Sizes of one sequence's memory under this model."""
        c = self.config
        kda, b = c.kda, c.bcsa
        return StateShapes(
            kda_layers=c.layers_of("kda"),
            kda_state=(kda.num_value_heads, kda.key_head_dim, kda.value_head_dim) if kda else (0, 0, 0),
            conv_tail=(kda.conv_kernel - 1, kda.conv_channels) if kda else (0, 0),
            window_layers=c.layers_of("bcsa"),
            dense_layers=c.layers_of("attn"),
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=b.window if b else 0,
            compress=b.compress if b else 1,
            topk=b.topk if b else 0,
            index_dim=b.indexer_dim if b else 0,
            num_previous_ids=max(c.engram.orders) - 1 if c.engram else 0,
        )

    def fresh_batch(self, ids: torch.Tensor) -> FreshBatch:
        """A batch of [B, T] ids from position 0 that keeps nothing."""
        s = self.state_shapes()
        return FreshBatch(
            ids,
            num_previous=s.num_previous_ids,
            window=s.window,
            compress=s.compress,
            shapes=FreshShapes(s.conv_tail, s.kda_state),
        )
