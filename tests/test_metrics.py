"""Metric rows and episodes: exact values, cutting back at resume, unreadable text."""

from __future__ import annotations

import errno
import json
import math
from functools import partial

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from srpo_jax.run.logs import (
    EpisodeWriter,
    MetricLogger,
    RunFileError,
    episode_steps,
    find_episode,
    read_episodes,
    read_metrics,
    read_verdicts,
)
from tests import error_cases


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_to_the_same_bits(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "metrics.jsonl"
    logger = MetricLogger(folder)
    logger._events = Silent()
    logger.log(3, {"x": value, "f32": np.float32(0.1)})
    row = read_metrics(folder)[0]
    assert math.copysign(1, row["x"]) == math.copysign(1, value) and row["x"] == value
    assert row["f32"] == float(np.float32(0.1)) and row["step"] == 3
    assert path.read_text().count("\n") == 1


class Silent:
    """Stands for the TensorBoard file where a test looks at the rows alone."""

    def add(self, *args):
        pass


def test_kinds_of_numbers(tmp_path):
    logger = MetricLogger(tmp_path)
    logger.log(
        0, {"n": np.int32(7), "nan": float("nan"), "inf": float("inf"), "array": np.ones(())}
    )
    logger.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "n": 7, "nan": null, "inf": null, "array": 1.0}\n'
    with pytest.raises((TypeError, ValueError)):
        logger.log(1, {"text": "high"})


def test_resume_cuts_back_and_goes_on(tmp_path):
    logger = MetricLogger(tmp_path)
    for step in range(5):
        logger.log(step, {"loss": step / 3})
    logger.close()
    whole = (tmp_path / "metrics.jsonl").read_text()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]

    resumed = MetricLogger(tmp_path)
    resumed.truncate_to(2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    for step in (3, 4):
        resumed.log(step, {"loss": step / 3})
    resumed.close()
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert len(list((tmp_path / "tb").glob("events.*"))) == 2


def test_tensorboard_reads_the_figures_and_where_a_resumed_run_starts(tmp_path):
    for purge, value in ((None, 0.5), (7, 0.25)):
        logger = MetricLogger(tmp_path)
        if purge is not None:
            logger.truncate_to(purge)
        logger.log(8, {"x": value, "lost": float("nan")})
        logger.close()
    first, second = sorted((tmp_path / "tb").iterdir(), key=lambda path: path.suffix)
    assert (first.suffix, second.suffix) == (".0", ".8")
    assert events_of(first) == [("version", 0), ("x", 8, 0.5)]
    assert events_of(second) == [("version", 0), ("start", 8), ("x", 8, 0.25)]


def events_of(path):
    """What an event file holds, record by record: length, its checksum, data, its checksum."""
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        if event.HasField("file_version"):
            found.append(("version", event.step))
        elif event.HasField("session_log"):
            found.append(("start", event.step))
        else:
            (value,) = event.summary.value
            found.append((value.tag, event.step, value.simple_value))
    return found


@pytest.mark.parametrize("name", ["metrics.jsonl", "tb"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, name, monkeypatch):
    full = open("/dev/full", "wb", buffering=0)
    if name == "tb":
        monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: full)
    else:
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        MetricLogger(tmp_path).log(1, {"x": 1})
    assert caught.value.filename == str(tmp_path / name)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path, monkeypatch):
    EpisodeWriter(tmp_path).write(1, [episode("a")])

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*step_000001"):
        EpisodeWriter(tmp_path).write(1, [episode("b")])
    assert [e["id"] for e in read_episodes(tmp_path, 1)] == ["a"]


def test_metrics_of_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="a run folder is due"):
        read_metrics(tmp_path)


def episode(identity: str, response: str = "text") -> dict:
    return {"id": identity, "step": 1, "outcome": {"response": response}}


def test_episodes_by_id_and_step(tmp_path):
    writer = EpisodeWriter(tmp_path)
    writer.write(9, [episode("a"), episode("b", 'line\nbreak \u2028 "quoted" \x00')])
    writer.write(10, [episode("c"), episode("a", "later")])
    assert (tmp_path / "episodes/step_000010.jsonl.zst").exists()
    assert episode_steps(tmp_path) == [9, 10]
    assert [e["id"] for e in read_episodes(tmp_path, 9)] == ["a", "b"]
    assert find_episode(tmp_path, "b")["outcome"]["response"] == 'line\nbreak \u2028 "quoted" \x00'
    assert find_episode(tmp_path, "a")["outcome"]["response"] == "later"
    assert find_episode(tmp_path, "text") is None
    writer.truncate_to(9)
    assert episode_steps(tmp_path) == [9]


def test_half_a_character_is_kept(tmp_path):
    EpisodeWriter(tmp_path).write(0, [episode("x", "cut \ud83d here")])
    found = find_episode(tmp_path, "x")
    assert found["outcome"]["response"] == "cut \ud83d here"
    json.dumps(found)


# ---- foreign and damaged files -------------------------------------------------------------------

NESTED = b"[" * 100_000


refusal = partial(error_cases.refusal, RunFileError)


@pytest.mark.parametrize(
    "line, says",
    [
        (b"garbage", "not JSON"),
        (b"[1]", "not a row of metrics"),
        (b'{"loss": 1}', "not a row of metrics"),
        (b'{"step": "1"}', "not a row of metrics"),
        (b'{"step": 1.5}', "not a row of metrics"),
        (b'{"step": 1, "loss": "high"}', "'loss' is no number"),
        (b'{"step": 1, "loss": [1]}', "'loss' is no number"),
        (b'{"step": 1, "loss": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"step": 1, "loss": "\xff"}', "not UTF-8 text"),
        (NESTED, "not JSON"),
        (b"\0" * 50, "not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, says):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1.0}\n' + line + b"\n")
    assert refusal(read_metrics, tmp_path).startswith(f"{path}:2: {says}")


def test_not_a_number_is_no_figure(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": NaN, "b": -Infinity}\n')
    assert read_metrics(tmp_path) == [{"step": 0, "a": None, "b": None}]


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "damaged or not compressed"),
        (b"text", "damaged or not compressed"),
        (zstandard.compress(b'{"id": "a"}\n' * 9)[:-3], "damaged or not compressed"),
        (zstandard.compress(b'garbage "a"\n'), "not JSON"),
        (zstandard.compress(b'[]\n"a"\n'), "not an episode"),
        (zstandard.compress(b'{"id": 3, "other": "a"}\n'), "not an episode"),
        (zstandard.compress(b'{"id": "\xff"}\n'), "not UTF-8 text"),
        (zstandard.compress(NESTED + b'"a"\n'), "not JSON"),
        # A header that claims 2**60 bytes.
        (b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\1\0\0", "damaged"),
    ],
)
def test_episodes_that_cannot_be_read_are_named(tmp_path, content, says):
    (tmp_path / "episodes").mkdir()
    path = tmp_path / "episodes" / "step_000003.jsonl.zst"
    path.write_bytes(content)
    for call in (lambda: list(read_episodes(tmp_path, 3)), lambda: find_episode(tmp_path, "a")):
        said = refusal(call)
        assert said.startswith(str(path)) and says in said


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"math": 3}', b'{"math": [[0, 2]]}', b'{"math": [[0], [0, 1]]}',
        b'{"math": [0, 1]}', b'{"math": []}', b'{"math": [["a"]]}', b'{"a": "\xff"}', NESTED,
        b'{"math": [[0.0, 1.0]]}', b'{"math": {"a": 1}}', b'{"math": [[' + b"9" * 30 + b"]]}",
    ],
)  # fmt: skip
def test_verdicts_that_are_none_are_named(tmp_path, content):
    (tmp_path / "evaluations").mkdir()
    path = tmp_path / "evaluations" / "step_000003.json"
    path.write_bytes(content)
    assert refusal(read_verdicts, tmp_path).startswith(str(path))


def test_other_files_beside_those_of_steps_are_left_alone(tmp_path):
    EpisodeWriter(tmp_path).write(1, [episode("a")])
    for name in ("step_last.jsonl.zst", "step_000002.jsonl.zst.partial", "notes.txt"):
        (tmp_path / "episodes" / name).touch()
    assert episode_steps(tmp_path) == [1]
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "step_best.json").touch()
    assert read_verdicts(tmp_path) == {}
