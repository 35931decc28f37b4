"""Checkpoint folders by path or by hub name."""

from __future__ import annotations

import re
from pathlib import Path

from models.checkpoint_files import GGUF
from models.config import CheckpointError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What no hub repository's name begins or ends with, but paths here do.
_FOLDERS = ("assets/", "checkpoints/", "configs/", "data/", "runs/")
_FILES = (".json", ".jsonl", ".parquet", ".py", ".safetensors", ".yaml", ".yml")
_WEIGHTS = ["*.safetensors"]
_OTHERS = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]


def is_hub_name(text: str) -> bool:
    """Whether this may be a hub repository's name (organisation/model), and does not look like a
    path: ``./x``, ``/x``, ``~/x``, ``a/b/c``, ``data/x`` and ``x/y.yaml`` do."""
    looks_like_path = text.startswith(_FOLDERS) or text.endswith(_FILES)
    return _HUB_NAME.fullmatch(text) is not None and not looks_like_path


def resolve_checkpoint(
    path_or_hub_name: str | Path, *, revision: str | None = None, weights: bool = True
) -> Path:
    """The local folder of a checkpoint; a hub repository is downloaded once into the hub's cache.

    A local folder takes precedence over a hub repository of the same name. HF_HOME, HF_TOKEN,
    HF_ENDPOINT and HF_HUB_OFFLINE are honoured.

    Args:
        path_or_hub_name: A folder, or a hub name such as ``Qwen/Qwen3-4B``.
        revision: Branch, tag or commit of a hub name.
        weights: Whether the tensors are downloaded too.

    Raises:
        CheckpointError: No such folder, no such repository or revision, or no way to reach the hub.
    """
    folder = local_folder(path_or_hub_name)
    if folder is not None:
        return folder
    name = str(path_or_hub_name)
    if not is_hub_name(name):
        raise CheckpointError(f"{name}: no such folder (a hub name is organisation/model)")
    return Path(_hub_snapshot(name, revision, [*_OTHERS, *(_WEIGHTS if weights else [])]))


def local_folder(path_or_hub_name: str | Path) -> Path | None:
    """The local checkpoint folder of this name; None where nothing has this name here.

    Raises:
        CheckpointError: What has this name is no folder, or cannot be reached.
    """
    name = str(path_or_hub_name)
    try:
        path = Path(path_or_hub_name).expanduser()
        if path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such home
        raise CheckpointError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if is_file:
        kind = GGUF if path.suffix == ".gguf" else "a file; it must be the folder of a checkpoint"
        raise CheckpointError(f"{name}: {kind}")
    if path.is_symlink():
        raise CheckpointError(f"{name}: a link to {path.readlink()}, which leads to nothing")
    return None


def _hub_snapshot(name: str, revision: str | None, patterns: list[str]) -> str:
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    what = name if revision is None else f"{name} at {revision}"
    try:
        return snapshot_download(name, revision=revision, allow_patterns=patterns)
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
    except OSError as error:
        reason = f"cannot be kept in {constants.HF_HUB_CACHE}: {error.strerror or error}"
    raise CheckpointError(f"{what}: {reason}")
