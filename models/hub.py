"""Checkpoint folders by path or by hub name."""

from __future__ import annotations

import re
from pathlib import Path

from models.config import CheckpointError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = ["*.safetensors"]
_OTHERS = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]


def resolve_checkpoint(
    path_or_hub_name: str | Path, *, revision: str | None = None, weights: bool = True
) -> Path:
    """A local folder: the one named, or a hub repository's, downloaded once into the hub's cache,
    without the tensors unless ``weights``.

    A local folder wins over a hub repository of the same name. HF_HOME, HF_TOKEN, HF_ENDPOINT and
    HF_HUB_OFFLINE are honoured; revision is a branch, tag or commit of a hub name.

    Raises:
      CheckpointError: no such folder, no such repository or revision, or no way to reach the hub.
    """
    folder = Path(path_or_hub_name).expanduser()
    if folder.is_dir():
        return folder
    name = str(path_or_hub_name)
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder (a hub name is organisation/model)")
    return Path(_download(name, revision, [*_OTHERS, *(_WEIGHTS if weights else [])]))


def _download(name: str, revision: str | None, wanted: list[str]) -> str:
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    what = name if revision is None else f"{name} at {revision}"
    try:
        return snapshot_download(name, revision=revision, allow_patterns=wanted)
    except errors.GatedRepoError:
        reason = "access is gated: accept its terms on the hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = "the hub has no such revision"
    except errors.RepositoryNotFoundError:
        reason = "no such local folder, and the hub has no such repository (or HF_TOKEN is needed)"
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, httpx.HTTPError) as error:
        if constants.HF_HUB_OFFLINE:
            reason = "not in the local cache, and HF_HUB_OFFLINE is set"
        else:
            cause = type(error.__cause__ or error).__name__
            reason = f"not in the local cache, and {constants.ENDPOINT} cannot be reached ({cause})"
    raise CheckpointError(f"{what}: {reason}")
