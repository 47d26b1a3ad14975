"""The DFlash2 block drafter: context features, block forward, candidates and selector walk (spec drafters.md A).

    taps of committed rows ──► extend() ──► per layer K/V of the context          once per committed token
    anchor + masks         ──► block()  ──► hidden [B, T, C]                      one forward drafts all slots
    hidden                 ──► candidates() ──► walk() ──► tokens and their q

Rows and slots: the block has T = block_size rows at positions P .. P + T - 1, P being the number of committed tokens
the context knows; row 0 is the anchor. Slot e (0-based here, as in the spec) is read from row e + 1 and drafts the
token at position P + 1 + e. The engine numbers the same slots from 1.

Plain DFlash is the same network without convolution and selector. Parameter names are the canonical names of A.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from agens_engine.model.dflash2_config import BlockLayer, DFlash2Config
from agens_engine.model.draft_kv import DraftKv
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.layers import Mlp, PlainNorm
from agens_kernels.ref import selector as selector_ref
from agens_kernels.ref.attention import apply_rope, rope_tables
from agens_kernels.ref.block_attention import block_attention, block_visibility
from agens_kernels.ref.grouped_conv import grouped_conv

Rope = tuple[torch.Tensor, torch.Tensor]
# (layer, q [B, T, H, D], k [B, T, Hkv, D], v [B, T, Hkv, D]) -> [B, T, H, D]: attends context and block
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedConv(nn.Module):
    """Dynamic convolution around a sublayer; both sides use coefficients projected from the input of `prepare`."""

    def __init__(self, channels: int, kernel: int, group: int) -> None:
        super().__init__()
        self.sizes = (2, kernel, channels // group)
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, channels))
        self.kernel_projection = nn.Linear(channels, 2 * kernel * (channels // group), bias=False)

    def prepare(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [..., T, C] -> filtered h, and the coefficients [..., T, K, G] that `finish` needs."""
        coefs_in, coefs_out = self.kernel_projection(h).unflatten(-1, self.sizes).unbind(-3)
        return grouped_conv(h, self.base_kernel[0], coefs_in), coefs_out

    def finish(self, out: torch.Tensor, coefs: torch.Tensor) -> torch.Tensor:
        return grouped_conv(out, self.base_kernel[1], coefs)


class BlockAttention(nn.Module):
    """Softmax attention without a gate; q and k normalised per head, the whole head rotated."""

    def __init__(self, c: DFlash2Config) -> None:
        super().__init__()
        self.head_dim, bias = c.head_dim, c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = PlainNorm(c.head_dim, c.rms_eps)
        self.k_norm = PlainNorm(c.head_dim, c.rms_eps)

    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., C] -> k, v [..., Hkv, D]; x is a block row's h, or a context feature as it is."""
        k = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), *rope)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, h: torch.Tensor, rope: Rope) -> torch.Tensor:
        return apply_rope(self.q_norm(self.q_proj(h).unflatten(-1, (-1, self.head_dim))), *rope)


class BlockDecoderLayer(nn.Module):
    """norm, convolved attention, norm, convolved MLP, with ordinary residuals."""

    def __init__(self, c: DFlash2Config) -> None:
        super().__init__()
        self.input_layernorm = PlainNorm(c.hidden_size, c.rms_eps)
        self.self_attn = BlockAttention(c)
        self.post_attention_layernorm = PlainNorm(c.hidden_size, c.rms_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.attention_conv: GroupedConv | None = None
        self.mlp_conv: GroupedConv | None = None
        if c.conv_kernel:
            self.attention_conv = GroupedConv(c.hidden_size, c.conv_kernel, c.conv_group)
            self.mlp_conv = GroupedConv(c.hidden_size, c.conv_kernel, c.conv_group)

    def forward(self, x: torch.Tensor, rope: Rope, index: int, attend: Attend) -> torch.Tensor:
        def attention(h: torch.Tensor) -> torch.Tensor:
            k, v = self.self_attn.keys_values(h, rope)
            return self.self_attn.o_proj(attend(index, self.self_attn.queries(h, rope), k, v).flatten(-2))

        x = x + _around(self.attention_conv, self.input_layernorm(x), attention)
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _around(
    conv: GroupedConv | None, h: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if conv is None:
        return sublayer(h)
    prepared, coefs = conv.prepare(h)
    return conv.finish(sublayer(prepared), coefs)


class CandidateSelector(nn.Module):
    def __init__(self, c: DFlash2Config) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))


class DraftContext:
    """What the drafter knows of one sequence: K/V of its committed rows. `length` is P, the next block's position."""

    def __init__(self, layers: list[DraftKv]) -> None:
        self.layers = layers
        self.length = 0

    @property
    def start(self) -> int:
        """First position known; 0 unless restarted or rows were left out because they can no longer matter."""
        return self.layers[0].start

    def restart(self, position: int) -> None:
        """Forget everything; the next row appended is at `position`. Rows before it stay unknown, which only costs
        acceptance: for a sequence resumed from a snapshot without taps."""
        for layer in self.layers:
            layer.restart(position)
        self.length = position

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


@dataclass(frozen=True)
class Candidates:
    """What may be drafted in each of S slots.

    ids     [B, S, k] int64: the k best by descending logit with a selector, else the whole vocabulary in id order
    unary   [B, S, k] float32 scores, scaled and capped
    gate    [B, S, R] the selector's view of each slot's row; None without a selector
    """

    ids: torch.Tensor
    unary: torch.Tensor
    gate: torch.Tensor | None

    def best_ids(self, num: int = 16) -> torch.Tensor:
        """[B, S, num] ids of the highest scores, best first; other sources add them to their shortlists."""
        num = min(num, self.ids.shape[-1])
        return self.ids[..., :num] if self.gate is not None else self.unary.topk(num, -1).indices


@dataclass(frozen=True)
class Walk:
    """One walk per sequence over slots 0 .. S - 1.

    tokens   [B, S] int64; -1 before the first walked slot, and everywhere in a sequence that is not ok
    ids, q   [B, S, k]: what each slot chose from, with the probability each candidate had (one-hot when greedy)
    ok       [B] bool; False: a score was NaN or infinite, this drafter has nothing to say in this step
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    ok: torch.Tensor

    def dense_q(self, row: int, first_slot: int, vocab_size: int) -> torch.Tensor:
        """[S - first_slot, V] float32 proposal distributions of one sequence over the vocabulary, for DraftRun.q."""
        ids, q = self.ids[row, first_slot:], self.q[row, first_slot:]
        return q.new_zeros((q.shape[0], vocab_size)).scatter_(-1, ids, q)


class DFlash2(nn.Module):
    """The drafter. Inference runs extend, block, candidates, walk; a trainer calls features, context_kv and forward."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = PlainNorm(c.hidden_size, c.rms_eps)
        self.layers = nn.ModuleList(BlockDecoderLayer(c) for _ in c.layers)
        self.norm = PlainNorm(c.hidden_size, c.rms_eps)
        self.candidate_selector = CandidateSelector(c) if c.selector_rank else None

    # --- context -----------------------------------------------------------------------------------------------------

    def new_context(self, storage: Sequence[torch.Tensor | None] | None = None) -> DraftContext:
        """A context without rows. storage: one [2, n, Hkv, D] per layer (see DraftKv); None: it grows as needed."""
        c, like = self.config, self.norm.weight
        rooms = [None] * len(c.layers) if storage is None else storage
        layers = [
            DraftKv(c.num_kv_heads, c.head_dim, kind.window, dtype=like.dtype, device=like.device, storage=room)
            for kind, room in zip(c.layers, rooms, strict=True)
        ]
        return DraftContext(layers)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """c_t of committed rows. taps [..., n_taps * C], stream 0 after each tapped layer in order -> [..., C]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, layer: int, features: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """features [n, C] at the rope's positions -> k, v [n, Hkv, D] of one layer."""
        return cast(BlockDecoderLayer, self.layers[layer]).self_attn.keys_values(features, rope)

    def rope(self, positions: torch.Tensor) -> Rope:
        """positions [...] int64 -> cos, sin [..., D / 2]."""
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    def extend(self, contexts: Sequence[DraftContext], taps: Sequence[torch.Tensor]) -> None:
        """Append committed rows.

        taps   one [n, n_taps * C] per context, for positions length .. length + n - 1; n may be 0. Only committed rows:
               there is no way to take one back. Rows that no later block can see are not computed.
        """
        parts, spans = [], []
        for context, rows in zip(contexts, taps, strict=True):
            end = context.length + rows.shape[0]
            first = context.length
            if (window := self.config.max_window) is not None and end - window > first:
                first = end - window
                context.restart(first)
            parts.append(rows[rows.shape[0] - (end - first) :])
            spans.append((first, end))
        if not any(first < end for first, end in spans):
            return
        features = self.features(torch.cat(parts))
        positions = torch.cat([torch.arange(a, z, device=features.device) for a, z in spans])
        rope, sizes = self.rope(positions), [z - a for a, z in spans]
        for index in range(len(self.config.layers)):
            k, v = self.context_kv(index, features, rope)
            for context, (first, _), new_k, new_v in zip(contexts, spans, k.split(sizes), v.split(sizes), strict=True):
                if new_k.shape[0]:
                    context.layers[index].write(first, new_k, new_v, final=True)
        for context, (_, end) in zip(contexts, spans, strict=True):
            context.length = end

    # --- block -------------------------------------------------------------------------------------------------------

    def embed_block(self, anchors: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """anchors [B] int64 -> rows [B, T, C]: the anchor's embedding, then the mask's."""
        ids = anchors.new_full((anchors.shape[0], self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = anchors
        return ends.embed(ids) * self.config.embedding_scale

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [B, T, C] block rows at positions [B, T] -> hidden [B, T, C] after the final norm."""
        rope = self.rope(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, index, attend)
        return self.norm(x)

    def block(self, contexts: Sequence[DraftContext], anchors: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """Run one whole block per sequence; nothing of it is kept.

        anchors   [B] int64, each the token at its context's position P
        returns   [B, T, C]
        """
        length = self.config.block_size
        x = self.embed_block(anchors, ends)
        start = torch.tensor([c.length for c in contexts], device=x.device)
        positions = start.unsqueeze(-1) + torch.arange(length, device=x.device)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kind = self.config.layers[index]
            rows = [_attend_one(c, index, kind, q[b], k[b], v[b]) for b, c in enumerate(contexts)]
            return torch.stack(rows)

        return self(x, positions, attend)

    # --- drafts ------------------------------------------------------------------------------------------------------

    def candidates(self, hidden: torch.Tensor, ends: TargetEnds, num_slots: int | None = None) -> Candidates:
        """Score slots 0 .. num_slots - 1 (all of the block when None) from hidden [B, T, C] with the target's head."""
        c, selector = self.config, self.candidate_selector
        rows = hidden[:, 1 : 1 + (c.num_slots if num_slots is None else num_slots)]
        logits = ends.head(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])[..., : ends.num_usable]
        if selector is None:
            every = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
            return Candidates(every, self._scale(logits), None)
        top = logits.topk(min(c.selector_top_k, logits.shape[-1]), -1)
        return Candidates(top.indices, self._scale(top.values), selector.hidden_projection(rows))

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        scaled, cap = logits.float() * self.config.output_multiplier, self.config.softcap
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    def walk(
        self,
        candidates: Candidates,
        predecessors: torch.Tensor,
        first_slots: torch.Tensor | None = None,
        *,
        temperatures: torch.Tensor | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> Walk:
        """Choose one token per slot, each given the one before it.

        predecessors   [B] int64: the token before the first walked slot (the anchor, or another source's last draft)
        first_slots    [B] int64 first walked slot, = the number of slots others have filled; None: 0
        temperatures   [B] float32, 0 for greedy; None: all greedy
        uniforms       [B, S] float64 in [0, 1), one per slot; needed where a temperature is not 0
        """
        batch, num_slots, _ = candidates.ids.shape
        device, codebooks = candidates.ids.device, None
        if self.candidate_selector is not None:
            codebooks = selector_ref.Codebooks(
                self.candidate_selector.predecessor_codebook, self.candidate_selector.successor_codebook
            )
        if uniforms is None and temperatures is not None:
            assert bool((temperatures == 0).all()), "a sampled walk needs uniforms"
        tokens, q, ok = selector_ref.walk(
            candidates.ids,
            candidates.unary,
            candidates.gate,
            codebooks,
            predecessor=predecessors,
            first_slot=torch.zeros_like(predecessors) if first_slots is None else first_slots,
            temperature=temperatures,
            uniforms=torch.zeros((batch, num_slots), device=device) if uniforms is None else uniforms,
        )
        return Walk(tokens, candidates.ids, q, ok)


def _attend_one(
    context: DraftContext, index: int, kind: BlockLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One sequence, one layer: q [T, H, D] over the context in reach and the block's own k, v [T, Hkv, D]."""
    first, length = context.length, q.shape[0]
    cache = context.layers[index]
    cache.write(first, k, v)  # beyond the committed length: the next write replaces them
    start = cache.start if kind.window is None else max(cache.start, first - kind.window + 1)
    keys, values = cache.read(start, first + length)
    visible = block_visibility(
        first, length, start, keys.shape[0], window=kind.window, causal=kind.causal, device=q.device
    )
    return block_attention(q, keys, values, visible)
