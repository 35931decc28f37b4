"""Task sets of a recipe, by name, file or user function, and which task a step uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from envs.built_in import GENERATED, TASK_SETS, WORKFLOWS, load
from envs.text_files import short
from envs.workflow import Task
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.paths import find_file
from srpo_jax.recipe.plugins import call_with_args, load_object, place_in
from srpo_jax.recipe.recipe import Recipe, TaskSet

DATA_DIR = Path("data") / "tasks"  # where generated task sets are kept


class DataError(ValueError):
    """Tasks that cannot be used; one line naming the task set, and the file and line if any."""

    exit_code = 2


@dataclass(frozen=True)
class RecipeTasks:
    """The tasks of a recipe: for training, and for each benchmark."""

    train: Sequence[Task]
    benchmarks: dict[str, Sequence[Task]]


def task_sets(recipe: Recipe, data_dir: Path = DATA_DIR, *, train: bool = True) -> RecipeTasks:
    """All task sets of a recipe, that for training only where ``train``. Raises DataError."""
    # A user's own workflow reads problems, or questions where it searches.
    kind = recipe.workflow.name or ("math" if recipe.retriever is None else "search")

    def find(spec: TaskSet, where: str, split: str) -> Sequence[Task]:
        return resolve(spec, where, recipe.folder, data_dir, split=split, kind=kind)

    return RecipeTasks(
        find(recipe.tasks.train, "tasks.train", "train") if train else (),
        {
            name: find(spec, f"tasks.eval.{name}", "test")
            for name, spec in recipe.tasks.eval.items()
        },
    )


def resolve(
    spec: TaskSet,
    where: str,
    folder: Path,
    data_dir: Path = DATA_DIR,
    *,
    split: str = "train",
    kind: str = "math",
) -> Sequence[Task]:
    """The tasks of one set, read by index; ``split`` where the recipe names none.

    Args:
        spec: The set's section of a recipe.
        where: The section's key, which errors name.
        folder: The recipe's own, beside which files are looked up.
        data_dir: The folder that keeps generated sets, which are made once.
        split: The split where the section names none.
        kind: The built-in workflow whose task files these are.

    Raises:
        DataError: The tasks cannot be used.
    """
    try:
        if spec.name is not None:
            tasks = _named(spec.name, spec, spec.split or split, data_dir)
        elif ".py:" in (path := str(spec.path)):
            tasks = _from_function(path, spec, spec.split or split, folder)
        else:
            tasks = _from_file(path, spec, folder, kind)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not len(tasks):
        raise DataError(f"{where}: no tasks in {spec.path or spec.name}")
    return tasks


def check_prompts(sets: RecipeTasks, count: Callable[[str], int], limit: int) -> None:
    """Refuses tasks whose own prompt is longer than ``limit`` tokens. Raises DataError."""
    named = {"tasks.train": sets.train} | {f"tasks.eval.{k}": v for k, v in sets.benchmarks.items()}
    for where, tasks in named.items():
        for task in tasks:
            if (length := count(task.prompt)) > limit:
                raise DataError(
                    f"{where}: the prompt of task {task.id} has {length} tokens, the limit is "
                    f"{limit} (rollout.prompt_tokens)"
                )


class TaskStream:
    """Which tasks a step trains on: task i of step n is the shuffled stream's item n * B + i.

    Every epoch has its own order. The position is the step, so a resumed run goes on where it was
    without stored state, on any number of processes.
    """

    def __init__(self, tasks: Sequence[Task], tasks_per_step: int, seed: int):
        # Not at the top: importing grain loads jax.
        import grain

        self._tasks = tasks
        self._per_step = tasks_per_step
        self._order = grain.MapDataset.range(len(tasks)).seed(seed).shuffle().repeat()

    def step(self, step: int) -> list[Task]:
        """The B tasks of a step; steps count from 0."""
        first = step * self._per_step
        return [self._tasks[int(self._order[first + i])] for i in range(self._per_step)]


def _named(name: str, spec: TaskSet, split: str, data_dir: Path) -> Sequence[Task]:
    make: Callable[..., Sequence[Task]] = load(TASK_SETS.get(name, GENERATED))
    builder = name.removeprefix("reasoning_gym/")
    arguments: dict[str, Any] = {"split": split, "seed": spec.seed, "size": spec.size}
    for key in arguments.keys() & spec.args.keys():
        raise DataError(f"args.{key}: `{key}` stands beside `args`, not in it")
    try:
        return make(builder, data_dir=data_dir, **arguments, **spec.args)
    except TypeError as error:
        raise DataError(f"{name}: args: {error}") from error


def _from_file(path: str, spec: TaskSet, folder: Path, kind: str) -> Sequence[Task]:
    read_tasks: Callable[[Path], list[Task]] = load(WORKFLOWS[kind].read_tasks)
    if spec.split is not None or spec.args:
        raise DataError(f"{path}: a file has no `split` and takes no `args`")
    return read_tasks(find_file(path, folder))[: spec.size]


def _from_function(path: str, spec: TaskSet, split: str, folder: Path) -> Sequence[Task]:
    """What a user's function returns; ``split``, ``seed``, ``size`` are given if it takes them."""
    function = load_object(path, folder)
    if not callable(function):
        raise DataError(f"{path} is not a function, got {short(function)}")
    offered = {"split": split, "seed": spec.seed, "size": spec.size}
    names = inspect.signature(function).parameters
    args = {name: value for name, value in offered.items() if name in names} | spec.args
    try:
        made = call_with_args(function, args, set(names), "args")
        if not isinstance(made, Iterable):
            raise RecipeError(f"a sequence of tasks is due, got {short(made)}")
        tasks = list(islice(made, spec.size))
    except Exception as error:
        cause = error.__cause__ or error
        file = find_file(path.rpartition(":")[0], folder)
        place = place_in(file, cause)
        if place == str(file):  # refused before the function ran, or what it returned is
            raise DataError(f"{path}: {error}") from error
        raise DataError(f"{place}: {type(cause).__name__}: {cause}") from error
    items: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if problem := _problem(task):
            raise DataError(f"{path}: item {index} {problem}")
        earlier = items.setdefault(task.id, index)
        if earlier != index:
            raise DataError(
                f"{path}: item {index} has the id {task.id!r} of item {earlier}; ids must differ"
            )
    return tasks


def _problem(task: Any) -> str | None:
    """What is wrong with a user's task, None if nothing is: texts are due, and none of them empty.

    A number is no answer: whether 0.50 is to be matched as "0.5" is the user's to say.
    """
    if not isinstance(task, Task):
        return f"is {type(task).__name__}, an envs.workflow.Task is due"
    for name in ("id", "prompt"):
        if not _is_text(getattr(task, name)):
            return f"has no text for its {name}: {short(getattr(task, name))}"
    answers = task.answer if isinstance(task.answer, tuple) else (task.answer,)
    if not answers or not all(map(_is_text, answers)):
        return f"needs text or a tuple of texts for its answer, got {short(task.answer)}"
    if not isinstance(task.source, str):
        return f"has no text for its source: {short(task.source)}"
    if not isinstance(task.extra, Mapping):
        return f"has no mapping for its extra: {short(task.extra)}"
    return None


def _is_text(value: Any) -> bool:
    """Text that is not blank, and that tokenizers and files take: no half of a surrogate pair."""
    whole = isinstance(value, str) and value.encode(errors="ignore").decode() == value
    return whole and not value.isspace() and value != ""
