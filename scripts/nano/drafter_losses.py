"""What nano's drafters are trained on: one DFlash2 block or one MTP chain behind every anchor, all in one pass.

Both networks are the engine's. Context rows of a document are computed once and shared by its anchors; a mask hides
from each anchor what would not be committed yet. Slot e drafts the token at anchor + 1 + e. Tokens fed behind the
anchor are nano's own (a wrong draft ends a chain, so nothing is learned from going on after one).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.mtp import MtpHead
from agens_kernels.ref.block_attention import block_attention
from agens_kernels.ref.selector import pair_scores
from scripts.nano.drafter_data import Anchors

SLOT_DECAY = 4.0  # slot e counts exp(-e / SLOT_DECAY): it is reached only when the slots before it were right


class Trainee(Protocol):
    """A drafter with its loss."""

    @property
    def network(self) -> nn.Module: ...

    num_slots: int

    def loss(self, batch: Anchors) -> torch.Tensor: ...

    def drafts(self, batch: Anchors) -> torch.Tensor:
        """[B, A, S] int64, each drafted behind nano's own tokens."""
        ...


def slot_weights(valid: torch.Tensor) -> torch.Tensor:
    """valid [..., S] -> weights of the valid slots [n], summing to 1."""
    weights = torch.exp(-torch.arange(valid.shape[-1]) / SLOT_DECAY).expand(valid.shape)[valid]
    return weights / weights.sum()


class BlockTrainee:
    """DFlash2: cross-entropy of every slot, and of the selector over its candidates."""

    def __init__(self, network: DFlash2, ends: TargetEnds) -> None:
        self.network, self.ends = network, ends
        self.num_slots = network.config.num_slots

    def hidden(self, batch: Anchors) -> torch.Tensor:
        """[B, A, block_size, C]"""
        model, (docs, num) = self.network, batch.positions.shape
        length = int(batch.positions.max())  # no anchor sees a later position
        features = model.features(batch.taps[:, :length])
        rope = model.rope(torch.arange(length))
        context = [model.context_kv(index, features, rope) for index in range(len(model.layers))]
        first = batch.positions.flatten()
        rows = first[:, None] + torch.arange(model.config.block_size)
        gap = rows[..., None] - torch.arange(length)
        committed = (torch.arange(length) < first[:, None])[:, None]

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            window = model.config.layers[index].window
            visible = committed & (gap < window) if window is not None else committed.expand_as(gap)
            visible = F.pad(visible, (0, k.shape[1]), value=True)
            keys, values = (
                torch.cat((shared[:, None].expand(-1, num, -1, -1, -1).flatten(0, 1), own), 1)
                for shared, own in zip(context[index], (k, v), strict=True)
            )
            return block_attention(q, keys, values, visible)

        x = model.embed_block(batch.ids.gather(1, batch.positions).flatten(), self.ends)
        return model(x, rows, attend).unflatten(0, (docs, num))

    def loss(self, batch: Anchors) -> torch.Tensor:
        selector = self.network.candidate_selector
        assert selector is not None
        slots = self.hidden(batch)[:, :, 1:][batch.valid]
        weights, targets = slot_weights(batch.valid), batch.targets[batch.valid]
        logits = self.ends.head(slots)
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
        unary, ids = logits.topk(self.network.config.selector_top_k, -1)
        before = torch.cat((batch.ids.gather(1, batch.positions)[..., None], batch.targets[..., :-1]), -1)
        scores = pair_scores(
            unary,
            selector.hidden_projection(slots),
            selector.predecessor_codebook[before[batch.valid]],
            selector.successor_codebook[ids],
        )
        found, label = (ids == targets[:, None]).max(-1)
        return loss + (F.cross_entropy(scores, label, reduction="none") * weights * found).sum()

    def drafts(self, batch: Anchors) -> torch.Tensor:
        hidden = self.hidden(batch).flatten(0, 1)
        anchors = batch.ids.gather(1, batch.positions)
        walk = self.network.walk(self.network.candidates(hidden, self.ends), anchors.flatten())
        return walk.tokens.unflatten(0, anchors.shape)


class ChainTrainee:
    """MTP: cross-entropy of every step of a chain that runs on the head's own states."""

    def __init__(self, network: MtpHead, ends: TargetEnds, num_slots: int) -> None:
        self.network, self.ends, self.num_slots = network, ends, num_slots

    def states(self, batch: Anchors) -> torch.Tensor:
        """[B, A, S, C] after mtp.norm"""
        head, layer, (docs, num) = self.network, self.network.layer, batch.positions.shape
        length = int(batch.positions.max())  # rows 0 .. P - 1, the last of them pairs f_{P-1} with the anchor
        rows = head.joined(batch.hidden[:, :length], self.ends.embed(batch.ids[:, 1 : length + 1]))
        shared = layer.self_attn.keys_values(layer.input_layernorm(rows), head.rope(torch.arange(length)))
        context = [x[:, None].expand(-1, num, -1, -1, -1).flatten(0, 1) for x in shared]
        newest = batch.positions.flatten()[:, None] - 1
        committed = (torch.arange(length) < newest)[:, None]  # the newest row is the chain's first
        u = rows.gather(1, (batch.positions - 1)[..., None].expand(-1, -1, rows.shape[-1])).flatten(0, 1)[:, None]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keys_of(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            own.append((k, v))
            keys, values = (torch.cat((x, *rows), 1) for x, rows in zip(context, zip(*own, strict=True), strict=True))
            return keys, values, F.pad(committed, (0, len(own)), value=True)

        states = []
        for step in range(self.num_slots):
            attended = layer.self_attn.among(layer.input_layernorm(u), head.rope(newest + step), keys_of)
            states.append(head.norm(layer.finish(u, attended)))
            if step + 1 < self.num_slots:
                tokens = batch.targets[..., step].flatten()[:, None]
                u = head.joined(states[-1], self.ends.embed(tokens))
        return torch.cat(states, 1).unflatten(0, (docs, num))

    def loss(self, batch: Anchors) -> torch.Tensor:
        logits = self.ends.head(self.states(batch)[batch.valid])
        losses = F.cross_entropy(logits, batch.targets[batch.valid], reduction="none")
        return (losses * slot_weights(batch.valid)).sum()

    def drafts(self, batch: Anchors) -> torch.Tensor:
        states = self.states(batch)
        return self.ends.head(states.flatten(0, 2)).argmax(-1).unflatten(0, states.shape[:3])
