"""Checkpoints of a run: parameters, optimiser state, counters, through Orbax.

"Latest" and "best" are kept in folders of their own. Orbax's v1 API is used here alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """Saves ``state`` pytrees by step under ``folder`` and keeps the newest ``keep``.

    Saving is asynchronous; a checkpoint that a kill cut short is never seen again.
    """

    def __init__(self, folder: str | Path, keep: int):
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            save_decision_policy=ocp.training.save_decision_policies.AnySavePolicy([]),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The newest complete step, or None."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts saving ``state`` under ``step``; ``meta`` is a small JSON-able record."""
        self._checkpointer.save_async(step, state, force=True, overwrite=True, custom_metadata=meta)

    def load(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of ``step`` with the shapes, dtypes and shardings of ``like``, and its meta."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        state = self._checkpointer.load(step, abstract)
        return state, dict(self._checkpointer.metadata(step).custom_metadata or {})

    def close(self) -> None:
        """Waits for what is being saved."""
        self._checkpointer.close()


def write_json(path: Path, value: Any) -> None:
    """Writes a small file at once: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value) + "\n")
    partial.replace(path)
