"""Engines and learners of one test process that would compile equal programs share them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

ARRAY = (jax.Array, jax.ShapeDtypeStruct)
# Linux gives a process 65,530 memory mappings, and every compiled program takes some: XLA ends the
# process when there is none left.
MOST_MAPPINGS = 30_000
_MAPS = Path("/proc/self/maps")
_memories: list[dict[Any, Any]] = []


def forget_many_programs() -> bool:
    """Drops all compiled programs of this process where they take up many memory mappings."""
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") < MOST_MAPPINGS:
        return False
    for memory in _memories:
        memory.clear()
    jax.clear_caches()
    gc.collect()
    return True


def shared(build: Callable[..., Any]) -> Callable[..., Any]:
    """``build`` with a memory: called again with equal arguments, arrays compared by shape and
    dtype, it gives what it gave before."""
    made: dict[Any, Any] = {}
    _memories.append(made)

    @functools.wraps(build)
    def remembered(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        told = tuple((x.shape, x.dtype) if isinstance(x, ARRAY) else x for x in leaves)
        key = (structure, told, jax.config.jax_enable_x64)
        if key not in made:
            made[key] = build(*args, **kwargs)
        return made[key]

    return remembered
