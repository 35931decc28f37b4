"""What a run shows while it goes: bars on a terminal, one line a step anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_SHOWN = {
    "reward": "reward/mean",
    "eval": "eval/macro/avg",
    "mean K": "events/mean_k",
    "length": "response/length",
    "clip": "update/clip_fraction",
    "grad": "update/grad_norm",
}


class RunProgress:
    """A context manager around a run's progress display."""

    def __init__(self, steps: int, start: int, console: Console | None):
        self._console = console or Console(stderr=True, highlight=False)
        self._steps = steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = (
            self._progress.add_task("train", total=steps, completed=start) if steps else None
        )

    def __enter__(self) -> RunProgress:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    @contextlib.contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar for one part of a step; yields the function that advances it."""
        task = self._progress.add_task(f"  {name}", total=total)
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """Advances the run's bar and prints the step's figures."""
        figures = "  ".join(
            f"{label} {metrics[name]:.3f}" for label, name in _SHOWN.items() if name in metrics
        )
        self._console.print(f"step {done}/{self._steps}  {figures}", soft_wrap=True)
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
