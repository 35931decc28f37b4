"""A run's folder: one process at a time, one recipe, and the files that it was started with."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.paths import find_file
from srpo_jax.recipe.recipe import Recipe
from srpo_jax.run.files import write_json, write_whole

LOCK, RECIPE, FILES = "run.lock", "recipe.yaml", "files.json"
_FOLDERS = ("checkpoints", "best", "episodes", "evaluations", "tb", "model")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model")
_BLOCKS, _BLOCK_BYTES = 64, 1 << 20  # what of a large file its fingerprint reads


class RunFolderBusy(RuntimeError):
    """Another process uses the run folder; one line that names it."""

    exit_code = 2


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process alone.

    The kernel frees the lock when its process ends, however it ends.

    Raises:
        RunFolderBusy: Another process holds it; the message names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderBusy(
                f"{folder} is in use by {_owner(path)}: wait for it or stop it, or set another "
                "trainer.out"
            ) from None
        except OSError:  # a file system that has no locks: the record is all there is
            pass
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": started}, file)
        file.flush()
        yield


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"process {owner['pid']} on {owner['host']} since {owner['started']}"
    except (ValueError, KeyError, TypeError):  # it has just taken the lock
        return "another process"


def check_run_folder(recipe: Recipe) -> None:
    """Checks that the recipe's run may use its folder.

    Raises:
        RecipeError: The folder holds a run of another recipe, or a run although
            ``trainer.resume`` is off, or something that is no run's.
    """
    folder = recipe.run_dir
    for name in _FOLDERS:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise RecipeError(f"{folder / name}: a folder of the run is due here, this is a file")
    model = folder / "model"
    if model.is_dir() and any(model.iterdir()) and not (model / "config.json").is_file():
        raise RecipeError(f"{model}: the run's model is due here, this folder holds something else")
    saved = folder / RECIPE
    if not saved.exists():
        return
    if not recipe.trainer.resume:
        raise RecipeError(
            f"{folder} already holds a run: set another trainer.out, or trainer.resume=true"
        )
    change = recipe.first_difference(saved)
    if change is not None:
        raise RecipeError(
            f"{folder} holds a run of another recipe ({change}): set trainer.out to another folder"
        )


def record_run(recipe: Recipe, model_folder: Path) -> None:
    """Writes what the run consists of: its recipe, and fingerprints of the files that it names.

    Args:
        recipe: The run's.
        model_folder: The local folder of its checkpoint.

    Raises:
        RecipeError: A run that was begun here had a file of another content, or one more.
    """
    folder, files = recipe.run_dir, named_files(recipe, model_folder)
    saved, path = {}, folder / FILES
    if path.exists():
        try:
            saved = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise RecipeError(f"{path}: no list of files; remove it to go on without") from None
    found = {}
    for name, file in files.items():
        found[name] = {"path": str(file), "size": file.stat().st_size, "digest": digest(file)}
        old = saved.get(name, found[name])
        if any(old.get(key) != found[name][key] for key in ("size", "digest")):
            raise RecipeError(
                f"{file} ({name}) is not the file that the run in {folder} was begun with: bring "
                "that one back, or set trainer.out to another folder"
            )
    if gone := saved.keys() - found.keys():
        raise RecipeError(
            f"{saved[min(gone)].get('path')} ({min(gone)}) of the run in {folder} is gone: bring "
            "it back, or set trainer.out to another folder"
        )
    write_whole(folder / RECIPE, recipe.dump())
    write_json(path, found)


def recorded_model(folder: Path) -> Path | None:
    """The checkpoint folder that a run was begun with.

    The run's recipe may name it from another working folder.

    Args:
        folder: The run's.

    Returns:
        None where it is not recorded, or not there any more.
    """
    try:
        config = Path(json.loads((folder / FILES).read_text())["model/config.json"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return config.parent if config.is_file() else None


def named_files(recipe: Recipe, model_folder: Path) -> dict[str, Path]:
    """The files that decide what a run does: tasks, a user's code, a corpus, the checkpoint's.

    Args:
        recipe: The run's.
        model_folder: The local folder of its checkpoint.

    Returns:
        Each by the recipe key that names it; those of the checkpoint by ``model/FILE``.
    """
    named = {"tasks.train": recipe.tasks.train.path, "workflow": recipe.workflow.path}
    named |= {f"tasks.eval.{name}": spec.path for name, spec in recipe.tasks.eval.items()}
    if recipe.reward is not None:
        named["reward"] = recipe.reward.path
    if recipe.retriever is not None and recipe.retriever.corpus != "factbook":
        named["retriever.corpus"] = recipe.retriever.corpus
    files = {}
    for name, path in named.items():
        if path is not None:
            code, colon, _ = path.rpartition(":")
            is_code = colon and code.endswith(".py")
            files[name] = find_file(code if is_code else path, recipe.folder)
    for pattern in _MODEL_FILES:
        for file in sorted(model_folder.glob(pattern)):
            files[f"model/{file.name}"] = file
    return files


def digest(path: Path) -> str:
    """A fingerprint of a file's content: of all of it, or, past 64 MiB (weights), of 64 blocks of
    1 MiB that are spread evenly over it: other weights differ in every one of them."""
    size, sum_ = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for block in range(_BLOCKS):
            if size > _BLOCKS * _BLOCK_BYTES:
                file.seek(block * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            sum_.update(file.read(_BLOCK_BYTES))
    return sum_.hexdigest()
