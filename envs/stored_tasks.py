"""Generated tasks kept as ArrayRecord by a tensorflow-datasets builder, without TensorFlow."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from envs.task_rows import TaskError
from envs.workflow import Task


class StoredTasks(Sequence[Task]):
    """Tasks read by index; ``to_task`` makes one from a row's texts.

    Raises TaskError naming ``folder`` for a row that cannot be read.
    """

    def __init__(
        self,
        source: Sequence[Mapping[str, bytes]],
        to_task: Callable[[Mapping[str, str]], Task],
        folder: Path,
    ):
        self._source, self._to_task, self._folder = source, to_task, folder

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        index = int(index) % len(self)
        try:
            row = self._source[index]
            return self._to_task({name: text.decode() for name, text in row.items()})
        except Exception as error:  # what the library raises for a damaged file has no one class
            raise _damaged(self._folder, f"task {index}: {_reason(error)}") from error


def store(
    builder: type[tfds.core.GeneratorBasedBuilder],
    config: tfds.core.BuilderConfig,
    data_dir: str | os.PathLike,
    split: str,
    size: int,
    to_task: Callable[[Mapping[str, str]], Task],
) -> StoredTasks:
    """The builder's ``size`` tasks, written under ``data_dir`` unless they are there.

    Raises TaskError when they cannot be written, or when what is there cannot be read.
    """
    tfds.disable_progress_bar()
    folder = Path(data_dir) / builder.name / config.name

    def opened() -> tfds.core.GeneratorBasedBuilder:
        try:
            return builder(config=config, data_dir=os.fspath(data_dir), file_format="array_record")
        except Exception as error:
            raise _damaged(folder, _reason(error)) from error

    with _quiet():
        made = opened()
        try:
            made.download_and_prepare()
        except FileExistsError:  # another process was faster: its files are the same
            made = opened()
            made.download_and_prepare()
        except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError to ArrayRecord
            raise TaskError(f"{folder}: tasks cannot be written: {_reason(error)}") from error
        try:
            source = made.as_data_source(split=split)
        except Exception as error:
            raise _damaged(folder, _reason(error)) from error
    if len(source) != size:
        raise _damaged(folder, f"{len(source)} tasks are there, {size} are due")
    return StoredTasks(source, to_task, folder)


def _damaged(folder: Path, reason: str) -> TaskError:
    return TaskError(
        f"{folder}: the generated tasks there are damaged, remove this folder to have them made "
        f"again ({reason})"
    )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back the builder's messages about custom configurations and downloads."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
