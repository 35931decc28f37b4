"""Generated task sets on a disk that is full, closed, or holds something else."""

from __future__ import annotations

import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from envs.math.tasks import math_tasks
from envs.search.factbook_store import search_tasks
from envs.task_rows import TaskError
from tests import error_cases

MAKERS = {"math": math_tasks, "search": search_tasks}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MAKERS}
    for name, make in MAKERS.items():
        make(size=5, data_dir=folders[name])
    return folders


def refusal(maker: str, data_dir: Path) -> str:
    text = error_cases.refusal(TaskError, lambda: list(MAKERS[maker](size=5, data_dir=data_dir)))
    assert str(data_dir) in text
    return text


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("maker", list(MAKERS))
@pytest.mark.parametrize("damage", [halve, flip, empty, Path.unlink, replace_by_a_folder])
def test_damaged_records_name_their_folder(maker, damage, whole, tmp_path):
    data_dir = shutil.copytree(whole[maker], tmp_path / "data")
    (records,) = data_dir.glob("*/*/*/*array_record*")
    damage(records)
    text = refusal(maker, data_dir)
    assert f"{records.parent.parent}: the generated tasks there are damaged, remove" in text


@pytest.mark.parametrize("damage", [halve, empty, Path.unlink, replace_by_a_folder])
def test_a_damaged_description_names_its_folder(damage, whole, tmp_path):
    data_dir = shutil.copytree(whole["math"], tmp_path / "data")
    (info,) = data_dir.glob("*/*/*/dataset_info.json")
    damage(info)
    assert "damaged, remove this folder" in refusal("math", data_dir)


def test_records_of_other_tasks_are_not_taken_for_these(whole, tmp_path):
    data_dir = shutil.copytree(whole["math"], tmp_path / "data")
    (info,) = data_dir.glob("*/*/*/dataset_info.json")
    content = json.loads(info.read_text())
    content["splits"][0]["shardLengths"] = ["3"]
    info.write_text(json.dumps(content))
    assert "3 tasks are there, 5 are due" in refusal("math", data_dir)
    # Whole records, of something that is no task.
    (records,) = data_dir.glob("*/*/*/*array_record*")
    writer = ArrayRecordWriter(str(records), "group_size:1")
    for _ in range(5):
        writer.write(b"other")
    writer.close()
    content["splits"][0]["shardLengths"] = ["5"]
    info.write_text(json.dumps(content))
    assert "damaged, remove this folder" in refusal("math", data_dir)


def test_a_removed_folder_is_made_again(whole, tmp_path):
    data_dir = shutil.copytree(whole["math"], tmp_path / "data")
    shutil.rmtree(next(data_dir.glob("*/*/*")).parent)
    again = list(math_tasks(size=5, data_dir=data_dir))
    assert again == list(math_tasks(size=5, data_dir=whole["math"]))


@contextmanager
def largest_file(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("maker", list(MAKERS))
def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing_half_made(maker, tmp_path):
    """A limit on the size of a file fails the same writes as a full disk."""
    with largest_file(3000):
        assert "tasks cannot be written: " in refusal(maker, tmp_path)
    assert not [path for path in tmp_path.rglob("*array_record*") if path.is_file()]
    assert len(list(MAKERS[maker](size=5, data_dir=tmp_path))) == 5  # with room again


def test_a_place_that_is_no_folder_or_may_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    assert "tasks cannot be written: " in refusal("math", tmp_path / "file")

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "makedirs", refuse)
    assert "PermissionError: [Errno 13] Permission denied" in refusal("math", tmp_path / "closed")


@pytest.mark.parametrize(
    "settings", [{"min_digits": "a"}, {"max_terms": None}, {"max_digits": 5000}]
)
def test_settings_that_the_generator_cannot_use_are_one_line(settings, tmp_path):
    with pytest.raises(TaskError, match=r"^tasks: chain_sum: \w+Error"):
        math_tasks("chain_sum", size=2, data_dir=tmp_path, **settings)
