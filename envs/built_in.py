"""The workflows and task sets that recipes know by name: one entry each, loaded when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BuiltInWorkflow:
    """What a name in ``workflow: NAME`` stands for; each text is a ``module:name``.

    workflow    the class
    read_tasks  reads a task file whose rows are of its kind
    script      (task, roles) -> replies of a team that ends well, for a rehearsal
    teacher     replies for the supervised start of a tiny model
    rewrite     changes the teacher's texts, so that no fact is learnt with the form (None: as is)
    example     a problem and its answer
    retriever   whether the class takes one
    """

    workflow: str
    read_tasks: str
    script: str
    teacher: str
    example: tuple[str, str]
    rewrite: str | None = None
    retriever: bool = False


WORKFLOWS: Mapping[str, BuiltInWorkflow] = {
    "math": BuiltInWorkflow(
        workflow="envs.math.workflow:MathWorkflow",
        read_tasks="envs.math.tasks:read_tasks",
        script="envs.math.teacher:script",
        teacher="envs.math.teacher:reply",
        example=("What is 12 + 7 + 30?", "49"),
    ),
    "search": BuiltInWorkflow(
        workflow="envs.search.workflow:SearchWorkflow",
        read_tasks="envs.search.tasks:read_tasks",
        script="envs.search.teacher:script",
        teacher="envs.search.teacher:reply",
        rewrite="envs.search.teacher:invent_names",
        example=("What is the currency code of the country whose capital is N'Djamena?", "XAF"),
        retriever=True,
    ),
}

# Task sets by name; every other name is a generator of reasoning-gym. A builder takes the name,
# data_dir, split, seed, size and the set's own arguments.
TASK_SETS: Mapping[str, str] = {"factbook": "envs.search.factbook_store:search_tasks"}
GENERATED = "envs.math.tasks:math_tasks"


def load(target: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
