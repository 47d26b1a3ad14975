"""From a drafter's folder to a ready network: names through the alias table, tensors accounted for, target checked.

Sources: spec drafters.md A.2 and B.1. Weights are widened to float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from agens_engine.errors import CheckpointError
from agens_engine.model.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from agens_engine.model.config import ModelConfig
from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.dflash2_config import TokenResolver, parse_dflash2_config
from agens_engine.model.layers import GemmaNorm
from agens_engine.model.mtp import MtpHead
from agens_engine.model.mtp_config import MtpOptions, parse_mtp_config

# published name -> ours, each rule applied once, in this order
DFLASH2_ALIASES: tuple[tuple[str, str], ...] = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$", r"\1"),
)
MTP_PREFIXES = ("mtp.", "model.mtp.")
_DTYPE = torch.float32


def dflash2_name(name: str) -> str:
    """The canonical name of a DFlash2 tensor (spec A.2)."""
    for pattern, replacement in DFLASH2_ALIASES:
        name = re.sub(pattern, replacement, name)
    return name


def mtp_name(name: str) -> str:
    """The name of an MTP tensor without its prefix; other names unchanged."""
    for prefix in MTP_PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def load_dflash2(
    folder: str | Path,
    target: ModelConfig,
    *,
    device: torch.device,
    resolve_token: TokenResolver | None = None,
) -> DFlash2:
    """Load a DFlash2 or plain DFlash drafter.

    resolve_token   text of a special token -> id or None, for a drafter that names its mask by text
    raises          CheckpointError listing every missing, unknown and misshapen tensor; ConfigError naming the key, or
                    both numbers where the drafter does not fit the target
    """
    with _open(folder, "drafter", "--drafter") as opened:
        stored = _renamed(opened, {**opened.tensors, **opened.mtp, **opened.vision}, dflash2_name)
        shapes = {name: entry.shape for name, entry in stored.tensors.items()}
        where = str(Path(folder) / "config.json")
        config = parse_dflash2_config(stored.config, shapes, target, resolve_token=resolve_token, where=where)
        with torch.device("meta"):
            model = DFlash2(config)
        _fill(model, stored, device)
    return model.requires_grad_(False).eval()


def load_mtp(
    folder: str | Path,
    target: ModelConfig,
    *,
    device: torch.device,
    options: MtpOptions | None = None,
) -> MtpHead:
    """Load an MTP head from a folder of its own, or from a model folder that carries one beside its other tensors.

    raises   CheckpointError listing every missing, unknown and misshapen tensor (in a model folder only names under the
             MTP prefixes count), and as load_dflash2
    """
    with _open(folder, "MTP head", "--mtp") as opened:
        everything = {**opened.tensors, **opened.mtp, **opened.vision}
        carried = "model.embed_tokens.weight" in everything
        ours = {name: e for name, e in everything.items() if not carried or name.startswith(MTP_PREFIXES)}
        if not any(name.startswith(MTP_PREFIXES) for name in ours):
            raise CheckpointError(
                f"{folder} has no tensor named {' or '.join(p + '*' for p in MTP_PREFIXES)}: no MTP head"
            )
        stored = _renamed(opened, ours, mtp_name)
        shapes = {name: entry.shape for name, entry in stored.tensors.items()}
        where = str(Path(folder) / "config.json")
        config = parse_mtp_config(stored.config, shapes, target, options=options, where=where)
        with torch.device("meta"):
            model = MtpHead(config)
        _fill(model, stored, device)
    if config.options.norm_form == "plain":
        for module in model.modules():
            if isinstance(module, GemmaNorm):
                module.weight = nn.Parameter(module.weight - 1.0)
    return model.requires_grad_(False).eval()


def _open(folder: str | Path, what: str, flag: str) -> Checkpoint:
    if not Path(folder).is_dir():
        raise CheckpointError(f"{what} folder {folder} does not exist; check the path given with {flag}")
    return open_checkpoint(folder)


def _renamed(opened: Checkpoint, entries: Mapping[str, TensorEntry], rename: Callable[[str], str]) -> Checkpoint:
    """The same files as a checkpoint whose tensors carry canonical names."""
    tensors: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for name, entry in entries.items():
        ours = rename(name)
        if ours in tensors:
            raise CheckpointError(f"{opened.folder}: {origin[ours]} and {name} are both {ours}; keep one of them")
        tensors[ours], origin[ours] = replace(entry, name=ours), name
    return replace(opened, tensors=tensors, mtp={}, vision={})


def _fill(model: nn.Module, stored: Checkpoint, device: torch.device) -> None:
    """Verify names and shapes, then put each tensor in place, one at a time."""
    stored.verify({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    for name, _ in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(path), leaf, nn.Parameter(stored.read(name, _DTYPE).to(device), requires_grad=False)
        )
