"""Factbook questions as a stored task set."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

from envs.search.factbook import TABLE, Split, select
from envs.stored_tasks import store
from envs.workflow import Task


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

    Args:
        name: ``factbook``, the one set that there is.
        data_dir: The folder that keeps generated sets.
        split: train or test; they share no country of a first hop.
        hops: 2 or 3.
        fields: Keeps the questions that ask for one of these facts.
        seed: Of the order.
        size: So many of the order (None: all).

    Raises:
        ValueError: An argument does not fit.
    """
    if name != "factbook":
        raise ValueError(f"the search task set must be factbook, got {name!r}")
    if fields is not None and not isinstance(fields, str):
        fields = tuple(fields)
    chosen = select(split, hops=hops, fields=fields, seed=seed, size=size)
    digest = hashlib.sha256(json.dumps(fields).encode() + TABLE.read_bytes()).hexdigest()[:8]
    count = "all" if size is None else size
    return store(
        f"factbook-{split}-hops{hops}-seed{seed}-size{count}-{digest}",
        lambda: [question.task() for question in chosen],
        size=len(chosen), split=split, data_dir=data_dir,
    )  # fmt: skip
