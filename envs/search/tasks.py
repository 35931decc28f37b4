"""Search tasks from files of the verl family: golds are ``{"target": [..]}``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.task_rows import first, read_file, sections, source_and_id, unpacked
from envs.workflow import Task


def read_tasks(path: str | os.PathLike) -> list[Task]:
    """Tasks of a ``.jsonl`` or ``.parquet`` file.

    Question: ``env_kwargs.question``, else ``extra_info.question``, ``question``, or the last user
    turn of ``prompt``; a missing question mark is added. Golds: ``env_kwargs.ground_truth``, else
    ``reward_model.ground_truth``, ``golden_answers`` or ``answer``: ``{"target": [..]}``, a list of
    texts (also as JSON text), or one text. Source: ``data_source``, else the file's name. Id: the
    source and ``id``, else ``extra_info.index``, else the line. Raises TaskError with the file and
    the line (Parquet: row, from 1), also for an id that an earlier row has.
    """
    path = Path(path)
    return read_file(path, lambda row, number: _task(row, number, path.stem))


def _task(row: Mapping[str, Any], number: int, stem: str) -> Task:
    kwargs, reward, extra = sections(row)
    source, identity = source_and_id(row, number, stem)
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
    gold = first(
        kwargs.get("ground_truth"),
        reward.get("ground_truth"),
        row.get("golden_answers"),
        row.get("answer"),
    )
    return Task(
        id=identity,
        prompt=question if question.endswith("?") else question + "?",
        answer=_golds(gold),
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
    gold = unpacked(gold)
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
