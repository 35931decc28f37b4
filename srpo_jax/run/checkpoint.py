"""Checkpoints of a run: parameters, optimiser state, counters, through Orbax.

"Latest" and "best" are kept in folders of their own. Orbax's v1 API is used here alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from srpo_jax.run.files import write_json
from srpo_jax.run.processes import Processes

CHECKSUMS = "checksums.json"  # beside the files of each checkpoint
DAMAGED = ".damaged"  # the suffix of a checkpoint that was put aside


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written, or none can be read; one line that names it."""

    exit_code = 1


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are not those that were written; one line that names the file."""


class Checkpoints:
    """Saves ``state`` pytrees by step under ``folder`` and keeps the newest ``keep``.

    Saving is asynchronous; a checkpoint that a kill cut short is never seen again. A save that
    failed is raised by the next call, as CheckpointFailed.

    Args:
        folder: Made where there is none. All processes of a run share it.
        keep: How many checkpoints stay; older ones are removed.
        processes: Of the run, which call everything together (None: those that jax knows).
    """

    def __init__(self, folder: str | Path, keep: int, processes: Processes | None = None):
        self._folder, self._keep = Path(folder).absolute(), keep
        self._processes = processes or Processes()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._checkpointer = self._open()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None

    def _open(self) -> ocp.training.Checkpointer:
        return ocp.training.Checkpointer(
            self._folder,
            save_decision_policy=ocp.training.save_decision_policies.AnySavePolicy([]),
            preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The newest complete step, or None."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    @property
    def used(self) -> bool:
        """Whether anything was ever saved here, damaged checkpoints among it."""
        return self.latest is not None or any(self._damaged())

    def _damaged(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{DAMAGED}"))

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts saving; returns once the arrays may change.

        Args:
            step: The checkpoint's number. One that is there is replaced.
            state: A pytree of arrays.
            meta: A small record that JSON can hold.

        Raises:
            CheckpointFailed: The save before this one failed, or this one cannot begin (the disk
                has too little space).
        """
        self.wait()
        with self._saved_as(step):
            # What is written is compressed, by little; half of it will certainly not do.
            size, free = tree_bytes(state), shutil.disk_usage(self._folder).free
            if free < size / 2:
                reason = f"{os.strerror(errno.ENOSPC)}: {size:.2g} bytes, {free:.2g} are free"
                raise OSError(errno.ENOSPC, reason)
            response = self._checkpointer.save_async(
                step, state, force=True, overwrite=True, custom_metadata=meta
            )
        self._saving = step, self._thread.submit(self._finish, step, response)

    def _finish(self, step: int, response: Any) -> None:
        response.result()  # frees the save's own thread and event loop too
        folder = self._folder / str(step)
        if self._processes.first:
            write_json(folder / CHECKSUMS, checksums(folder))

    def poll(self) -> None:
        """Raises CheckpointFailed where a save has failed by now."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits for what is being saved. Raises CheckpointFailed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            step, future = saving
            with self._saved_as(step):
                future.result()

    @contextlib.contextmanager
    def _saved_as(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore have no class of their own for these
            raise CheckpointFailed(
                f"{self._folder / str(step)}: this checkpoint could not be saved: "
                f"{_short(error)}; the ones before it are there"
            ) from error

    def load(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads one checkpoint.

        Args:
            step: Its number.
            like: A pytree whose shapes, dtypes and shardings the state gets.

        Returns:
            The state and its meta.

        Raises:
            DamagedCheckpoint: A file's checksum is not the one written with it. A checkpoint
                without checksums (killed right after its save, or of an older version) is damaged
                if it does not load.
        """
        self.wait()
        folder = self._folder / str(step)
        checked = self._verified(folder)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        try:
            state = self._checkpointer.load(step, abstract)
            return state, dict(self._checkpointer.metadata(step).custom_metadata or {})
        except Exception as error:
            if checked:
                raise
            raise DamagedCheckpoint(f"{folder}: cannot be read: {_short(error)}") from error

    def _verified(self, folder: Path) -> bool:
        """``verify`` by the first process, for all."""
        said = ""
        if self._processes.first:
            try:
                said = "checked" if verify(folder) else "unchecked"
            except DamagedCheckpoint as error:
                said = f"damaged {error}"
        kind, _, damage = self._processes.agree(said)[0].partition(" ")
        if kind == "damaged":
            raise DamagedCheckpoint(damage)
        return kind == "checked"

    def load_newest(
        self, like: Any, on_damage: Callable[[str], None]
    ) -> tuple[int, Any, dict[str, Any]]:
        """Reads the newest intact checkpoint.

        Args:
            like: As of ``load``.
            on_damage: Told, in one line, of each newer one that is damaged and was put aside.

        Returns:
            Its step, state and meta.

        Raises:
            CheckpointFailed: There is none: all are damaged, or nothing was ever saved.
        """
        while (step := self.latest) is not None:
            try:
                return step, *self.load(step, like)
            except DamagedCheckpoint as error:
                aside = self._put_aside(step)
                on_damage(f"{error}; it is now {aside.name}, and the one before it is used")
        damaged = ", ".join(path.name for path in self._damaged())
        raise CheckpointFailed(
            f"{self._folder}: no intact checkpoint is left ({damaged or 'none was saved'}); remove "
            f"{self._folder.parent} to start over"
        )

    def _put_aside(self, step: int) -> Path:
        """Renames a step, so that it counts neither as the newest nor among those kept."""
        aside = self._folder / f"{step}{DAMAGED}"
        number = 1
        while aside.exists():
            number += 1
            aside = self._folder / f"{step}.{number}{DAMAGED}"
        self._checkpointer.close()
        self._processes.agree("closed")
        if self._processes.first:
            (self._folder / str(step)).rename(aside)
        self._processes.agree("renamed")
        self._checkpointer = self._open()
        return aside

    def close(self) -> None:
        """Waits for what is being saved. Raises CheckpointFailed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            # Orbax raises a failed save here once more; `wait` has said so already.
            with contextlib.suppress(Exception):
                self._checkpointer.close()


def tree_bytes(state: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def checksums(folder: Path) -> dict[str, list[int]]:
    """[size in bytes, CRC-32] of every file under ``folder``, by its path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(folder)): [path.stat().st_size, _crc(path)] for path in files}


def verify(folder: Path) -> bool:
    """Compares a checkpoint's files with its checksums.

    Returns:
        Whether there are checksums to compare with.

    Raises:
        DamagedCheckpoint: A file is missing or is not the one that was written.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return False
    try:
        written = json.loads(path.read_text())
        files = [(folder / name, size, crc) for name, (size, crc) in written.items()]
    except (ValueError, TypeError, AttributeError):
        raise DamagedCheckpoint(f"{path}: no list of checksums") from None
    for file, size, crc in files:
        if not file.is_file():
            raise DamagedCheckpoint(f"{file}: this file is missing")
        if file.stat().st_size != size or _crc(file) != crc:
            raise DamagedCheckpoint(f"{file}: its checksum is not the one that was written with it")
    return True


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)


def _short(error: BaseException) -> str:
    """What the system says, where TensorStore's message quotes it; else the error's kind and the
    start of its message, in one line."""
    text = " ".join(str(error).split())
    said = [os.strerror(number) for number in _SYSTEM_ERRORS if os.strerror(number) in text]
    return said[0] if said else f"{type(error).__name__}: {text[:300]}"


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


# Each of Orbax's threads logs the error that it then raises, with its traceback.
logging.getLogger("absl").addFilter(_is_news)
