"""The MTP head: one gated softmax layer that drafts from the target's hidden state and the token after it (spec B).

    row t    pairs f_t, the target's state at position t after its final norm, with x_{t+1}; it predicts x_{t+2}
    commit   appends rows of committed tokens, from true states; the newest gives the first draft
    chain    goes on with rows fed by the head's own output; they are temporary, the next commit overwrites them

    positions   0 .................... N - 1 | N ...
    rows        committed (true states)      | chained, fed with given tokens or with drafts

With x_P the anchor (not yet run through the target) the committed rows are 0 .. P - 1, so N = P. Of several consistent
RoPE conventions this is vLLM's: the row sits at the position of its hidden state. Parameter names are those of B.1
without the `mtp.` prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.model.attention import GatedAttention, Rope
from agens_engine.model.draft_kv import DraftKv
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.layers import GemmaNorm, Mlp
from agens_engine.model.mtp_config import MtpConfig
from agens_engine.model.shortlist import Shortlist
from agens_kernels.ref.attention import apply_rope, causal_attention, rope_tables
from agens_kernels.ref.block_attention import block_attention

# k, v [..., T, Hkv, D] of the rows that ask -> all keys and values [..., S, Hkv, D], and who sees which [..., T, S]
KeysOf = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class HeadCache:
    """The head's memory of one sequence: K/V rows, and what the newest committed row produced.

    length   committed rows N, counted from the start of the sequence
    newest   [2, C] of row N - 1: the state that a chained row is fed with, and the state the output head reads; None
             while no row was committed
    """

    def __init__(self, kv: DraftKv, window: int | None) -> None:
        self.kv, self.window = kv, window
        self.length = 0
        self.newest: torch.Tensor | None = None

    def restart(self, position: int) -> None:
        """Forget every row; the next committed row is at `position` (a sequence resumed without the older states)."""
        self.kv.restart(position)
        self.length, self.newest = position, None

    def put(self, position: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one row [1, Hkv, D] and return the keys and values it sees, itself last, [1, S, Hkv, D]."""
        self.kv.write(position, k, v)
        first = self.kv.start if self.window is None else max(self.kv.start, position - self.window + 1)
        keys, values = self.kv.read(first, position + 1)
        return keys[None], values[None]

    @property
    def num_bytes(self) -> int:
        return self.kv.num_bytes


@dataclass(frozen=True)
class Chain:
    """What the head drafted for one sequence.

    tokens   the drafts, after the given tokens; empty when the head has nothing to say
    hidden   [len(tokens), C] the state each draft was read from (after mtp.norm)
    ok       False: a score was NaN or infinite; the drafts before it are kept
    """

    tokens: tuple[int, ...]
    hidden: torch.Tensor
    ok: bool


class HeadAttention(GatedAttention):
    """The target's dense attention over the head's own cache."""

    def keys_values(self, h: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """h [n, C] -> k, v [n, Hkv, D], for rows nobody asks a question."""
        k = self.k_norm(self.k_proj(h).unflatten(-1, (self.kv_heads, -1)))
        return apply_rope(k, *rope), self.v_proj(h).unflatten(-1, (self.kv_heads, -1))

    def one_row_each(
        self, h: torch.Tensor, rope: Rope, caches: Sequence[HeadCache], positions: Sequence[int]
    ) -> torch.Tensor:
        """h [B, C], row b at positions[b] of cache b -> [B, C]; the rows' K/V are written."""
        q, gate, k, v = self._project(h, rope)
        rows = []
        for b, (cache, position) in enumerate(zip(caches, positions, strict=True)):
            keys, values = cache.put(position, k[b : b + 1], v[b : b + 1])
            rows.append(causal_attention(q[b : b + 1, None], keys, values, first=keys.shape[1] - 1)[0])
        return self._output(torch.cat(rows), gate)

    def whole_sequences(self, h: torch.Tensor, rope: Rope) -> torch.Tensor:
        """h [B, T, C] from position 0 -> [B, T, C], nothing kept."""
        q, gate, k, v = self._project(h, rope)
        return self._output(causal_attention(q, k, v, first=0), gate)

    def among(self, h: torch.Tensor, rope: Rope, keys_of: KeysOf) -> torch.Tensor:
        """h [..., T, C] over keys that the caller provides -> [..., T, C], nothing kept; for training."""
        q, gate, k, v = self._project(h, rope)
        return self._output(block_attention(q, *keys_of(k, v)), gate)


class HeadLayer(nn.Module):
    """Gated attention and MLP with ordinary residuals."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        c = config.block
        self.input_layernorm = GemmaNorm(c.hidden_size, c.rms_eps)
        self.self_attn = HeadAttention(c, 0)
        self.post_attention_layernorm = GemmaNorm(c.hidden_size, c.rms_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)

    def finish(self, u: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        w = u + attended
        return w + self.mlp(self.post_attention_layernorm(w))


class MtpHead(nn.Module):
    """The head. Norms are stored in the 1 + w form whatever the file says (the loader converts)."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        c = config.block
        self.pre_fc_norm_embedding = GemmaNorm(c.hidden_size, c.rms_eps)
        self.pre_fc_norm_hidden = GemmaNorm(c.hidden_size, c.rms_eps)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = GemmaNorm(c.hidden_size, c.rms_eps)

    @property
    def layer(self) -> HeadLayer:
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        return layer

    def new_cache(self, window: int | None = None, storage: torch.Tensor | None = None) -> HeadCache:
        """A cache without rows. window: positions a row sees, itself included; None: all. storage: see DraftKv."""
        c, like = self.config.block, self.norm.weight
        kv = DraftKv(c.num_kv_heads, c.head_dim, window, dtype=like.dtype, device=like.device, storage=storage)
        return HeadCache(kv, window)

    def joined(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """u of B.2: hidden [..., C] and the embedding of the next token [..., C] -> [..., C]."""
        halves = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if self.config.options.concat == "hidden_first":
            halves.reverse()
        return self.fc(torch.cat(halves, -1))

    def rope(self, positions: torch.Tensor) -> Rope:
        c = self.config.block.rope
        return rope_tables(positions, c.rotary_dims, c.theta)

    def forward(self, hidden: torch.Tensor, next_ids: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
        """Teacher-forced pass over whole sequences from position 0, differentiable, nothing kept.

        hidden    [B, T, C] true target states
        next_ids  [B, T] int64, the token after each
        returns   s [B, T, C] after mtp.norm; ends.head of row t predicts the token at t + 2
        """
        u = self.joined(hidden, ends.embed(next_ids))
        rope = self.rope(torch.arange(u.shape[1], device=u.device))
        return self.norm(
            self.layer.finish(u, self.layer.self_attn.whole_sequences(self.layer.input_layernorm(u), rope))
        )

    def commit(
        self,
        caches: Sequence[HeadCache],
        hidden: Sequence[torch.Tensor],
        next_ids: Sequence[torch.Tensor],
        ends: TargetEnds,
    ) -> None:
        """Append rows of committed tokens; whatever was chained is overwritten.

        hidden    one [n, C] per cache: true target states at positions length .. length + n - 1; n may be 0
        next_ids  one [n] int64 per cache: the committed token after each of them
        """
        busy = [b for b, rows in enumerate(hidden) if rows.shape[0]]
        if not busy:
            return
        kept_hidden, kept_ids, starts = [], [], []
        for b in busy:
            cache, num = caches[b], hidden[b].shape[0]
            assert next_ids[b].shape[0] == num, f"{num} states with {next_ids[b].shape[0]} next tokens"
            end = cache.length + num
            first = cache.length
            if cache.window is not None and end - cache.window > first:
                first = end - cache.window  # older rows can no longer be seen, and one layer needs nothing else of them
                cache.restart(first)
            kept_hidden.append(hidden[b][num - (end - first) :])
            kept_ids.append(next_ids[b][num - (end - first) :])
            starts.append(first)
            cache.length = end
        sizes = [rows.shape[0] for rows in kept_hidden]
        u = self.joined(torch.cat(kept_hidden), ends.embed(torch.cat(kept_ids)))
        spans = [torch.arange(first, first + n, device=u.device) for first, n in zip(starts, sizes, strict=True)]
        h = self.layer.input_layernorm(u)
        k, v = self.layer.self_attn.keys_values(h, self.rope(torch.cat(spans)))
        for b, first, new_k, new_v in zip(busy, starts, k.split(sizes), v.split(sizes), strict=True):
            caches[b].kv.write(first, new_k, new_v, final=True)
        last = torch.tensor(sizes, device=u.device).cumsum(0) - 1
        live = [caches[b] for b in busy]
        states = self._rows(u[last], live, [cache.length - 1 for cache in live])
        for cache, state in zip(live, states, strict=True):
            cache.newest = state

    def chain(
        self,
        caches: Sequence[HeadCache],
        num_drafts: Sequence[int],
        ends: TargetEnds,
        *,
        given: Sequence[Sequence[int]] | None = None,
        shortlist: Shortlist | None = None,
        extra_ids: Sequence[torch.Tensor] | None = None,
        slot_ids: torch.Tensor | None = None,
    ) -> list[Chain]:
        """Draft after the newest committed row of each cache; the caches' committed rows stay as they are.

        num_drafts  drafts wanted per sequence (0: none); given + drafts at most 7
        given       tokens other sources put into the first slots; the head consumes them before it drafts
        shortlist   what to choose from; None: the whole usable vocabulary
        extra_ids   one [n] int64 per sequence: ids listed for all its slots (tokens of its context)
        slot_ids    [B, S, k] int64: ids listed for single slots (DFlash2's candidates; slot e is token P + 1 + e)
        """
        batch = len(caches)
        given = [()] * batch if given is None else given
        shortlist = Shortlist(ends) if shortlist is None else shortlist
        totals = [
            len(g) + n if n > 0 and c.newest is not None else 0
            for g, n, c in zip(given, num_drafts, caches, strict=True)
        ]
        assert max(totals, default=0) < NUM_VERIFY_ROWS, f"{max(totals)} slots, a step has {NUM_VERIFY_ROWS - 1}"
        states = {b: c.newest for b, c in enumerate(caches) if totals[b] and c.newest is not None}
        drafts: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in caches]
        for slot in range(max(totals, default=0)):
            members = [b for b in range(batch) if totals[b] > slot]
            drafting = [b for b in members if len(given[b]) <= slot]
            tokens: dict[int, torch.Tensor] = {}
            if drafting:
                heads = torch.stack([states[b][1] for b in drafting])
                ids, ok = shortlist.best(heads, _extras(drafting, slot, extra_ids, slot_ids))
                for i, b in enumerate(drafting):
                    tokens[b] = ids[i]
                    drafts[b].append((ids[i], heads[i], ok[i]))
            going = [b for b in members if totals[b] > slot + 1]
            if not going:
                continue
            for b in going:
                if b not in tokens:
                    tokens[b] = torch.tensor(given[b][slot], device=self.norm.weight.device)
            embedded = ends.embed(torch.stack([tokens[b] for b in going]))
            u = self.joined(torch.stack([states[b][0] for b in going]), embedded)
            rows = self._rows(u, [caches[b] for b in going], [caches[b].length + slot for b in going])
            states.update(zip(going, rows, strict=True))
        return [self._chain_of(rows) for rows in drafts]

    def _rows(self, u: torch.Tensor, caches: Sequence[HeadCache], positions: Sequence[int]) -> torch.Tensor:
        """u [B, C], one row per cache at its position -> [B, 2, C]: the state to chain from, the state to read."""
        rope = self.rope(torch.tensor(positions, device=u.device))
        h = self.layer.input_layernorm(u)
        w = self.layer.finish(u, self.layer.self_attn.one_row_each(h, rope, caches, positions))
        s = self.norm(w)
        return torch.stack((s if self.config.options.chain_state == "post_norm" else w, s), 1)

    def _chain_of(self, rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Chain:
        if not rows:
            return Chain((), self.norm.weight.new_empty((0, self.norm.weight.shape[0])), True)
        tokens, states, ok = (torch.stack(column) for column in zip(*rows, strict=True))
        num = int(ok.long().cumprod(0).sum())
        return Chain(tuple(tokens[:num].tolist()), states[:num], num == len(rows))


def _extras(
    members: Sequence[int], slot: int, extra_ids: Sequence[torch.Tensor] | None, slot_ids: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """What each member may draft in this slot besides the shortlist."""
    for_slot = slot_ids[:, slot] if slot_ids is not None and slot < slot_ids.shape[1] else None
    if extra_ids is None:
        return None if for_slot is None else [for_slot[b] for b in members]
    if for_slot is None:
        return [extra_ids[b] for b in members]
    return [torch.cat((extra_ids[b], for_slot[b])) for b in members]
