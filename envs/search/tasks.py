"""Search tasks from files of the verl family: golds are ``{"target": [..]}``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.task_rows import read_file, read_row, unpacked
from envs.workflow import Task

QUESTION = ("env_kwargs.question", "extra_info.question", "question", "prompt")
GOLD = ("env_kwargs.ground_truth", "reward_model.ground_truth", "golden_answers", "answer")


def read_tasks(path: str | os.PathLike) -> list[Task]:
    """Questions of a ``.jsonl`` or ``.parquet`` file in the layouts of the verl family.

    The first of QUESTION and of GOLD that a row has (see ``envs.task_rows.read_row``). A missing
    question mark is added. A gold is ``{"target": [..]}``, a list of texts (also as JSON text), or
    one text.

    Raises:
        TaskError: With file and line (Parquet: row, from 1), also for an id of an earlier row.
    """
    path = Path(path)

    def to_task(row: Mapping[str, Any], number: int) -> Task:
        found = read_row(row, number, path.stem, QUESTION, GOLD)
        question = found.question.strip()
        if not question.endswith("?"):
            question += "?"
        return Task(found.id, question, _golds(found.gold), found.source)

    return read_file(path, to_task)


def _golds(gold: Any) -> tuple[str, ...]:
    if isinstance(gold, Mapping):
        gold = gold.get("target")
    gold = unpacked(gold)
    texts = [gold] if isinstance(gold, str) else gold
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise ValueError(f"no gold answers ({', '.join(GOLD)}: texts are due)")
    return tuple(dict.fromkeys(texts))
