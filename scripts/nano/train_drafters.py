"""Train nano's drafters on nano's own greedy outputs with the engine's own drafter code.

    python scripts/nano/train_drafters.py data --out runs/d1 --seed 410001 --tokens 300000
    python scripts/nano/train_drafters.py data --out runs/dh --seed 7301 --tokens 60000 --split heldout
    python scripts/nano/train_drafters.py dflash2 --data runs/d1 --heldout runs/dh --steps 4000 --out runs/dflash2
    python scripts/nano/train_drafters.py mtp     --data runs/d1 --heldout runs/dh --steps 4000 --out runs/mtp
    python scripts/nano/train_drafters.py export --dflash2 runs/dflash2 --mtp runs/mtp

Seeded; writes a checkpoint every 50 steps and resumes from it when started again with the same --out. The log is JSON
lines in OUT/log.jsonl; "tokens per step" there is what greedy decoding of the held-out answers with this drafter alone
would emit per verify step, by kind of document ("thinking": those with thinking on, of all kinds).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.model.dflash2 import DFlash2  # noqa: E402
from agens_engine.model.dflash2_config import parse_dflash2_config  # noqa: E402
from agens_engine.model.drafter_ends import TargetEnds  # noqa: E402
from agens_engine.model.mtp import MtpHead  # noqa: E402
from agens_engine.model.mtp_config import parse_mtp_config  # noqa: E402
from agens_engine.model.volundr import Volundr  # noqa: E402
from agens_kernels.ref import attention  # noqa: E402
from scripts.nano.drafter_data import DRAFTER_MIX, TAPS, Documents, make_folder  # noqa: E402
from scripts.nano.drafter_losses import BlockTrainee, ChainTrainee, Trainee  # noqa: E402
from scripts.nano.generation import load_volundr  # noqa: E402
from scripts.nano.train import MUON_DECAY, Muon, rate  # noqa: E402

NANO = ROOT / "agens_engine" / "assets" / "nano"
MAX_BYTES = 6 * 10**6  # of both drafters together
MASK_TOKEN_ID = 767
CHAIN_STEPS = 5
ADAM_LR = {"codebook": 4e-3, "vector": 2e-3, "coefficients": 1e-3}
SHARED = {
    "dtype": "bfloat16",
    "hidden_size": 192,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "vocab_size": 768,
}


def dflash2_config() -> dict[str, Any]:
    """config.json of nano's DFlash2: two layers, small MLPs (a block should cost a fraction of nano's own step)."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        **SHARED,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "is_causal": False,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 512,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dflash_config": {
            "block_size": 8,
            "target_layer_ids": list(TAPS),
            "mask_token_id": MASK_TOKEN_ID,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 64,
            "selector_top_k": 16,
        },
    }


def mtp_config() -> dict[str, Any]:
    """config.json of nano's MTP head."""
    return {
        "architectures": ["VolundrMTP"],
        "model_type": "volundr_mtp",
        **SHARED,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "num_draft_steps": CHAIN_STEPS,
    }


def initialise(network: nn.Module, final_norm: torch.Tensor, seed: int) -> None:
    """Fan-in scaled matrices, pass-through convolutions, a selector that says nothing, the target's final norm."""
    gen = torch.Generator().manual_seed(seed)

    def normal(p: torch.Tensor, std: float) -> None:
        p.copy_(torch.randn(p.shape, generator=gen) * std)

    with torch.no_grad():
        for name, p in network.named_parameters():
            if name == "norm.weight":
                p.copy_(final_norm if isinstance(network, MtpHead) else 1.0 + final_norm)
            elif name.endswith("base_kernel"):
                p.zero_()
                p[:, 0] = 1.0
            elif name.endswith("kernel_projection.weight"):
                normal(p, 0.002)
            elif name.endswith("predecessor_codebook"):
                normal(p, p.shape[1] ** -0.5)
            elif name.endswith("successor_codebook"):
                p.zero_()
            elif p.ndim == 2:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                normal(p, scale * p.shape[1] ** -0.5)


def optimisers(network: nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices, AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    groups: dict[str, list[nn.Parameter]] = {key: [] for key in ADAM_LR}
    for name, p in network.named_parameters():
        if name.endswith("_codebook"):
            groups["codebook"].append(p)
        elif name.endswith("kernel_projection.weight"):
            groups["coefficients"].append(p)
        elif p.ndim == 2:
            matrices.append(p)
        else:
            groups["vector"].append(p)
    adam = [{"params": ps, "lr": ADAM_LR[key], "base": ADAM_LR[key]} for key, ps in groups.items() if ps]
    return Muon(matrices), torch.optim.AdamW(adam, betas=(0.9, 0.97), weight_decay=0.01)


def trainee_of(which: str, target: Volundr) -> tuple[Trainee, dict[str, Any]]:
    """The fresh network with its loss, and its config.json."""
    ends = TargetEnds.of(target)
    if which == "dflash2":
        raw = dflash2_config()
        return BlockTrainee(DFlash2(parse_dflash2_config(raw, {}, target.config)), ends), raw
    raw = mtp_config()
    return ChainTrainee(MtpHead(parse_mtp_config(raw, {}, target.config)), ends, CHAIN_STEPS), raw


@torch.inference_mode()
def tokens_per_step(trainee: Trainee, documents: Documents) -> dict[str, float]:
    """Emitted tokens per verify step by kind, over the answers nano wrote; "all" over all of them."""
    emitted: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    docs = [doc for doc in range(len(documents)) if len(documents.last_turn(doc))]
    docs.sort(key=lambda doc: len(documents.column(doc, "ids")))
    for at in range(0, len(docs), 8):
        part = docs[at : at + 8]
        turns = [documents.last_turn(doc) for doc in part]
        batch = documents.batch(part, turns, trainee.num_slots)
        right = (trainee.drafts(batch) == batch.targets) & batch.valid
        accepted = right.long().cumprod(-1).sum(-1)
        for doc, turn, row in zip(part, turns, accepted.tolist(), strict=True):
            taken, anchor = 0, 0
            while anchor < len(turn):
                anchor += row[anchor] + 1
                taken += 1
            names = [documents.kind_names[documents.kinds[doc]], "all", *["thinking"][: int(documents.thinking[doc])]]
            for name in names:
                emitted[name] += len(turn)
                steps[name] += taken
    return {name: round(emitted[name] / steps[name], 3) for name in sorted(emitted)}


def train(args: argparse.Namespace) -> None:
    target = load_volundr(args.model).requires_grad_(False)
    trainee, raw = trainee_of(args.command, target)
    network = trainee.network
    initialise(network, target.model.norm.weight, args.seed)
    muon, adam = optimisers(network)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"
    state: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0, "anchors": 0, "seconds": 0.0}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        muon.buffers = {tuple(shape): buffer for shape, buffer in saved["muon"]}
        state = saved["state"]
        print(f"resumed at step {state['step']}")
    print(f"{sum(p.numel() for p in network.parameters())} parameters")

    documents, heldout = Documents(args.data), Documents([args.heldout])

    def epoch(number: int) -> Any:
        return documents.epoch(args.seed, number, args.docs, args.anchors, trainee.num_slots)

    source = epoch(state["epoch"])
    for _ in range(state["batch"]):
        next(source)
    started = time.perf_counter() - state["seconds"]
    running: list[float] = []
    with open(args.out / "log.jsonl", "a", encoding="utf-8") as log:
        while state["step"] < args.steps:
            batch = next(source, None)
            if batch is None:
                state |= {"epoch": state["epoch"] + 1, "batch": 0}
                source = epoch(state["epoch"])
                continue
            factor = rate(state["step"], args.steps, args.warmup, args.decay_share)
            loss = trainee.loss(batch)
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(network.parameters(), 1.0))
            for group in adam.param_groups:
                group["lr"] = group["base"] * factor
            muon.step(args.muon_lr * factor, MUON_DECAY)
            adam.step()
            network.zero_grad(set_to_none=True)
            state |= {
                "step": state["step"] + 1,
                "batch": state["batch"] + 1,
                "anchors": state["anchors"] + int(batch.valid[..., 0].sum()),
            }
            running.append(float(loss.detach()))
            done = state["step"] == args.steps
            if state["step"] % 50 == 0 or done:
                state["seconds"] = time.perf_counter() - started
                line = {**state, "loss": round(float(np.mean(running)), 4), "norm": round(norm, 3)}
                line["rate"] = round(factor, 4)
                running.clear()
                save(checkpoint, network, adam, muon, state, raw)
                if state["step"] % args.evaluate_every == 0 or done:
                    line["tokens per step"] = tokens_per_step(trainee, heldout)
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()


def save(
    checkpoint: Path,
    network: nn.Module,
    adam: torch.optim.AdamW,
    muon: Muon,
    state: dict[str, Any],
    raw: dict[str, Any],
) -> None:
    partial = checkpoint.with_suffix(".tmp")
    torch.save(
        {
            "model": network.state_dict(),
            "adam": adam.state_dict(),
            "muon": list(muon.buffers.items()),
            "state": state,
            "config": raw,
        },
        partial,
    )
    partial.replace(checkpoint)


def export(args: argparse.Namespace) -> None:
    """Both checkpoints into the published layout, bf16."""
    size = 0
    for run, folder, prefix in ((args.dflash2, "drafter", ""), (args.mtp, "mtp", "mtp.")):
        saved = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
        weights = {prefix + name: value.bfloat16() for name, value in saved["model"].items()}
        out = args.out / folder
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(saved["config"], indent=2) + "\n", encoding="utf-8")
        size += (written := (out / "model.safetensors").stat().st_size)
        print(f"{out / 'model.safetensors'}: {written:,} bytes, step {saved['state']['step']}")
    if size > MAX_BYTES:
        raise SystemExit(f"the drafters have {size} bytes, more than the {MAX_BYTES} the package allows")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the drafters of nano.")
    parser.add_argument("--model", type=Path, default=NANO, help="nano's folder")
    parser.add_argument("--threads", type=int, default=1)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="write documents that nano finished")
    data.add_argument("--seed", type=int, required=True)
    data.add_argument("--tokens", type=int, required=True)
    data.add_argument("--split", choices=("train", "heldout"), default="train")
    data.add_argument("--out", type=Path, required=True)
    for name, docs, anchors in (("dflash2", 16, 12), ("mtp", 16, 20)):
        trainer = commands.add_parser(name, help=f"train {name}")
        trainer.add_argument("--data", type=Path, nargs="+", required=True)
        trainer.add_argument("--heldout", type=Path, required=True)
        trainer.add_argument("--out", type=Path, required=True)
        trainer.add_argument("--steps", type=int, required=True)
        trainer.add_argument("--docs", type=int, default=docs, help="documents per step")
        trainer.add_argument("--anchors", type=int, default=anchors, help="anchors per document")
        trainer.add_argument("--muon-lr", type=float, default=0.02)
        trainer.add_argument("--warmup", type=int, default=40)
        trainer.add_argument("--decay-share", type=float, default=0.7)
        trainer.add_argument("--evaluate-every", type=int, default=250)
        trainer.add_argument("--seed", type=int, default=1)
    out = commands.add_parser("export", help="write the trained drafters into nano's folder")
    out.add_argument("--dflash2", type=Path, required=True)
    out.add_argument("--mtp", type=Path, required=True)
    out.add_argument("--out", type=Path, default=NANO)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.command == "data":
        target = load_volundr(args.model).requires_grad_(False)
        # rows are short: one tile, nothing gathered; set here, for this process, and not by what tests import
        attention.TILE_ELEMENTS, attention.GATHER_FACTOR = 1 << 24, 1 << 24
        made = make_folder(target, args.out, seed=args.seed, split=args.split, num_tokens=args.tokens, mix=DRAFTER_MIX)
        print(f"{made} tokens -> {args.out}")
    elif args.command == "export":
        export(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
