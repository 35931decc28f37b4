"""Factbook questions kept as ArrayRecord by a tensorflow-datasets builder, without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorflow_datasets as tfds

from envs.search.factbook import TABLE, Split, select
from envs.stored_tasks import StoredTasks, store
from envs.workflow import Task


@dataclass(kw_only=True)
class FactbookConfig(tfds.core.BuilderConfig):
    """Which questions: the arguments of ``select``. The name holds them, and the table's digest."""

    name: str = ""
    split: Split = "train"
    hops: int = 2
    fields: Sequence[str] | None = None
    seed: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        identity = json.dumps(self.fields).encode() + TABLE.read_bytes()
        digest = hashlib.sha256(identity).hexdigest()[:8]
        size = "all" if self.size is None else self.size
        self.name = f"{self.split}-hops{self.hops}-seed{self.seed}-size{size}-{digest}"


class Factbook(tfds.core.GeneratorBasedBuilder):
    """Questions of one split: id, prompt, and answers and extra as JSON."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # The inherited lookup imports importlib_resources, which tensorflow-datasets does not require.
    code_path = Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description="Multi-hop questions about countries with one exact answer each.",
            features=tfds.features.FeaturesDict(
                {name: text() for name in ("id", "prompt", "answers", "extra")}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager) -> dict[str, Iterator]:
        return {self.builder_config.split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        config = self.builder_config
        chosen = select(
            config.split,
            hops=config.hops,
            fields=config.fields,
            seed=config.seed,
            size=config.size,
        )
        for i, question in enumerate(chosen):
            task = question.task()
            yield (
                i,
                {
                    "id": task.id,
                    "prompt": task.prompt,
                    "answers": json.dumps(task.answers, ensure_ascii=False),
                    "extra": json.dumps(task.extra, ensure_ascii=False),
                },
            )


def search_tasks(
    name: str = "factbook",
    *,
    data_dir: str | os.PathLike,
    split: Split = "train",
    hops: int = 2,
    fields: Sequence[str] | None = None,
    seed: int = 0,
    size: int | None = None,
) -> Sequence[Task]:
    """Factbook questions as tasks, written on the first call and read from ``data_dir`` afterwards.

    ``hops``: 2 or 3. ``fields`` keeps the questions that ask for one of these facts. ``size`` takes
    so many (None: all) of the order drawn from ``seed``. Splits are train and test. Raises
    ValueError for an argument that does not fit.
    """
    if name != "factbook":
        raise ValueError(f"no search task set {name!r}; there is: factbook")
    if fields is not None and not isinstance(fields, str):
        fields = tuple(fields)
    return stored_tasks(data_dir, split=split, hops=hops, fields=fields, seed=seed, size=size)


def stored_tasks(
    data_dir: str | os.PathLike,
    *,
    split: Split,
    hops: int,
    fields: Sequence[str] | None,
    seed: int,
    size: int | None,
) -> StoredTasks:
    """The questions that ``select`` gives, written under ``data_dir`` unless they are there."""
    # Refuses bad arguments first.
    chosen = select(split, hops=hops, fields=fields, seed=seed, size=size)
    config = FactbookConfig(split=split, hops=hops, fields=fields, seed=seed, size=size)
    return store(Factbook, config, data_dir, split, len(chosen), _stored_task)


def _stored_task(row: Mapping[str, str]) -> Task:
    return Task(
        id=row["id"],
        prompt=row["prompt"],
        answer=tuple(json.loads(row["answers"])),
        source="factbook",
        extra=json.loads(row["extra"]),
    )
