"""What a run writes as it goes: metrics as JSON lines and TensorBoard events, and its episodes."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from srpo_jax.run.files import naming, write_whole

METRICS_FILE = "metrics.jsonl"
EPISODES_FOLDER = "episodes"
VERDICTS_FOLDER = "evaluations"


class RunFileError(ValueError):
    """A file of a run that holds something else than it should; one line that names it."""

    exit_code = 2


class MetricLogger:
    """Appends one flat row of numbers a step to ``metrics.jsonl`` and to TensorBoard (``tb/``).

    Floats are written so that they read back to the same bits; NaN and infinity become null.

    Args:
        run_dir: The run's folder, made where there is none.
    """

    def __init__(self, run_dir: str | Path):
        self._dir = Path(run_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._events: _EventFile | None = None
        self._purge_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step's metrics.

        Args:
            step: Complete steps.
            metrics: Python numbers, or numpy and jax scalars.

        Raises:
            OSError: It names the file.
        """
        row = {"step": step} | plain_row(metrics)
        path = self._dir / METRICS_FILE
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._events is None:
            self._events = _EventFile(self._dir / "tb", self._purge_step)
        self._events.add(step, row)

    def truncate_to(self, step: int) -> None:
        """Drops what was logged after ``step``: a resumed run writes those steps again."""
        self.close()
        path = self._dir / METRICS_FILE
        if path.exists():
            rows = [row for row in read_metrics(self._dir) if row["step"] <= step]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._purge_step = step + 1

    def close(self) -> None:
        """Closes the event file; another ``log`` begins a new one."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


class _EventFile:
    """A TensorBoard event file. tensorboardX's own SummaryWriter writes in a thread, where a full
    disk ends the thread and then, its queue full, stops the run without a word."""

    def __init__(self, folder: Path, purge_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder, self._event = folder, Event
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Files are named by the second; the suffix keeps a quick resume's file apart.
            self._file = EventsWriter(str(folder / "events"), f".{purge_step or 0}")
        if purge_step is not None:  # hides what an earlier file has from this step on
            start = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(step=purge_step, session_log=start))

    def add(self, step: int, row: Mapping[str, int | float | None]) -> None:
        from tensorboardX.summary import scalar

        with naming(self._folder):
            for name, value in row.items():
                if name != "step" and value is not None:
                    summary = scalar(name, value)
                    self._file.write_event(
                        self._event(wall_time=time.time(), step=step, summary=summary)
                    )
            self._file.flush()

    def close(self) -> None:
        with naming(self._folder):
            self._file.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run, in the order written. A last line cut by a kill is left out.

    Raises:
        FileNotFoundError: The folder holds no metrics.
        RunFileError: A line is no row of numbers with its step.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; a run folder is due")
    rows = []
    for number, line in enumerate(_text(path, path.read_bytes()).split("\n")[:-1], 1):
        row = _json(line, f"{path}:{number}")
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunFileError(f"{path}:{number}: not a row of metrics (an object with its step)")
        for name, value in row.items():
            if type(value) not in (int, float, type(None)):
                raise RunFileError(f"{path}:{number}: {name!r} is no number")
        rows.append(row)
    return rows


class EpisodeWriter:
    """Keeps the episodes of each step as ``episodes/step_000010.jsonl.zst``, one JSON a line.

    A record: ``{id, step, task: {id, prompt, answer}, reward, correct, events: [{id, type, turn,
    state_id, state, expected, advantage, members: [{role, prompt, response, prompt_tokens,
    response_tokens, stop_reason, well_formed, malformed}]}], outcome: {response, ...}, cost: {}}``.
    """

    def __init__(self, run_dir: str | Path):
        self._dir = Path(run_dir) / EPISODES_FOLDER

    def write(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> Path:
        """Writes a step's episodes at once: a reader sees the whole file or none.

        Args:
            step: Names the file.
            episodes: Records as above; they hold what JSON can.

        Returns:
            The file.
        """
        self._dir.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(episode, ensure_ascii=False) + "\n" for episode in episodes)
        path = self._dir / f"step_{step:06d}.jsonl.zst"
        # A lone surrogate (half a character in a model's output) has no UTF-8 form of its own.
        write_whole(path, zstandard.compress(text.encode("utf-8", errors="backslashreplace")))
        return path

    def truncate_to(self, step: int) -> None:
        """Removes the episodes of steps after ``step``."""
        for other, path in _episode_files(self._dir.parent):
            if other > step:
                path.unlink()


class NoLogs:
    """In the place of both on a process that writes no files."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes nothing."""

    def write(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Writes nothing."""

    def truncate_to(self, step: int) -> None:
        """Nothing is written here."""

    def close(self) -> None:
        """Nothing is open."""


def episode_steps(run_dir: str | Path) -> list[int]:
    """The steps whose episodes a run has kept, ascending."""
    return [step for step, _ in _episode_files(Path(run_dir))]


def read_episodes(run_dir: str | Path, step: int) -> Iterator[dict[str, Any]]:
    """The episodes of one step, in the order written.

    Raises:
        RunFileError: The file, or a line of it, holds none.
    """
    path = Path(run_dir) / EPISODES_FOLDER / f"step_{step:06d}.jsonl.zst"
    for number, line in enumerate(_lines(path), 1):
        yield _episode(line, f"{path}:{number}")


def find_episode(run_dir: str | Path, episode_id: str) -> dict[str, Any] | None:
    """The episode with this id, the latest step first; None if there is none.

    Raises:
        RunFileError: As of :func:`read_episodes`.
    """
    needle = json.dumps(episode_id, ensure_ascii=False)
    for _, path in reversed(_episode_files(Path(run_dir))):
        for number, line in enumerate(_lines(path), 1):
            if needle in line:
                episode = _episode(line, f"{path}:{number}")
                if episode["id"] == episode_id:
                    return episode
    return None


def write_verdicts(run_dir: str | Path, step: int, verdicts: Mapping[str, np.ndarray]) -> Path:
    """Keeps an evaluation's verdicts as ``evaluations/step_000010.json``.

    Paired comparisons between steps and runs need them all.

    Args:
        run_dir: The run's folder.
        step: Complete steps.
        verdicts: [tasks, samples] bool for each benchmark.

    Returns:
        The file.
    """
    folder = Path(run_dir) / VERDICTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.json"
    rows = {name: np.asarray(array, int).tolist() for name, array in verdicts.items()}
    write_whole(path, json.dumps(rows).encode())
    return path


def read_verdicts(run_dir: str | Path) -> dict[int, dict[str, np.ndarray]]:
    """The verdicts of every evaluation of a run.

    Returns:
        [tasks, samples] bool for each benchmark, by step, ascending.

    Raises:
        RunFileError: A file does not hold them.
    """
    verdicts: dict[int, dict[str, np.ndarray]] = {}
    for step, path in _step_files(Path(run_dir) / VERDICTS_FOLDER, ".json"):
        content = _json(_text(path, path.read_bytes()), str(path))
        due = RunFileError(f"{path}: verdicts are due, {{benchmark: [[0, 1, ...], ...]}}")
        if not isinstance(content, dict):
            raise due
        verdicts[step] = {}
        for name, rows in content.items():
            array = _rectangle(rows)
            if array is None or array.size == 0 or not np.isin(array, (0, 1)).all():
                raise due
            verdicts[step][name] = array.astype(bool)
    return verdicts


def _rectangle(rows: Any) -> np.ndarray | None:
    """Nested lists as an array [tasks, samples]; None where they are none."""
    try:
        array = np.array(rows)
    except ValueError:  # ragged
        return None
    return array if array.ndim == 2 and array.dtype.kind in "bi" else None


def _episode_files(run_dir: Path) -> Sequence[tuple[int, Path]]:
    return _step_files(run_dir / EPISODES_FOLDER, ".jsonl.zst")


def _step_files(folder: Path, suffix: str) -> Sequence[tuple[int, Path]]:
    """The files of steps in a folder, with their steps, ascending."""
    found = []
    for path in folder.glob(f"step_*{suffix}"):
        step = path.name.removeprefix("step_").removesuffix(suffix)
        if step.isascii() and step.isdecimal():
            found.append((int(step), path))
    return sorted(found)


def _lines(path: Path) -> list[str]:
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    except (zstandard.ZstdError, MemoryError) as error:  # also a header that claims absurd sizes
        raise RunFileError(f"{path}: damaged or not compressed by Zstandard ({error})") from None
    return _text(path, data).split("\n")[:-1]


def _episode(line: str, where: str) -> dict[str, Any]:
    episode = _json(line, where)
    if not isinstance(episode, dict) or not isinstance(episode.get("id"), str):
        raise RunFileError(f"{where}: not an episode (an object with its id)")
    return episode


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RunFileError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)  # NaN and infinity are no figures
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"{where}: not JSON ({error})") from None


def plain_row(metrics: Mapping[str, Any]) -> dict[str, int | float | None]:
    """Metrics as JSON has them: NaN and infinity are None."""
    return {name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> int | float | None:
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        number = float(value)
        return number if math.isfinite(number) else None
