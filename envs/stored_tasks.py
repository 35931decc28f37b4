"""Generated tasks kept as ArrayRecord by a tensorflow-datasets builder, without TensorFlow."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from envs.task_rows import TaskError
from envs.workflow import Task


@dataclass(kw_only=True)
class GeneratedConfig(tfds.core.BuilderConfig):
    """One task set: ``name`` says all that its tasks depend on, ``make`` generates them."""

    split: str = "train"
    make: Callable[[], Iterable[Task]] = tuple


class Generated(tfds.core.GeneratorBasedBuilder):
    """Generated tasks: id, prompt and source as texts, answer and extra as JSON."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # The inherited lookup imports importlib_resources, which tensorflow-datasets does not require.
    code_path = Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description="Generated tasks with one right answer each.",
            features=tfds.features.FeaturesDict(
                {name: text() for name in ("id", "prompt", "answer", "source", "extra")}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {self.builder_config.split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for i, task in enumerate(self.builder_config.make()):
            yield i, _row(task)


def _row(task: Task) -> dict[str, str]:
    return {
        "id": task.id,
        "prompt": task.prompt,
        "answer": json.dumps(task.answer, ensure_ascii=False),
        "source": task.source,
        "extra": json.dumps(dict(task.extra), ensure_ascii=False),
    }


def _task(row: Mapping[str, bytes]) -> Task:
    texts = {name: text.decode() for name, text in row.items()}
    answer = json.loads(texts.pop("answer"))
    return Task(
        answer=tuple(answer) if isinstance(answer, list) else answer,
        extra=json.loads(texts.pop("extra")),
        **texts,
    )


class StoredTasks(Sequence[Task]):
    """Tasks read by index from a source of rows.

    Raises:
        TaskError: A row cannot be read; the line names ``folder``.
    """

    def __init__(self, source: Sequence[Mapping[str, bytes]], folder: Path):
        self._source, self._folder = source, folder

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        index = int(index) % len(self)
        try:
            return _task(self._source[index])
        except Exception as error:  # what the library raises for a damaged file has no one class
            raise _damaged(self._folder, f"task {index}: {_reason(error)}") from error


def store(
    name: str,
    make: Callable[[], Iterable[Task]],
    *,
    size: int,
    split: str,
    data_dir: str | os.PathLike,
) -> StoredTasks:
    """A generated task set, written under ``data_dir`` unless it is there.

    Args:
        name: What the set is called on disk: it must differ between sets of other tasks.
        make: Generates the tasks, in order; called only if they are not there yet.
        size: How many tasks it generates.
        split: The split's name.
        data_dir: The folder that keeps generated sets.

    Raises:
        TaskError: The tasks cannot be written, or what is there cannot be read.
    """
    tfds.disable_progress_bar()
    config = GeneratedConfig(name=name, split=split, make=make)
    folder = Path(data_dir) / Generated.name / name

    def opened() -> Generated:
        try:
            return Generated(
                config=config, data_dir=os.fspath(data_dir), file_format="array_record"
            )
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
    return StoredTasks(source, folder)


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
