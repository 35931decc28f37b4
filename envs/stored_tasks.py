"""Generated tasks kept as ArrayRecord by a tensorflow-datasets builder, without TensorFlow."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow_datasets as tfds

from envs.workflow import Task


class StoredTasks(Sequence[Task]):
    """Tasks read by index; ``to_task`` makes one from a row's texts."""

    def __init__(
        self,
        source: Sequence[Mapping[str, bytes]],
        to_task: Callable[[Mapping[str, str]], Task],
    ):
        self._source, self._to_task = source, to_task

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        row = self._source[int(index) % len(self)]
        return self._to_task({name: text.decode() for name, text in row.items()})


def store(
    builder: type[tfds.core.GeneratorBasedBuilder],
    config: tfds.core.BuilderConfig,
    data_dir: str | os.PathLike,
    split: str,
    to_task: Callable[[Mapping[str, str]], Task],
) -> StoredTasks:
    """The builder's tasks, written under ``data_dir`` unless they are there."""
    tfds.disable_progress_bar()

    def prepared() -> tfds.core.GeneratorBasedBuilder:
        made = builder(config=config, data_dir=os.fspath(data_dir), file_format="array_record")
        made.download_and_prepare()
        return made

    with _quiet():
        try:
            made = prepared()
        except FileExistsError:  # another process was faster: its files are the same
            made = prepared()
    return StoredTasks(made.as_data_source(split=split), to_task)


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
