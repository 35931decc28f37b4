"""Math tasks: reasoning-gym generators kept as ArrayRecord, and files of the verl family.

``math_tasks`` generates a set once (a tensorflow-datasets builder; TensorFlow itself is not needed)
and reads it by index ever after. ``read_tasks`` reads JSONL and Parquet files.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from envs.math.instructions import without_instructions
from envs.stored_tasks import store
from envs.task_rows import TaskError, read_file, read_row, unpacked
from envs.text_files import short
from envs.workflow import Task

SPLITS = ("train", "validation", "test")
ARITHMETIC = "arithmetic"

# A problem's split follows from its text, so no problem is in two splits, whatever the seeds.
_BUCKETS = {"test": (0,), "validation": (1,), "train": range(2, 10)}
_BLOCK = 1024  # problems generated at a time
_TRIES = 100  # generated problems for each wanted one, at most


def math_tasks(
    name: str = ARITHMETIC,
    *,
    size: int | None,
    data_dir: str | os.PathLike,
    split: str = "train",
    seed: int = 0,
    **settings: Any,
) -> Sequence[Task]:
    """``size`` tasks of a generator, made on the first call and read from ``data_dir`` afterwards.

    ``arithmetic`` is chain_sum with three terms of one or two digits, additions only unless
    ``subtraction=True``. Where a problem is a bare expression, ``task.extra["expression"]`` holds
    it ("12+7+30"). Splits share no problem: a problem's split is a hash of its text, and different
    splits and seeds draw from different streams.

    Args:
        name: ``arithmetic``, or any reasoning-gym data set whose answer is the one right answer.
        size: How many tasks.
        data_dir: The folder that keeps generated sets.
        split: train, validation or test.
        seed: Of the draws.
        **settings: The generator's own configuration.

    Raises:
        TaskError: (a ValueError) An argument does not fit, or the generator has too few problems.
    """
    _check_generator(name, settings)
    if split not in SPLITS:
        raise TaskError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
    if size is None:
        raise TaskError(f"{name} is generated: say how many tasks with `size`")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise TaskError(f"size: need an integer of at least 1, got {size!r}")
    draw = _Draw(name, split, seed, size, dict(settings))
    identity = json.dumps(draw.settings, sort_keys=True, default=str)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return store(
        f"{name}-{split}-seed{seed}-size{size}-{digest}", draw.tasks,
        size=size, split=split, data_dir=data_dir,
    )  # fmt: skip


@dataclass(frozen=True)
class _Draw:
    """What tasks are drawn: from which generator, with which settings."""

    generator: str
    split: str
    seed: int
    size: int
    settings: Mapping[str, Any]

    def tasks(self) -> Iterator[Task]:
        for i, item in enumerate(_generate(self)):
            expression = item["metadata"].get("expression")
            yield Task(
                id=f"{self.generator}/{self.split}/{self.seed}/{i}",
                prompt=item["question"].strip(),
                answer=item["answer"],
                source=self.generator,
                extra={"expression": expression.replace(" ", "")} if expression else {},
            )


def _check_generator(name: str, settings: Mapping[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if name == ARITHMETIC:
        known = ["subtraction", "min_terms", "max_terms", "min_digits", "max_digits"]
    elif name in DATASETS:
        config_class = DATASETS[name][1]
        known = [f.name for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")]
    else:
        if "/" in name or "." in name:
            raise TaskError(
                f"tasks: no generator {name!r}; a file ends in .jsonl or .parquet, a function is "
                "my_tasks.py:function"
            )
        raise TaskError(f"tasks: no generator {name!r}{_nearest(name, [ARITHMETIC, *DATASETS])}")
    for key in settings:
        if key not in known:
            raise TaskError(f"tasks: {name} has no setting {key!r}{_nearest(key, known)}")
    if not isinstance(settings.get("subtraction", False), bool):
        value = settings["subtraction"]  # a text "no" would be true
        raise TaskError(f"tasks: subtraction: need true or false, got {short(value)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _generate(config: _Draw) -> Iterator[dict[str, Any]]:
    """``config.size`` items of the split."""
    settings = dict(config.settings)
    name, subtraction = config.generator, True
    if name == ARITHMETIC:
        name = "chain_sum"
        subtraction = settings.pop("subtraction", False)
        settings = {"min_terms": 3, "max_terms": 3, "max_digits": 2, **settings}
    # reasoning-gym seeds item i with seed + i: neighbouring seeds would share almost all items.
    identity = f"{config.generator}/{config.split}/{config.seed}"
    base = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:6])
    found = 0
    for block in range(0, config.size * _TRIES + _BLOCK, _BLOCK):
        for item in _block(name, settings, base + block):
            bucket = hashlib.sha256(item["question"].encode()).digest()[0] % 10
            if bucket not in _BUCKETS[config.split]:
                continue
            if not subtraction and "-" in item["metadata"]["expression"]:
                continue
            if not isinstance(item["answer"], str):
                raise TaskError(f"tasks: {name} has no single right answer to grade against")
            yield item
            found += 1
            if found == config.size:
                return
    raise TaskError(
        f"tasks: {config.generator} has only {found} problems for split {config.split!r} in "
        f"{block + _BLOCK} draws, {config.size} are wanted"
    )


def _block(name: str, settings: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    try:
        yield from reasoning_gym.create_dataset(name, seed=seed, size=_BLOCK, **settings)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {error}".strip()  # the settings, in the generator's words
        raise TaskError(f"tasks: {name}: {reason}") from error


# ---- files --------------------------------------------------------------------------------------


QUESTION = ("env_kwargs.question", "prompt", "problem", "question")
GOLD = ("env_kwargs.ground_truth", "reward_model.ground_truth", "answer")


def read_tasks(path: str | os.PathLike, *, source: str | None = None) -> list[Task]:
    r"""Problems of a ``.jsonl`` or ``.parquet`` file in the layouts of the verl family.

    The first of QUESTION and of GOLD that a row has (see ``envs.task_rows.read_row``). Sentences
    such as "Let's think step by step and output the final answer within \boxed{}." are dropped,
    because the roles' prompts give their own. A gold is text, a number, or a list of accepted ones
    (also as JSON text: ``'["34"]'``).

    Args:
        path: The file.
        source: The tasks' source; None takes it from the rows.

    Raises:
        TaskError: With file and line (Parquet: row, from 1), also for an id of an earlier row.
    """
    path = Path(path)

    def to_task(row: Mapping[str, Any], number: int) -> Task:
        found = read_row(row, number, source or path.stem, QUESTION, GOLD)
        problem = without_instructions(found.question)
        return Task(found.id, problem, _gold(found.gold), source or found.source)

    return read_file(path, to_task)


def _gold(gold: Any) -> str | tuple[str, ...]:
    gold = unpacked(gold)
    values = gold if isinstance(gold, list) else [gold]
    texts = [text for v in values if (text := _gold_text(v)) is not None and text.strip()]
    if not values or len(texts) < len(values):
        raise ValueError(f"gold answer: need text or a number, got {short(gold)}")
    return tuple(texts) if isinstance(gold, list) else texts[0]


def _gold_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):  # 27.0 is 27; 1e22 is written out
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
