"""A model run one layer at a time, straight from its files: memory holds one layer's weights and the streams.

Used where a whole pass matters more than its speed: quantising and comparing models larger than memory. The layer
code is the model's own (model/volundr.py); only the loop over layers is here, and it can also run backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agens_engine.errors import CheckpointError
from agens_engine.model.batch import FreshBatch
from agens_engine.model.checkpoint import Checkpoint
from agens_engine.model.config import expected_shapes, parse_config
from agens_engine.model.engram import engram_rows
from agens_engine.model.mhc import StreamMixer
from agens_engine.model.volundr import Layer, Volundr
from agens_kernels.ref.attention import rope_tables

MICRO_BATCH_TOKENS = 2048


class Layerwise:
    """An open checkpoint as a sequence of layers. raises CheckpointError where it does not fit its config."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
        self.config = parse_config(checkpoint.config, shapes)
        checkpoint.verify(expected_shapes(self.config))
        with torch.device("meta"):
            self.model = Volundr(self.config)
        self.model.requires_grad_(False).eval()

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """The linears of a layer by module name, in the model's order; weights may be on the meta device."""
        prefix = f"model.layers.{index}"
        layer = self.model.model.layers[index]
        return {f"{prefix}.{n}": m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}

    def check_ids(self, ids: Tensor) -> None:
        """raises CheckpointError when the tokenizer gave an id the embedding does not have."""
        if int(ids.max()) >= self.config.vocab_size:
            raise CheckpointError(
                f"{self.checkpoint.folder}: the tokenizer gives id {int(ids.max())}, the model has "
                f"{self.config.vocab_size}; is it the tokenizer that was shipped with the model?"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] -> streams [T, S, C]; only the table is read, and let go again."""
        table = self.checkpoint.read("model.embed_tokens.weight", None)
        rows = table[ids].float()
        return rows.unsqueeze(1).expand(-1, self.config.num_streams, -1).contiguous()

    @contextmanager
    def layer(self, index: int) -> Iterator[Step]:
        """The layer's weights are in memory inside the block."""
        body = self.model.model
        prefixes = [f"model.layers.{index}."] + [f"model.mhc.{index}."] * (self.config.num_streams > 1)
        names = [n for n, _ in self.model.named_parameters() if n.startswith(tuple(prefixes))]
        for name in names:
            self._set(name, self.checkpoint.read(name))
        try:
            mixer = cast(StreamMixer, body.mhc[index]) if self.config.num_streams > 1 else None
            yield Step(self.model, cast(Layer, body.layers[index]), mixer)
        finally:
            for name in names:
                self._set(name, torch.empty(self.checkpoint.entry(name).shape, device="meta"))

    @contextmanager
    def head(self) -> Iterator[Head]:
        """Final norm and output matrix."""
        name = "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
        self._set("model.norm.weight", self.checkpoint.read("model.norm.weight"))
        try:
            yield Head(self.model, self.checkpoint.read(name))
        finally:
            self._set("model.norm.weight", torch.empty(self.config.hidden_size, device="meta"))

    def final_streams(self, ids: Tensor) -> Tensor:
        """[B, T] ids of fresh sequences -> streams [B * T, S, C] after the last layer, without gradients."""
        streams = self.embed(ids.reshape(-1))
        for index in range(self.config.num_layers):
            with self.layer(index) as step:
                streams = step.run(streams, ids)
        return streams

    def _set(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


class Step:
    """One layer with its weights loaded."""

    def __init__(self, model: Volundr, layer: Layer, mixer: StreamMixer | None) -> None:
        self.model, self.layer, self.mixer = model, layer, mixer

    def forward(self, streams: Tensor, batch: FreshBatch) -> Tensor:
        """streams [B * T, S, C] -> the same, as in Volundr.forward."""
        c = self.model.config
        rope = rope_tables(batch.positions, c.rope.rotary_dims, c.rope.theta)
        rows = engram_rows(batch, c.engram) if c.engram is not None else None
        if self.mixer is None:
            return streams + self.layer(streams[:, 0], batch, rope, rows).unsqueeze(1)
        x, post, res = self.mixer.mix(streams)
        return StreamMixer.combine(streams, res, post, self.layer(x, batch, rope, rows))

    @torch.no_grad()
    def run(self, streams: Tensor, ids: Tensor) -> Tensor:
        """All sequences of ids [B, T], a few at a time."""
        out = torch.empty_like(streams)
        for rows, part in micro_batches(ids):
            out[rows] = self.forward(streams[rows], self.model.fresh_batch(part))
        return out


class Head:
    """Final norm and logits with their weights loaded."""

    def __init__(self, model: Volundr, weight: Tensor) -> None:
        self._norm, self._weight = model.model.norm, weight

    def logits(self, streams: Tensor) -> Tensor:
        """streams [R, S, C] -> [R, V] float32."""
        return F.linear(self._norm(streams[:, 0]), self._weight)


def micro_batches(ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the flattened [B, T] ids and the sequences they belong to, about MICRO_BATCH_TOKENS at a time."""
    count, length = ids.shape
    step = max(1, MICRO_BATCH_TOKENS // length)
    for first in range(0, count, step):
        part = ids[first : first + step]
        yield slice(first * length, first * length + part.numel()), part
