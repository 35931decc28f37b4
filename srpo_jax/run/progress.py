"""What a run shows while it goes: bars on a terminal, lines at least every 30 s anywhere else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY = 30.0  # seconds between two lines
REPEAT_WARNING = 50  # steps until a warning that still holds is said again
_RECENT = 10  # steps that the remaining time is estimated from

_SHOWN = {
    "reward": "reward/mean",
    "eval": "eval/macro/avg",
    "mean K": "events/mean_k",
    "length": "response/length",
    "clip": "update/clip_fraction",
    "grad": "update/grad_norm",
}
_SECONDS = {
    "rollout": "time/rollout",
    "update": "time/update",
    "evaluation": "time/evaluation",
}


@dataclass
class _Phase:
    """One part of a step in progress; ``tokens`` counts what was generated before it began."""

    name: str
    total: int
    unit: str
    started: float
    tokens: int
    done: int = 0


class RunProgress:
    """A context manager around a run's progress display.

    Args:
        steps: Training steps of the whole run; 0: an evaluation alone.
        start: Those that are complete.
        console: Where it is shown; None: stderr.
        clock: Gives seconds.
        every: The longest silence, in seconds, where there is no terminal.

    Attributes:
        generated: Gives the tokens generated so far, by any phase.
    """

    def __init__(
        self,
        steps: int,
        start: int,
        console: Console | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY,
    ):
        self._console = console or Console(stderr=True, highlight=False)
        self._steps, self._done = steps, start
        self._clock, self._every = clock, every
        self._begun = self._said = self._stepped = clock()
        self._step_seconds: list[float] = []
        self._timed = 0
        self._phase: _Phase | None = None
        self._starting: str | None = None
        self._warned: dict[str, int] = {}
        self.generated: Callable[[], int] = lambda: 0
        self._over = threading.Event()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = (
            self._progress.add_task("train", total=steps, completed=start, rate="")
            if steps
            else None
        )

    def __enter__(self) -> RunProgress:
        self._progress.__enter__()
        if not self._console.is_terminal:
            threading.Thread(target=self._keep_speaking, daemon=True, name="progress").start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._progress.__exit__(*error)

    def starting(self, what: str) -> None:
        """Says which part of the start-up comes next."""
        self._starting = what
        self.note(f"{what} ...")

    def resumed(self, done: int) -> None:
        """The run goes on after step ``done``."""
        self._done = done
        if self._task is not None:
            self._progress.update(self._task, completed=done)
        self.note(f"resumed at step {done}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int, unit: str = "episodes") -> Iterator[Callable[[], None]]:
        """Shows one part of a step.

        Args:
            name: What it is called.
            total: How many units it has.
            unit: What these are.

        Yields:
            The function that advances it by one.
        """
        self._starting = None
        self._phase = phase = _Phase(name, total, unit, self._clock(), self._tokens())
        task = self._progress.add_task(f"  {name}", total=total, rate="")

        def advance() -> None:
            phase.done += 1
            self._progress.update(task, advance=1, rate=self._rate(phase))
            self.tick()

        try:
            yield advance
        finally:
            self._phase = None
            self._progress.remove_task(task)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """Advances the run's bar and prints the step's figures.

        Args:
            done: Steps that are complete.
            metrics: Those of the last one.
        """
        now = self._clock()
        # The first step of a process compiles its programs: it counts while there is no other.
        recent = [] if self._timed == 1 else self._step_seconds
        self._step_seconds = [*recent, now - self._stepped][-_RECENT:]
        self._timed += 1
        self._stepped, self._done = now, done
        figures = [
            f"{label} {metrics[name]:.3f}"
            for label, name in _SHOWN.items()
            if metrics.get(name) is not None
        ]
        figures += [
            f"{label} {metrics[name]:.1f} s" for label, name in _SECONDS.items() if name in metrics
        ]
        if "time/tokens_per_second" in metrics:
            figures.append(f"{metrics['time/tokens_per_second']:.0f} tok/s")
        self.note("  ".join([f"step {done}/{self._steps}", *figures, *self._eta()]))
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def note(self, text: str) -> None:
        """Prints a line."""
        self._said = self._clock()
        self._console.print(text, markup=False, soft_wrap=True)

    def warn(self, kind: str, text: str) -> None:
        """Says a warning once, and again after REPEAT_WARNING steps if it still comes.

        Args:
            kind: What is not said again and again.
            text: One line.
        """
        last = self._warned.get(kind)
        if last is None or self._done - last >= REPEAT_WARNING:
            self._warned[kind] = self._done
            self.note(f"warning: {text}")

    def tick(self) -> None:
        """Where nothing was said for long and there is no terminal, says what is going on."""
        if self._console.is_terminal or self._clock() - self._said < self._every:
            return
        phase, place = self._phase, f"step {min(self._done + 1, self._steps)}/{self._steps}  "
        if phase is not None:
            what = [f"{phase.name}: {phase.done} of {phase.total} {phase.unit}", self._rate(phase)]
        else:
            what = [f"{self._starting} ..." if self._starting else "working"]
        since = span(self._clock() - self._begun)
        shown = "" if self._starting or not self._steps else place
        self.note("  ".join(filter(None, [f"{since}  {shown}{what[0]}", *what[1:], *self._eta()])))

    def _keep_speaking(self) -> None:
        while not self._over.wait(self._every / 30):
            self.tick()

    def _tokens(self) -> int:
        return self.generated()

    def _rate(self, phase: _Phase) -> str:
        new, seconds = self._tokens() - phase.tokens, self._clock() - phase.started
        return f"{new / seconds:.0f} tok/s" if new and seconds > 0 else ""

    def _eta(self) -> list[str]:
        """The time that the remaining steps take at the pace of the last ones."""
        left, seconds = self._steps - self._done, self._step_seconds
        return [f"eta {span(left * sum(seconds) / len(seconds))}"] if left > 0 and seconds else []


def span(seconds: float) -> str:
    """A time span as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
