"""Train nano, the embedded model, on the generator's documents with the engine's own model code.

    python scripts/nano/train.py --data train.npz --heldout heldout.npz --steps 3000 --out runs/nano

Seeded; writes a checkpoint every --save-every steps and resumes from it when started again with the same --out. The
learning rate warms up, stays flat and then falls linearly to zero over the last part, so a run can be resumed with a
different --steps to end earlier or later. The log is JSON lines in OUT/log.jsonl. `export.py` turns the checkpoint into
the published layout.

What the trainer adds to the model: the loss (all assistant tokens, a sample of the others), a teacher for the BCSA
indexer (hard top-k gives it no gradient), Muon for the matrices and AdamW for the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.memory.kv import WindowView  # noqa: E402
from agens_engine.model.batch import Group  # noqa: E402
from agens_engine.model.bcsa import BcsaAttention  # noqa: E402
from agens_engine.model.config import ModelConfig, parse_config  # noqa: E402
from agens_engine.model.volundr import Volundr  # noqa: E402
from agens_kernels.ref import attention  # noqa: E402
from agens_kernels.ref.attention import TensorFar, visible_far_blocks  # noqa: E402

LENGTH_STEP = 16  # rows are padded to a multiple of the KDA chunk
MUON_LR, MUON_DECAY = 0.02, 0.05
ADAM_LR = {"table": 4e-3, "head": 2e-3, "vector": 2e-3, "mhc": 1e-3, "small": 2e-3}


def nano_config(vocab_size: int) -> dict[str, object]:
    """config.json of nano: the family's keys, widths in multiples of 64, head sizes of 16, the 4 x 128 indexer."""
    mixers = ["kda", "kda", "bcsa", "kda", "bcsa", "attn"]
    text = {
        "model_type": "volundr_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": len(mixers),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "mixer_types": mixers,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "kda_gate_rank": 32,
        "bcsa_window": 128,
        "bcsa_compress": 4,
        "bcsa_topk": 16,
        "engram_layers": [1, 3],
        "engram_orders": [2, 3],
        "engram_rows": 8192,
        "engram_dim": 64,
        "mhc_streams": 4,
        "mhc_sinkhorn_iters": 10,
    }
    return {
        "architectures": ["VolundrForConditionalGeneration"],
        "model_type": "volundr",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": text,
    }


def initialise(model: Volundr, seed: int) -> None:
    """A plain residual net at the start: stream 0 in, all streams out, near-identity mixing."""
    gen = torch.Generator().manual_seed(seed)
    config = model.config
    depth = (2 * config.num_layers) ** -0.5

    def normal(p: torch.Tensor, std: float) -> None:
        p.copy_(torch.randn(p.shape, generator=gen) * std)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "tables" not in name and "embed" not in name:
                scale = depth if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
                normal(p, scale * p.shape[1] ** -0.5)
            if "tables" in name:
                normal(p, 0.02)
            elif "embed_tokens" in name:
                normal(p, 0.08)
            elif name.endswith("A_log"):
                p.copy_(torch.linspace(math.log(0.5), math.log(8.0), p.numel()))
            elif name.endswith("dt_bias"):
                rate = torch.exp(torch.rand(p.shape, generator=gen) * math.log(0.1 / 0.002)) * 0.002
                p.copy_(torch.log(torch.expm1(rate)))
            elif name.endswith("conv1d.weight"):
                normal(p, 0.15)
                p[..., -1] += 0.7
            elif name.endswith("dyn.weight"):
                normal(p, 0.002)
            elif name.endswith("pre_static"):
                normal(p, 0.02)
                p[0] += 1.0
            elif name.endswith("post_static"):
                p.fill_(1.0)
            elif name.endswith("res_static"):
                p.copy_(4.0 * torch.eye(p.shape[0]))
            elif name.endswith("engram.gate.weight"):
                normal(p, 0.01)
            elif name.endswith("engram.gate.bias"):
                p.zero_()


class IndexerTeacher:
    """Cross-entropy from the head-averaged far attention (detached) to the indexer's scores over the visible blocks."""

    def __init__(self, model: Volundr) -> None:
        self.losses: list[torch.Tensor] = []
        for layer in model.model.layers:
            attention = getattr(layer, "self_attn", None)
            if isinstance(attention, BcsaAttention):
                self._attach(attention)

    def _attach(self, attention: BcsaAttention) -> None:
        bcsa, index = attention.bcsa, attention.index
        # the selection is hard, so no other loss reaches the indexer; its own must not bend the layer's input
        attention.index = lambda h: index(h.detach())  # type: ignore[method-assign]

        def teach(unit: Group, q: torch.Tensor, index_query: torch.Tensor, view: WindowView) -> None:
            assert isinstance(view.far, TensorFar)
            far_k, block_keys = view.far.far_k, view.far.block_keys
            first = bcsa.window + bcsa.compress - 1
            count = visible_far_blocks(unit.length - 1, bcsa.window, bcsa.compress)
            if count < 2:
                return
            position = torch.arange(first, unit.length)
            last = torch.arange(1, count + 1) * bcsa.compress - 1
            hidden = last > position[:, None] - bcsa.window
            with torch.no_grad():
                heads = q.shape[2] // far_k.shape[2]
                keys = far_k[:, :count].repeat_interleave(heads, 2)
                far = torch.einsum("bthd,bnhd->bhtn", q[:, first:], keys) * q.shape[-1] ** -0.5
                target = far.masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
            scores = index_query[:, first:] @ block_keys[:, :count].transpose(-1, -2)
            log_probs = scores.masked_fill(hidden, -1e4).log_softmax(-1)
            self.losses.append(-(target * log_probs).sum(-1).mean())

        attention.on_indexer = teach

    def take(self) -> torch.Tensor | float:
        total = sum(self.losses) if self.losses else 0.0
        self.losses.clear()
        return total


def newton_schulz(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices of a stack [n, rows, cols] (Muon's quintic iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised; equal shapes are stacked so that one batched product serves them."""

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.momentum = momentum
        self.buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad for p in params])  # type: ignore[misc]
            buffer = self.buffers[shape]
            buffer.lerp_(grad, 1 - self.momentum)
            update = newton_schulz(grad.lerp(buffer, self.momentum))
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(params, update, strict=True):
                p.mul_(1 - lr * decay).add_(u, alpha=-scale)


def split_parameters(model: Volundr) -> tuple[list[torch.nn.Parameter], list[dict[str, object]]]:
    """Muon's matrices, and AdamW groups with their base rates."""
    muon: list[torch.nn.Parameter] = []
    groups: dict[str, list[torch.nn.Parameter]] = {key: [] for key in ADAM_LR}
    for name, p in model.named_parameters():
        if "tables" in name or "embed_tokens" in name:
            groups["table"].append(p)
        elif ".mhc." in name:
            groups["mhc"].append(p)
        elif p.ndim != 2:
            groups["vector"].append(p)
        elif any(part in name for part in ("idx_", "in_proj_b", "f_down", "f_up", "engram.gate", "lm_head")):
            groups["small"].append(p)
        else:
            muon.append(p)
    return muon, [{"params": ps, "lr": ADAM_LR[key], "base": ADAM_LR[key]} for key, ps in groups.items() if ps]


class Documents:
    """Whole documents as rows of similar length: most rows hold one from position 0, some are packed full."""

    def __init__(
        self, path: str, seed: int, micro_tokens: int, packed_share: float = 0.15, packed_length: int = 512
    ) -> None:
        data = np.load(path)
        self.ids, self.flags, self.offsets = data["ids"], data["weights"], data["offsets"]
        self.seed, self.micro_tokens = seed, micro_tokens
        self.packed_share, self.packed_length = packed_share, packed_length

    def micro_batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids [B, L], flags [B, L]), B * L about micro_tokens; flag 1: assistant tokens, 0: others, 2: padding."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.offsets) - 1)
        for begin in range(0, len(order), 4096):
            rows = self._rows(order[begin : begin + 4096], rng)
            rows.sort(key=len)
            batches, at = [], 0
            while at < len(rows):
                stop = at + 1
                while stop < len(rows) and len(rows[stop]) * (stop + 1 - at) <= self.micro_tokens:
                    stop += 1
                batches.append(rows[at:stop])
                at = stop
            for i in rng.permutation(len(batches)):
                yield self._pad(batches[i])

    def _rows(self, docs: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        rows: list[np.ndarray] = []
        open_row: list[np.ndarray] = []
        for doc in docs:
            span = np.arange(self.offsets[doc], self.offsets[doc + 1])
            if rng.random() >= self.packed_share:
                rows.append(span)
                continue
            if sum(map(len, open_row)) + len(span) > self.packed_length:
                rows.append(np.concatenate(open_row))
                open_row = []
            open_row.append(span)
        if open_row:
            rows.append(np.concatenate(open_row))
        return rows

    def _pad(self, rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        length = -(-max(map(len, rows)) // LENGTH_STEP) * LENGTH_STEP
        ids = np.zeros((len(rows), length), np.int64)
        flags = np.full((len(rows), length), 2, np.int64)
        for i, span in enumerate(rows):
            ids[i, : len(span)] = self.ids[span]
            flags[i, : len(span)] = self.flags[span] > 0
        return torch.from_numpy(ids), torch.from_numpy(flags)


def loss_of(
    model: Volundr, ids: torch.Tensor, flags: torch.Tensor, context_share: float, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(weighted loss sum / tokens, assistant-token loss sum, assistant tokens). Predicts ids[:, 1:]."""
    batch, length = ids.shape
    target, kind = ids[:, 1:], flags[:, 1:]
    wanted = kind == 1
    if context_share > 0:
        wanted = wanted | ((kind == 0) & (torch.rand(kind.shape, generator=gen) < context_share))
    rows = (torch.arange(batch)[:, None] * length + torch.arange(length - 1))[wanted]
    hidden, _ = model(model.fresh_batch(ids))
    losses = F.cross_entropy(model.logits(hidden[rows]), target[wanted], reduction="none")
    assistant = kind[wanted] == 1
    weights = torch.where(assistant, 1.0, 0.5)
    return (losses * weights).sum() / weights.sum(), losses.detach()[assistant].sum(), int(assistant.sum())


@torch.no_grad()
def heldout_loss(model: Volundr, documents: Documents, num_batches: int) -> float:
    gen = torch.Generator().manual_seed(0)
    total, count = 0.0, 0
    for _, (ids, flags) in zip(range(num_batches), documents.micro_batches(0), strict=False):
        _, part, n = loss_of(model, ids, flags, 0.0, gen)
        total, count = total + float(part), count + n
    return total / max(1, count)


def rate(step: int, steps: int, warmup: int, decay_share: float) -> float:
    """Factor on every learning rate: linear warm-up, flat, linear to zero."""
    decay_from = steps * (1 - decay_share)
    fall = 1.0 if step < decay_from else max(0.0, (steps - step) / (steps - decay_from))
    return min(1.0, (step + 1) / warmup) * fall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--decay-share", type=float, default=0.6)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--restart-data", action="store_true", help="resume the weights, begin --data from its start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    attention.TILE_ELEMENTS, attention.GATHER_FACTOR = 1 << 24, 1 << 24  # rows are short: one tile, nothing gathered
    args.out.mkdir(parents=True, exist_ok=True)

    raw = nano_config(args.vocab_size)
    config: ModelConfig = parse_config(raw, {})
    # one matrix embeds and predicts while training, so that one linear map copies every token; the file holds it twice
    model = Volundr(ModelConfig(**{**config.__dict__, "tie_embeddings": True}))
    initialise(model, args.seed)
    teacher = IndexerTeacher(model)
    matrices, groups = split_parameters(model)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.97), weight_decay=0.01)
    gen = torch.Generator().manual_seed(args.seed)
    state = {"step": 0, "epoch": 0, "batch": 0, "tokens": 0, "seconds": 0.0}
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        muon.buffers = {tuple(shape): buffer for shape, buffer in saved["muon"]}
        gen.set_state(saved["generator"])
        state = saved["state"]
        if args.restart_data:
            state |= {"epoch": 0, "batch": 0}
        print(f"resumed at step {state['step']}")
    count = sum(p.numel() for p in model.parameters()) + model.model.embed_tokens.weight.numel()
    print(f"{count} parameters in the exported file")

    documents = Documents(args.data, args.seed, args.micro_tokens)
    heldout = Documents(args.heldout, 0, args.micro_tokens, packed_share=0.0)
    source = documents.micro_batches(int(state["epoch"]))
    for _ in range(int(state["batch"])):
        next(source)
    started = time.perf_counter() - float(state["seconds"])
    running: list[float] = []
    with open(args.out / "log.jsonl", "a", encoding="utf-8") as log:
        while state["step"] < args.steps:
            factor = rate(int(state["step"]), args.steps, args.warmup, args.decay_share)
            total, answers = 0.0, 0
            for _ in range(args.accumulate):
                try:
                    ids, flags = next(source)
                    state["batch"] += 1
                except StopIteration:
                    state["epoch"] += 1
                    state["batch"] = 1
                    source = documents.micro_batches(int(state["epoch"]))
                    ids, flags = next(source)
                loss, part, n = loss_of(model, ids, flags, 0.25, gen)
                (loss / args.accumulate + 0.1 * teacher.take()).backward()
                total, answers = total + float(part), answers + n
                state["tokens"] += int((flags < 2).sum())
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            for group in adam.param_groups:
                group["lr"] = group["base"] * factor
            muon.step(MUON_LR * factor, MUON_DECAY)
            adam.step()
            model.zero_grad(set_to_none=True)
            state["step"] += 1
            running.append(total / max(1, answers))
            done = state["step"] == args.steps
            if state["step"] % 20 == 0 or done:
                state["seconds"] = time.perf_counter() - started
                line = {
                    **state,
                    "loss": round(float(np.mean(running)), 4),
                    "norm": round(norm, 3),
                    "rate": round(factor, 4),
                }
                running.clear()
                if state["step"] % args.save_every == 0 or done:
                    line["heldout"] = round(heldout_loss(model, heldout, 8), 4)
                    teacher.take()
                    partial = checkpoint.with_suffix(".tmp")
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "adam": adam.state_dict(),
                            "muon": list(muon.buffers.items()),
                            "generator": gen.get_state(),
                            "state": state,
                            "config": raw,
                        },
                        partial,
                    )
                    partial.replace(checkpoint)
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()


if __name__ == "__main__":
    main()
