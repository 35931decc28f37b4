"""Task files and corpora in all conditions: what is read, and the one line for what is not."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from envs.math.tasks import TaskError, read_tasks
from envs.search.retrieval.corpus import CorpusError, read_corpus
from envs.search.tasks import read_tasks as read_questions
from envs.text_files import json_lines, parse_json
from tests import error_cases

READERS = pytest.mark.parametrize(
    ("read", "error"),
    [(read_tasks, TaskError), (read_questions, TaskError), (read_corpus, CorpusError)],
    ids=["math", "search", "corpus"],
)
# A row that each of the three readers takes.
GOOD = {"id": "a", "problem": "1+1", "question": "1+1", "answer": "2", "contents": "x"}


def line(**changes) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


def refusal(read, path: Path, error=TaskError) -> str:
    text = error_cases.refusal(error, read, path)
    assert str(path) in text
    return text


# ---- what cannot be read -------------------------------------------------------------------------


@READERS
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"problem": "café"}'.encode("latin-1"), "not UTF-8: byte 0xe9 at column 17"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"problem": "1+1", "answer": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
        (b'{"problem": "\\ud800 1+1", "answer": "2"}', "half of a surrogate pair"),
        (b'{"problem": "1+1"', "not JSON: Expecting ',' delimiter at column 18"),
        (b'{"problem": "a\x00b"}', "not JSON: Invalid control character"),
        (b"PAR1\x15\x04\x15", "not JSON"),
    ],
)
def test_a_bad_line_is_named(read, error, bad, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line() + b"\n" + bad + b"\n" + line(id="b"))
    text = refusal(read, path, error)
    assert f"{path}:3: " in text and message in text


@READERS
def test_what_is_no_file_of_lines_is_named(read, error, tmp_path):
    def named(name: str) -> str:
        return refusal(read, tmp_path / name, error)

    (tmp_path / "folder.jsonl").mkdir()
    assert "this is a folder, a file is due" in named("folder.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "symbolic links" in named("loop.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone")
    assert "no such file" in named("dangling.jsonl")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in named("file/a.jsonl")
    assert "File name too long" in named("a" * 300 + ".jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "no regular file" in named("pipe.jsonl")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:35dc\nsize 446564\n"
    (tmp_path / "lfs.jsonl").write_text(pointer)
    assert "a pointer of git-lfs, not the file itself" in named("lfs.jsonl")
    (tmp_path / "utf16.jsonl").write_bytes(line().decode().encode("utf-16"))
    assert "utf16.jsonl:1: not UTF-8" in named("utf16.jsonl")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """By a failing open: the tests may run as root, who reads everything."""

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.jsonl").write_bytes(line())
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"a\.jsonl: Permission denied"):
        list(json_lines(tmp_path / "a.jsonl"))


def test_a_compressed_file_that_is_damaged_is_named(tmp_path):
    whole = gzip.compress(b"".join(line(id=i, contents=f"{i}" * 50) for i in range(500)))
    for name, content in {
        "short": whole[: len(whole) // 2],
        "flipped": whole[:300] + bytes(255 - b for b in whole[300:310]) + whole[310:],
        "none": line(),
        "empty.half": whole[:5],
    }.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        refusal(read_corpus, path, CorpusError)


def test_damaged_parquet_names_the_file_and_the_row(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"problem": f"problem {i} " * 20, "answer": str(i)} for i in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    options = {"row_group_size": 1024, "compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(table, path, **options)
    whole = path.read_bytes()
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = column.data_page_offset
    path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
    assert "not Parquet, or damaged after row 1024: " in refusal(read_tasks, path)
    path.write_bytes(whole[:-100])  # the footer is gone
    assert "not Parquet, or damaged after row 0: " in refusal(read_tasks, path)
    # A changed bit of an uncompressed page is seen where the writer kept checksums.
    options |= {"compression": "none", "write_page_checksum": True}
    pyarrow.parquet.write_table(table, path, **options)
    whole = path.read_bytes()
    at = whole.index(b"problem 1500 ")
    path.write_bytes(whole[:at] + b"P" + whole[at + 1 :])
    assert "damaged after row 1024: " in refusal(read_tasks, path)
    (tmp_path / "folder.parquet").mkdir()
    assert "this is a folder" in refusal(read_tasks, tmp_path / "folder.parquet")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"answer": NaN', "no gold answer"),
        ('"answer": Infinity', "gold answer: need text or a number, got inf"),
        ('"answer": 1e999', "gold answer: need text or a number, got inf"),
        ('"answer": ["1", NaN]', "gold answer: need text or a number, got ['1', nan]"),
        ('"answer": "2", "id": ""', "id: need text or a whole number, got ''"),
        ('"answer": "2", "id": 1.5', "id: need text or a whole number, got 1.5"),
        ('"answer": "2", "id": [1]', "id: need text or a whole number, got [1]"),
        ('"answer": "2", "data_source": ["a"]', "data_source: need text, got ['a']"),
        ('"answer": "2", "extra_info": "x"', "extra_info: need an object, got str"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(row, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"problem": "1+1", ' + row + "}\n")
    assert f"{path}:1: {message}" in refusal(read_tasks, path)


def test_a_message_stays_short_whatever_the_value(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"problem": "1+1", "answer": ' + "[" * 900 + "]" * 900 + "}\n")
    assert len(refusal(read_tasks, path)) < len(str(path)) + 120
    path.write_text('{"problem": "1+1", "answer": {"a": "' + "x" * 9000 + '"}}\n')
    assert len(refusal(read_tasks, path)) < len(str(path)) + 160


# ---- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_tasks, read_questions])
@pytest.mark.parametrize(
    "rows",
    [
        [{"id": 7}, {"id": 7}],
        [{"id": 7}, {"id": "7"}],
        [{"data_source": "nq", "extra_info": {"index": 3}}] * 2,
        [{"id": "#3"}, {}],  # the id that the third line would get
    ],
)
def test_two_problems_with_one_id_are_refused_with_both_places(read, rows, tmp_path):
    first, second = ({"question": f"{i}+1?", "answer": "2", **rows[i]} for i in range(2))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(first) + "\n\n" + json.dumps(second) + "\n")
    assert re.search(r"rows\.jsonl:3: the id '\S+' is that of line 1", refusal(read, path))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([first | {"id": "7"}, second | {"id": "7"}]),
        tmp_path / "rows.parquet",
    )
    text = refusal(read, tmp_path / "rows.parquet")
    assert "rows.parquet: row 2: the id 'rows/7' is that of row 1" in text or "nq/7" in text


def test_rows_without_ids_and_sources_that_count_alike_get_different_ids(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"id": 2}, {}, {"data_source": "a", "extra_info": {"index": 2}},
            {"data_source": "b", "extra_info": {"index": 2}}, {"id": None}, {"id": float("nan")},
            {"id": 3.0}]  # fmt: skip
    path.write_text("".join(json.dumps({"problem": "q", "answer": "2", **r}) + "\n" for r in rows))
    assert [task.id for task in read_tasks(path)] == [
        "rows/2", "rows/#2", "a/2", "b/2", "rows/#5", "rows/#6", "rows/3",
    ]  # fmt: skip


# ---- what is read --------------------------------------------------------------------------------


@READERS
def test_a_byte_order_mark_and_other_line_ends_are_passed_over(read, error, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line() + b"\r\n" + line(id="b", problem="é\u2028"))
    assert len(read(path)) == 2


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("27.0", "27"),
        ("-2.50", "-2.5"),
        ("1e22", "10000000000000000000000"),
        ("1e-7", "0.0000001"),
        ("18446744073709551615", "18446744073709551615"),
        ("1" * 400, "1" * 400),
        ('"27.0"', "27.0"),  # text stays as it is
        ('"[\\"34\\"]"', ("34",)),
        ('"[\\"1/2\\", \\"0.5\\"]"', ("1/2", "0.5")),
        ('"[1, 2]"', "[1, 2]"),  # an interval, not a list of answers
        ('"[\\"34"', '["34'),
        ('["34", 35]', ("34", "35")),
    ],
)
def test_gold_answers_of_all_forms(gold, answer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": [{"role": "user", "content": "q"}], "answer": NaN, '
        '"reward_model": {"ground_truth": ' + gold + ', "style": "rule"}}\n'
    )
    (task,) = read_tasks(path)
    assert task.answer == answer


def test_accepted_answers_of_a_question_as_json_text(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"question": "q", "golden_answers": '["Paris", "City of Paris"]'},
            {"question": "r", "reward_model": {"ground_truth": {"target": '["York"]'}}},
            {"question": "s", "answer": "[sic]"}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [task.answer for task in read_questions(path)]
    assert answers == [("Paris", "City of Paris"), ("York",), ("[sic]",)]


def test_parquet_of_many_makes(tmp_path):
    """Nested tool arguments, large and dictionary texts, row groups, an index that restarts."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{source} {i}"}],
            "reward_model": {"ground_truth": "27.0", "style": "rule"},
            "env_kwargs": {"question": f"{source} question {i}", "ground_truth": "27.0"},
            "extra_info": {"index": i, "tools_kwargs": {"calc": {"create": {"n": [i, i]}}}},
        }
        for source in ("amc23", "aime24")
        for i in range(3)
    ]
    table = pyarrow.Table.from_pylist(rows)
    for i, kind in ((0, pyarrow.large_string()), (0, pyarrow.dictionary(pyarrow.int32(), "str"))):
        table = table.set_column(i, "data_source", table["data_source"].cast(kind))
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=2)
        tasks = read_tasks(path)
        assert [task.prompt for task in tasks][3] == "aime24 question 0"
        assert len({task.id for task in tasks}) == 6 and {t.answer for t in tasks} == {"27.0"}


def test_parse_json_gives_what_json_loads_gives():
    text = '{"a": [1, 2.5, "\\ud83d\\ude00", null, true]}'
    assert parse_json(text) == {"a": [1, 2.5, "\U0001f600", None, True]}
