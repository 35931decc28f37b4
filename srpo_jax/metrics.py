"""What a run writes as it goes: metrics as JSON lines and TensorBoard events, and its episodes."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

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
        self._writer: Any = None
        self._purge_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step's metrics: Python numbers, or numpy and jax scalars."""
        row = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        with open(self._dir / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # Event files are named by the second; the suffix keeps a quick resume's file apart.
            self._writer = SummaryWriter(
                str(self._dir / "tb"),
                purge_step=self._purge_step,
                filename_suffix=f".{self._purge_step or 0}",
            )
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, step)

    def truncate_to(self, step: int) -> None:
        """Drops what was logged after ``step``: a resumed run writes those steps again."""
        self.close()
        path = self._dir / METRICS_FILE
        if path.exists():
            rows = [row for row in read_metrics(self._dir) if row["step"] <= step]
            _replace(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


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
        _replace(path, zstandard.compress(text.encode("utf-8", errors="backslashreplace")))
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
    _replace(path, json.dumps(rows).encode())
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


def _number(value: Any) -> int | float | None:
    try:
        return operator.index(value)
    except TypeError:
        number = float(value)
        return number if math.isfinite(number) else None


def _replace(path: Path, data: bytes) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
