"""Search tasks from files of the verl family: golds are ``{"target": [..]}``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.task_rows import TaskError, first, read_rows
from envs.workflow import Task


def read_tasks(path: str | os.PathLike) -> list[Task]:
    """Tasks of a ``.jsonl`` or ``.parquet`` file.

    Question: ``env_kwargs.question``, else ``extra_info.question``, ``question``, or the last user
    turn of ``prompt``; a missing question mark is added. Golds: ``env_kwargs.ground_truth``, else
    ``reward_model.ground_truth``, ``golden_answers`` or ``answer``: ``{"target": [..]}``, a list of
    texts, or one text. Source: ``data_source``, else the file's name. Raises TaskError with the
    file and the line (Parquet: row, from 1).
    """
    path = Path(path)
    tasks = []
    for where, number, row in read_rows(path):
        try:
            tasks.append(_task(row, number, path.stem))
        except ValueError as error:
            raise TaskError(f"{where}: {error}") from None
    if not tasks:
        raise TaskError(f"{path}: no tasks")
    return tasks


def _task(row: Any, number: int, stem: str) -> Task:
    if not isinstance(row, Mapping):
        raise ValueError(f"need an object, got {type(row).__name__}")
    sections = {name: row.get(name) or {} for name in ("env_kwargs", "reward_model", "extra_info")}
    for name, value in sections.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}: need an object, got {type(value).__name__}")
    kwargs, reward, extra = sections.values()
    question = first(
        kwargs.get("question"),
        extra.get("question"),
        row.get("question"),
        _last_user_turn(row.get("prompt")),
    )
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            "no question (env_kwargs.question, extra_info.question, question or prompt)"
        )
    question = question.strip()
    golds = _golds(
        first(
            kwargs.get("ground_truth"),
            reward.get("ground_truth"),
            row.get("golden_answers"),
            row.get("answer"),
        )
    )
    source = str(first(row.get("data_source"), kwargs.get("data_source"), stem))
    index = first(row.get("id"), extra.get("index"), number)
    return Task(
        id=f"{source}/{index}",
        prompt=question if question.endswith("?") else question + "?",
        answer=golds,
        source=source,
    )


def _last_user_turn(prompt: Any) -> Any:
    if not isinstance(prompt, list):
        return prompt
    turns = [turn for turn in prompt if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return turns[-1].get("content") if turns else None


def _golds(gold: Any) -> tuple[str, ...]:
    if isinstance(gold, Mapping):
        gold = gold.get("target")
    texts = [gold] if isinstance(gold, str) else gold
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise ValueError(
            'no gold answers (reward_model.ground_truth {"target": [..]}, golden_answers or answer)'
        )
    return tuple(dict.fromkeys(texts))
