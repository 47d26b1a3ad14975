"""`agens pull REPO`: download a model into the local Hugging Face cache."""

from __future__ import annotations

from agens_engine.errors import AgensError, UsageError

# weights, their index, configuration, tokenizer and template; not the same weights in other formats
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*"]


def run_pull(repo: str, revision: str | None) -> None:
    """Prints the folder; raises UsageError for a wrong id, AgensError when the download fails."""
    import httpx2  # the HTTP client of huggingface_hub
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise AgensError("cannot download: HF_HUB_OFFLINE is set; unset it, or copy the model folder here yourself")
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=_WANTED)
    except HFValidationError:
        raise UsageError(f"{repo!r} is not a hub id; it looks like OWNER/NAME") from None
    except GatedRepoError:
        raise AgensError(f"{repo} asks you to accept its terms: do so on its page, then `hf auth login`") from None
    except RepositoryNotFoundError:
        message = f"{repo} does not exist on the hub, or is private; check the name or `hf auth login`"
        raise AgensError(message) from None
    except RevisionNotFoundError:
        raise AgensError(f"{repo} has no revision {revision}") from None
    except (LocalEntryNotFoundError, httpx2.TransportError, ConnectionError, TimeoutError) as error:
        raise AgensError(
            f"the hub cannot be reached ({_root_cause(error)}); check the network and proxy, and run the command "
            "again: finished files are kept"
        ) from error
    except HfHubHTTPError as error:
        raise AgensError(f"the hub refused the download of {repo}: {error}") from error
    except OSError as error:
        raise AgensError(f"cannot store {repo}: {error}") from error
    print(folder)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__
