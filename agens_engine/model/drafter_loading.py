"""From a drafter's folder to a ready network: names through the alias table, tensors accounted for, target checked.

    find_drafters    what was asked for, or the subfolders of the model      ──► folders
    check_drafters   headers only: names, shapes, target, mask               before anything is planned or loaded
    load_*           the same checks, then the weights

Sources: spec drafters.md A.2 and B.1. Weights are widened to float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from agens_planner.checkpoint import DRAFTER_FOLDERS, MTP_FOLDERS

# published name -> ours, each rule applied once, in this order
DFLASH2_ALIASES: tuple[tuple[str, str], ...] = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$", r"\1"),
)
MTP_PREFIXES = ("mtp.", "model.mtp.")
_DTYPE = torch.float32
_SWITCH_WORDS = ("auto", "on", "off")
Adopt = Callable[[str, torch.Tensor], torch.Tensor]  # (plan line, tensor) -> tensor


@dataclass(frozen=True)
class DrafterFolders:
    """Where the drafters of a run lie; None: there is none, or it is switched off."""

    mtp: Path | None = None
    drafter: Path | None = None


def find_drafters(model_folder: Path, *, mtp: str | None, drafter: str | None) -> DrafterFolders:
    """Folders of both drafters.

    mtp, drafter   a folder, off, or auto (also on and None): the model's own, in a subfolder or, for the MTP head,
                   among the model's tensors
    """
    own_mtp = _folder(model_folder, mtp, MTP_FOLDERS)
    if own_mtp is None and mtp != "off":
        with open_checkpoint(model_folder) as opened:
            own_mtp = model_folder if opened.mtp else None
    return DrafterFolders(own_mtp, _folder(model_folder, drafter, DRAFTER_FOLDERS))


def _folder(model_folder: Path, choice: str | None, places: Sequence[str]) -> Path | None:
    if choice == "off":
        return None
    if choice is not None and choice not in _SWITCH_WORDS:
        return Path(choice).expanduser()
    return next((model_folder / place for place in places if (model_folder / place / "config.json").is_file()), None)


def check_drafters(folders: DrafterFolders, target: ModelConfig, *, resolve_token: TokenResolver | None = None) -> None:
    """Account for every tensor of the drafters without loading one. Raises as load_dflash2 and load_mtp do."""
    if folders.drafter is not None:
        with _open(folders.drafter, "drafter", "--drafter") as opened:
            _dflash2(opened, target, resolve_token)
    if folders.mtp is not None:
        with _open(folders.mtp, "MTP head", "--mtp") as opened:
            _mtp(opened, target, None)


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
    adopt: Adopt | None = None,
) -> DFlash2:
    """Load a DFlash2 or plain DFlash drafter.

    resolve_token   text of a special token -> id or None, for a drafter that names its mask by text
    adopt           called with (plan line, tensor) for every weight, to count it; may refuse
    raises          CheckpointError listing every missing, unknown and misshapen tensor; ConfigError naming the key, or
                    both numbers where the drafter does not fit the target
    """
    with _open(folder, "drafter", "--drafter") as opened:
        model, stored = _dflash2(opened, target, resolve_token)
        _fill(model, stored, device, adopt, lambda name: "host.codebooks" if "codebook" in name else "drafter.weights")
    return model.requires_grad_(False).eval()


def _dflash2(
    opened: Checkpoint, target: ModelConfig, resolve_token: TokenResolver | None
) -> tuple[DFlash2, Checkpoint]:
    """The network without weights, and the files it fits."""
    stored = _renamed(opened, {**opened.tensors, **opened.mtp, **opened.vision}, dflash2_name)
    shapes = {name: entry.shape for name, entry in stored.tensors.items()}
    where = str(opened.folder / "config.json")
    config = parse_dflash2_config(stored.config, shapes, target, resolve_token=resolve_token, where=where)
    with torch.device("meta"):
        model = DFlash2(config)
    _verify(model, stored)
    return model, stored


def load_mtp(
    folder: str | Path,
    target: ModelConfig,
    *,
    device: torch.device,
    options: MtpOptions | None = None,
    adopt: Adopt | None = None,
) -> MtpHead:
    """Load an MTP head from a folder of its own, or from a model folder that carries one beside its other tensors.

    raises   CheckpointError listing every missing, unknown and misshapen tensor (in a model folder only names under the
             MTP prefixes count), and as load_dflash2
    """
    with _open(folder, "MTP head", "--mtp") as opened:
        model, stored = _mtp(opened, target, options)
        _fill(model, stored, device, adopt, lambda name: "mtp.weights")
    if model.config.options.norm_form == "plain":
        for module in model.modules():
            if isinstance(module, GemmaNorm):
                module.weight = nn.Parameter(module.weight - 1.0)
    return model.requires_grad_(False).eval()


def _mtp(opened: Checkpoint, target: ModelConfig, options: MtpOptions | None) -> tuple[MtpHead, Checkpoint]:
    everything = {**opened.tensors, **opened.mtp, **opened.vision}
    carried = "model.embed_tokens.weight" in everything
    ours = {name: e for name, e in everything.items() if not carried or name.startswith(MTP_PREFIXES)}
    if not any(name.startswith(MTP_PREFIXES) for name in ours):
        raise CheckpointError(
            f"{opened.folder} has no tensor named {' or '.join(p + '*' for p in MTP_PREFIXES)}: no MTP head"
        )
    stored = _renamed(opened, ours, mtp_name)
    shapes = {name: entry.shape for name, entry in stored.tensors.items()}
    config = parse_mtp_config(stored.config, shapes, target, options=options, where=str(opened.folder / "config.json"))
    with torch.device("meta"):
        model = MtpHead(config)
    _verify(model, stored)
    return model, stored


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


def _verify(model: nn.Module, stored: Checkpoint) -> None:
    stored.verify({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})


def _fill(
    model: nn.Module, stored: Checkpoint, device: torch.device, adopt: Adopt | None, line: Callable[[str], str]
) -> None:
    """Put each tensor in place, one at a time."""
    for name, _ in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        weight = stored.read(name, _DTYPE).to(device)
        if adopt is not None:
            weight = adopt(line(name), weight)
        setattr(model.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))
