"""Task sets by name, file and function, and the position of the training data."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from envs.workflow import Task
from srpo_jax.recipe.recipe import TaskSet, parse_recipe
from srpo_jax.recipe.tasks import (
    DataError,
    RecipeTasks,
    TaskStream,
    check_prompts,
    resolve,
    task_sets,
)
from srpo_jax.recipe.yaml import parse_yaml


def tasks(n: int) -> list[Task]:
    return [Task(str(i), f"task {i}", str(i)) for i in range(n)]


def ids(stream: TaskStream, steps) -> list[list[str]]:
    return [[task.id for task in stream.step(step)] for step in steps]


# ---- the stream ----------------------------------------------------------------------------------


def test_every_epoch_holds_every_task_in_its_own_order():
    stream = TaskStream(tasks(6), 2, seed=0)
    epochs = [[i for step in ids(stream, range(3 * e, 3 * e + 3)) for i in step] for e in range(4)]
    assert all(sorted(epoch) == list("012345") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_public_case_s30_positions_at_an_epoch_boundary():
    """Resumed at a boundary (3) or elsewhere (2), a run sees the straight run's tasks."""
    straight = ids(TaskStream(tasks(6), 2, seed=1), range(6))
    for start in (2, 3):
        assert ids(TaskStream(tasks(6), 2, seed=1), range(start, 6)) == straight[start:]
    assert straight[3:] != straight[:3]


def test_steps_that_straddle_an_epoch():
    stream = TaskStream(tasks(5), 3, seed=2)
    counts = Counter(i for step in ids(stream, range(5)) for i in step)  # 15 items: three epochs
    assert counts == {str(i): 3 for i in range(5)}


def test_the_seed_decides_the_order():
    orders = {tuple(ids(TaskStream(tasks(8), 8, seed=s), [0])[0]) for s in range(5)}
    assert len(orders) == 5


def test_the_order_is_the_mapdatasets():
    import grain

    order = grain.MapDataset.source(list(range(7))).seed(11).shuffle().repeat()
    expected = [[str(order[3 * n + i]) for i in range(3)] for n in range(5)]
    assert ids(TaskStream(tasks(7), 3, seed=11), range(5)) == expected


# ---- task sets -----------------------------------------------------------------------------------


def problem(spec, tmp_path) -> str:
    with pytest.raises(DataError) as caught:
        resolve(TaskSet.model_validate(spec), "tasks.train", tmp_path, tmp_path / "made")
    text = str(caught.value)
    assert "\n" not in text and text.startswith("tasks.train: ")
    return text


def test_generated_math_tasks(tmp_path):
    spec = TaskSet(name="arithmetic", size=4, args={"min_terms": 2, "max_terms": 2})
    made = resolve(spec, "tasks.train", tmp_path, tmp_path / "made")
    assert len(made) == 4 and made[0].answer == str(eval(made[0].extra["expression"]))
    named = TaskSet(name="reasoning_gym/chain_sum", size=2)
    assert resolve(named, "tasks.train", tmp_path, tmp_path / "made")[1].source == "chain_sum"


def test_names_and_settings_are_checked(tmp_path):
    assert "did you mean 'arithmetic'" in problem({"name": "aritmetic", "size": 2}, tmp_path)
    assert "say how many tasks with `size`" in problem("arithmetic", tmp_path)
    wrong = {"name": "arithmetic", "size": 2, "args": {"min_term": 2}}
    assert "'min_term'; did you mean 'min_terms'" in problem(wrong, tmp_path)
    for name in ("data/train.json", "/some/folder"):
        assert "a file ends in .jsonl or .parquet" in problem(name, tmp_path)
    for key in ("split", "seed", "size"):
        wrong = {"name": "arithmetic", "size": 2, "args": {key: 1}}
        assert f"args.{key}: `{key}` stands beside `args`" in problem(wrong, tmp_path)
    wrong = {"name": "arithmetic", "size": 2, "args": {"subtraction": "no"}}
    assert "subtraction: need true or false, got 'no'" in problem(wrong, tmp_path)


def test_files(tmp_path):
    rows = [
        {"problem": "1+1?", "answer": 2, "id": "a"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = resolve(TaskSet(path="rows.jsonl"), "tasks.train", tmp_path)
    assert [(task.prompt, task.answer) for task in found] == [("1+1?", "2"), ("2+2?", "4")]
    assert len(resolve(TaskSet(path="rows.jsonl", size=1), "tasks.train", tmp_path)) == 1

    path.write_text(json.dumps(rows[0]) + "\n{bad\n")
    assert f"{path}:2: not JSON" in problem("rows.jsonl", tmp_path)
    path.write_text(json.dumps(rows[0]) + '\n{"problem": "no gold"}\n')
    assert f"{path}:2: no gold answer" in problem("rows.jsonl", tmp_path)
    path.write_text("")
    assert "rows.jsonl: no tasks" in problem("rows.jsonl", tmp_path)
    assert "none.jsonl: no such file" in problem("none.jsonl", tmp_path)
    assert "a file has no `split`" in problem({"path": "rows.jsonl", "split": "test"}, tmp_path)


def test_search_files_and_names(tmp_path):
    row = {
        "question": "Capital of Chad",
        "reward_model": {"ground_truth": {"target": ["N'Djamena"]}},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = resolve(TaskSet(path="rows.jsonl"), "tasks.train", tmp_path, kind="search")
    assert (task.prompt, task.answer) == ("Capital of Chad?", ("N'Djamena",))
    spec = TaskSet(name="factbook", size=3, args={"hops": 2})
    assert len(resolve(spec, "tasks.train", tmp_path, tmp_path / "made")) == 3
    wrong = {"name": "factbook", "args": {"hop": 2}}
    assert "factbook: args: " in problem(wrong, tmp_path)
    for fields in ([], "capital"):
        wrong = {"name": "factbook", "args": {"fields": fields}}
        assert "fields: a list of at least one field is due, got" in problem(wrong, tmp_path)


FUNCTION = """
from envs.workflow import Task
def made(size, split, prefix="p"):
    return [Task(f"{split}/{i}", f"{prefix}{i}", "1") for i in range(size)]
def none():
    return []
def wrong():
    return [Task("a", "b", "c"), "text"]
def number():
    return 3
"""


def test_functions(tmp_path):
    (tmp_path / "my_tasks.py").write_text(FUNCTION)
    spec = TaskSet(path="my_tasks.py:made", size=2, args={"prefix": "q"})
    found = resolve(spec, "tasks.eval.x", tmp_path, split="test")
    assert [(task.id, task.prompt) for task in found] == [("test/0", "q0"), ("test/1", "q1")]
    assert "no tasks in my_tasks.py:none" in problem("my_tasks.py:none", tmp_path)
    assert "item 1 is str, an envs.workflow.Task is due" in problem("my_tasks.py:wrong", tmp_path)
    assert "a sequence of tasks is due" in problem("my_tasks.py:number", tmp_path)
    wrong = {"path": "my_tasks.py:made", "size": 1, "args": {"prefx": "q"}}
    assert "args.prefx: unknown argument, did you mean `prefix`?" in problem(wrong, tmp_path)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ('Task(7, "p", "1")', "item 1 has no text for its id: 7"),
        ('Task("", "p", "1")', "item 1 has no text for its id: ''"),
        ('Task(None, "p", "1")', "item 1 has no text for its id: None"),
        ('Task("b", 3, "1")', "item 1 has no text for its prompt: 3"),
        ('Task("b", " ", "1")', "item 1 has no text for its prompt: ' '"),
        ('Task("b", "\\ud800", "1")', "item 1 has no text for its prompt"),
        ('Task("b", "p", None)', "item 1 needs text or a tuple of texts for its answer, got None"),
        ('Task("b", "p", 5)', "for its answer, got 5"),
        ('Task("b", "p", float("nan"))', "for its answer, got nan"),
        ('Task("b", "p", "")', "for its answer, got ''"),
        ('Task("b", "p", ())', "for its answer, got ()"),
        ('Task("b", "p", ("1", 2))', "for its answer, got ('1', 2)"),
        ('Task("b", "p", ["1"])', "for its answer, got ['1']"),
        ('Task("b", "p", "1", source=None)', "item 1 has no text for its source: None"),
        ('Task("b", "p", "1", extra=[])', "item 1 has no mapping for its extra: []"),
        ('Task("a", "p", "1")', "item 1 has the id 'a' of item 0; ids must differ"),
        ('{"id": "b"}', "item 1 is dict, an envs.workflow.Task is due"),
    ],
)
def test_a_task_of_the_wrong_make_is_refused_with_its_item(returned, message, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from envs.workflow import Task\n"
        f'def made(): return [Task("a", "p", ("1", "2"), extra={{"k": 1}}), {returned}]\n'
    )
    text = problem("mine.py:made", tmp_path)
    assert text.startswith("tasks.train: mine.py:made: item 1 ") and message in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {}['x']", "mine.py:4: KeyError: 'x'"),
        ("return int('x')", "mine.py:4: ValueError: invalid literal"),
        ("yield 1 / 0", "mine.py:4: ZeroDivisionError: division by zero"),
        ("yield 'a' + 1", "mine.py:4: TypeError: can only concatenate str"),
        ("return None", "mine.py:made: a sequence of tasks is due, got None"),
    ],
)
def test_an_error_inside_a_tasks_function_names_the_users_line(body, message, tmp_path):
    (tmp_path / "mine.py").write_text(f"import json\n\ndef made():\n    {body}\n\nnumber = 3\n")
    assert message in problem("mine.py:made", tmp_path)
    assert "mine.py:number is not a function, got 3" in problem("mine.py:number", tmp_path)


def test_size_takes_the_first_tasks_of_a_function_without_an_end(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from envs.workflow import Task\nfrom itertools import count\n"
        "def made(): return (Task(str(i), 'p', '1') for i in count())\n"
    )
    found = resolve(TaskSet(path="mine.py:made", size=3), "tasks.train", tmp_path)
    assert [task.id for task in found] == ["0", "1", "2"]


def test_files_with_one_id_twice_are_refused(tmp_path):
    rows = [{"problem": p, "answer": "2", "id": 7} for p in ("1+1?", "3-1?")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = problem("rows.jsonl", tmp_path)
    assert "rows.jsonl:2: the id 'rows/7' is that of line 1" in text


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    assert "folder.jsonl: must be a file, got a folder" in problem("folder.jsonl", tmp_path)
    assert "File name too long" in problem("x" * 300 + ".jsonl", tmp_path)
    assert "no such file" in problem("~nobody-of-this-name/a.jsonl", tmp_path)
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert "loop.jsonl: Too many levels of symbolic links" in problem("loop.jsonl", tmp_path)
    roundabout = problem("folder.jsonl/../folder.jsonl", tmp_path)
    assert "folder.jsonl: must be a file, got a folder" in roundabout


def test_a_recipes_sets(tmp_path):
    content = parse_yaml(
        """
name: tiny
model: some/model
workflow: math
tasks:
  train: {name: arithmetic, size: 6}
  eval: {sums: {name: arithmetic, size: 3}, hard: {name: arithmetic, size: 2, split: validation}}
rollout: {tasks_per_step: 2, group_size: 2, prompt_tokens: 64, response_tokens: 16, slots: 4}
optimizer: {lr: 1e-6}
learner: {micro_batch_rows: 4}
trainer: {steps: 3}
""",
        "t",
    )
    sets = task_sets(parse_recipe(content), tmp_path)
    assert len(sets.train) == 6 and {k: len(v) for k, v in sets.benchmarks.items()} == {
        "sums": 3,
        "hard": 2,
    }
    assert {task.id.split("/")[1] for task in sets.train} == {"train"}
    assert sets.benchmarks["sums"][0].id.split("/")[1] == "test"
    assert sets.benchmarks["hard"][0].id.split("/")[1] == "validation"


def test_a_prompt_over_the_limit_says_its_length():
    long = [Task("short", "a b", "1"), Task("long", "a b c d", "1")]

    def count(text: str) -> int:
        return len(text.split())

    check_prompts(RecipeTasks(long, {"x": long}), count, 4)
    message = "the prompt of task long has 4 tokens, the limit is 3"
    with pytest.raises(DataError, match=rf"^tasks\.train: {message}"):
        check_prompts(RecipeTasks(long, {}), count, 3)
    with pytest.raises(DataError, match=rf"^tasks\.eval\.x: {message}"):
        check_prompts(RecipeTasks(tasks(2), {"x": long}), count, 3)
