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

from srpo_jax.files import naming, write_whole

METRICS_FILE = "metrics.jsonl"
EPISODES_FOLDER = "episodes"
VERDICTS_FOLDER = "evaluations"


class MetricLogger:
    """Appends one flat row of numbers a step to ``metrics.jsonl`` and to TensorBoard (``tb/``).

    Floats are written so that they read back to the same bits; NaN and infinity become null.
    """

    def __init__(self, run_dir: str | Path):
        self._dir = Path(run_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._events: _EventFile | None = None
        self._purge_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step's metrics: Python numbers, or numpy and jax scalars. Raises OSError that
        names the file."""
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

    Raises FileNotFoundError where the folder holds no metrics.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; a run folder is due")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class EpisodeWriter:
    """Keeps the episodes of each step as ``episodes/step_000010.jsonl.zst``, one JSON a line.

    A record: ``{id, step, task: {id, prompt, answer}, reward, correct, events: [{id, type, turn,
    state_id, state, expected, advantage, members: [{role, prompt, response, prompt_tokens,
    response_tokens, stop_reason, well_formed, malformed}]}], outcome: {response, ...}, cost: {}}``.
    """

    def __init__(self, run_dir: str | Path):
        self._dir = Path(run_dir) / EPISODES_FOLDER

    def write(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> Path:
        """Writes a step's episodes at once: a reader sees the whole file or none."""
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


def episode_steps(run_dir: str | Path) -> list[int]:
    """The steps whose episodes a run has kept, ascending."""
    return [step for step, _ in _episode_files(Path(run_dir))]


def read_episodes(run_dir: str | Path, step: int) -> Iterator[dict[str, Any]]:
    """The episodes of one step."""
    for line in _lines(Path(run_dir) / EPISODES_FOLDER / f"step_{step:06d}.jsonl.zst"):
        yield json.loads(line)


def find_episode(run_dir: str | Path, episode_id: str) -> dict[str, Any] | None:
    """The episode with this id, the latest step first; None if there is none."""
    needle = json.dumps(episode_id, ensure_ascii=False)
    for _, path in reversed(_episode_files(Path(run_dir))):
        for line in _lines(path):
            if needle in line and (episode := json.loads(line))["id"] == episode_id:
                return episode
    return None


def write_verdicts(run_dir: str | Path, step: int, verdicts: Mapping[str, np.ndarray]) -> Path:
    """Keeps an evaluation's verdicts, [tasks, samples] bool for each benchmark, as
    ``evaluations/step_000010.json``: paired comparisons between steps and runs need them all."""
    folder = Path(run_dir) / VERDICTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.json"
    rows = {name: np.asarray(array, int).tolist() for name, array in verdicts.items()}
    write_whole(path, json.dumps(rows).encode())
    return path


def read_verdicts(run_dir: str | Path) -> dict[int, dict[str, np.ndarray]]:
    """The verdicts of every evaluation of a run, by step, ascending."""
    files = sorted((Path(run_dir) / VERDICTS_FOLDER).glob("step_*.json"))
    return {
        int(path.stem.removeprefix("step_")): {
            name: np.asarray(rows, bool) for name, rows in json.loads(path.read_text()).items()
        }
        for path in files
    }


def _episode_files(run_dir: Path) -> Sequence[tuple[int, Path]]:
    files = (run_dir / EPISODES_FOLDER).glob("step_*.jsonl.zst")
    return sorted((int(path.name[len("step_") :].partition(".")[0]), path) for path in files)


def _lines(path: Path) -> list[str]:
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    return data.decode("utf-8").split("\n")[:-1]


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
