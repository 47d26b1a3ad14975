"""Model names to folders; knows nothing of what is in a folder beyond its config.json and its special tokens.

DIR        a folder with config.json
nano       the model embedded in this package
OWNER/NAME a hub id that is already in the local Hugging Face cache; nothing is ever downloaded from here
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from agens_engine.errors import CheckpointError, UsageError

NANO = "nano"
SHAPE_CARD = "volundr-32b"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def model_name(model: str) -> str:
    """How the model is called in the API: the name itself, or the last part of a path."""
    if model == NANO or (_HUB_ID.fullmatch(model) and not Path(model).expanduser().is_dir()):
        return model
    return Path(model).expanduser().resolve().name or model


def resolve_model(model: str) -> Path:
    """The folder of a model name, which has a config.json.

    raises   UsageError naming what was tried and what to do, CheckpointError for a folder without config.json
    """
    path = Path(model).expanduser()
    if model == NANO and not path.is_dir():
        return _embedded_nano()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise UsageError(f"{model} is a file; --model takes the folder that holds config.json and the weights")
    if model == SHAPE_CARD:
        raise UsageError(
            f"{SHAPE_CARD} is a shape card for `agens plan`, it has no weights; "
            "give a folder with the checkpoint, its hub id after `agens pull`, or nano"
        )
    if _HUB_ID.fullmatch(model):
        return _checked(_cached_snapshot(model))
    raise UsageError(f"there is no model {model!r}; give a folder with a checkpoint, a hub id (OWNER/NAME), or nano")


def added_token_id(folder: Path, text: str) -> int | None:
    """The id of a special token in the folder's tokenizer.json, or None; drafters may name their mask by its text."""
    try:
        tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        return next((int(t["id"]) for t in tokens if t.get("content") == text), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # the tokenizer's own loader says what is wrong with it


def _embedded_nano() -> Path:
    directory = Path(__file__).resolve().parent / "assets" / NANO
    if not (directory / "config.json").is_file():
        raise CheckpointError("the embedded model nano is missing from this installation; reinstall the package")
    return directory


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is not a model checkpoint")
    return directory


def _cached_snapshot(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        raise UsageError(
            f"{repo} is neither a folder here nor in the local model cache; run `agens pull {repo}` first"
        ) from None
    except HFValidationError as error:
        raise UsageError(f"{repo!r} is not a valid hub id: {error}") from None
