"""Generated tasks, task files, and the teacher's transcripts."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from envs.math.instructions import without_instructions
from envs.math.parsing import last_boxed, parse_final, parse_verdict
from envs.math.prompts import MathState, Turn
from envs.math.tasks import TaskError, math_tasks, read_tasks
from envs.math.teacher import reply, work_out
from envs.math.workflow import MathWorkflow
from envs.parsing import parse_route
from envs.workflow import ScriptedTeam, Task
from tests.linear_time import assert_linear
from tests.process_cases import python

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


# ---- generated tasks ----------------------------------------------------------------------------


def test_arithmetic_is_three_additions_with_the_right_answer(data_dir):
    tasks = math_tasks(size=200, seed=3, data_dir=data_dir)
    assert len(tasks) == 200
    for task in tasks:
        expression = task.extra["expression"]
        assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2}){2}", expression)
        assert int(task.answer) == sum(map(int, expression.split("+")))
    assert tasks[-1] == tasks[199] and len(tasks[5:8]) == 3
    with pytest.raises(IndexError):
        tasks[200]


def test_tasks_are_the_same_again_and_differ_between_seeds(data_dir, tmp_path):
    first = list(math_tasks(size=50, seed=1, data_dir=data_dir))
    assert list(math_tasks(size=50, seed=1, data_dir=tmp_path)) == first
    other = list(math_tasks(size=50, seed=2, data_dir=data_dir))
    # Neighbouring seeds of the generator itself would share 49 of 50 problems in order.
    assert sum(a.prompt in {t.prompt for t in other} for a in first) < 5


def test_processes_may_prepare_the_same_tasks_at_once(tmp_path):
    code = (
        "from envs.math.tasks import math_tasks\n"
        f"print(math_tasks(size=2000, data_dir={str(tmp_path)!r})[1999].id)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0] for p in processes] == ["arithmetic/train/0/1999\n"] * 2


def test_splits_share_no_problem_even_in_a_small_space(data_dir):
    sets = [
        {t.prompt for t in math_tasks(size=40, split=split, data_dir=data_dir, max_digits=1)}
        for split in ("train", "validation", "test")
    ]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])


def test_word_problems_and_settings_of_other_generators(data_dir):
    (task,) = math_tasks(
        "leg_counting", size=1, data_dir=data_dir, min_animals=2, max_animals=2, max_instances=3
    )
    assert "legs" in task.prompt and task.answer.isdigit() and task.source == "leg_counting"
    (product,) = math_tasks("products", size=1, data_dir=data_dir, max_digits=2)
    a, b = map(int, product.extra["expression"].split("*"))
    assert int(product.answer) == a * b


def test_reading_imports_neither_jax_nor_tensorflow(data_dir):
    code = (
        "import sys\n"
        "from envs.math.tasks import math_tasks\n"
        "import envs.math.workflow, envs.math.teacher\n"
        f"tasks = math_tasks(size=3, data_dir={str(data_dir)!r})\n"
        "tasks[0]\n"
        "print([m for m in ('jax', 'tensorflow', 'torch') if m in sys.modules])\n"
    )
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("gcd", {"max_valeu": 3}, "did you mean 'max_value'"),
        ("arithmetic", {"digits": 3}, "min_digits"),
        ("arithmetic", {"split": "dev"}, "train, validation, test"),
        ("arithmetic", {"size": 0}, "size"),
        ("chain_sum", {"min_terms": 4, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("propositional_logic", {}, "no single right answer"),
    ],
)
def test_wrong_task_settings(name, settings, message, tmp_path):
    with pytest.raises(TaskError, match=message):
        math_tasks(name, **{"size": 5, "data_dir": tmp_path, **settings})


# ---- files --------------------------------------------------------------------------------------

ROW = {
    "data_source": "dapo",
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


def write_jsonl(path: Path, *rows) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_the_same_rows_from_jsonl_and_parquet(tmp_path):
    rows = [ROW, {**ROW, "extra_info": {"split": "train", "index": 8}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [Task(f"dapo/{i}", "What is 1+1?", "2", "dapo") for i in (7, 8)]
    assert read_tasks(tmp_path / "a.parquet") == expected
    assert read_tasks(write_jsonl(tmp_path / "a.jsonl", *rows)) == expected


def test_column_variants(tmp_path):
    tasks = read_tasks(
        write_jsonl(
            tmp_path / "aime.jsonl",
            {"problem": "P", "answer": 33, "id": "x1"},
            "",
            {"question": "Q", "answer": ["1/2", "0.5"]},
            {**ROW, "env_kwargs": {"question": "E", "ground_truth": "3", "data_source": "d"}},
            {"prompt": "R. Please think step by step and put it in \\boxed{}.", "answer": 2.5},
        )
    )
    assert [(t.id, t.prompt, t.answer) for t in tasks] == [
        ("aime/x1", "P", "33"),
        ("aime/#3", "Q", ("1/2", "0.5")),
        ("dapo/7", "E", "3"),
        ("aime/#5", "R.", "2.5"),
    ]
    assert {t.source for t in read_tasks(tmp_path / "aime.jsonl", source="AIME24")} == {"AIME24"}


STEPS = r"Let's think step by step and output the final answer within \boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
THIRD = "A third of $6y-3$ is $y+5$. What is the value of $y$?"


@pytest.mark.parametrize(
    "prompt",
    [
        f"{THIRD} {STEPS}",
        f"{THIRD}\n{STEPS}",
        f"{THIRD}\n\n{STEPS}\n",
        f"{THIRD} {STEPS} ?",
        f"{THIRD} {STEPS[:-1]} ?",
        f"{STEPS} {THIRD}",
        f'{DAPO}\n\n{THIRD}\n\nRemember to put your answer on its own line after "Answer:".',
        f'{THIRD} Let’s think step by step and output the final answer after "####".',
        f"{THIRD}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        f"{THIRD} (Put your answer inside \\boxed{{}}.)",
        f"Return your final response within \\boxed{{}}. {THIRD}",
        f"{THIRD} Present the answer in LaTex format: \\boxed{{Your answer}}",
    ],
)
def test_an_instruction_is_dropped_wherever_it_stands(prompt, tmp_path):
    row = {"prompt": [{"role": "user", "content": prompt}], "answer": "6"}
    (task,) = read_tasks(write_jsonl(tmp_path / "a.jsonl", row))
    assert task.prompt == THIRD


@pytest.mark.parametrize(
    "problem",
    [
        THIRD,
        "Solve $x^2=4$",  # no full stop
        "Find all $x$ with\n\\[x^2 = 4.\\]\nGive them in order, separated by commas.",
        "Let $f(x) = 3x$. What is $f(2.5)$ \\\\",
        "What is the mean? (Show your work!)",
        'How many ways? [asy]\nlabel("$O$",(0,0),N);\n[/asy]',
        "Dots. Then more... And is it over?!",
    ],
)
def test_a_problem_before_an_instruction_stays_whole(problem, tmp_path):
    rows = [{"problem": problem + gap + STEPS, "answer": "1"} for gap in (" ", "\n", "  \n\n")]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    assert {task.prompt for task in read_tasks(path)} == {problem}


@pytest.mark.parametrize(
    "problem",
    [
        r"Give the probability as a fraction in \boxed{}.",
        r"Put +, - or 7 into $3 \boxed{} 4 = 21$.",
        r"Write your answer to two decimal places inside \boxed{}.",
        "Let's say Tom climbs 12 stairs step by step.",
        "Solve the equation step by step.\nx + 2 = 5",
        "Find $x$, and put the final answer in \\boxed{}.",
        "Which number, put into the boxed field, makes 3 + ? = 7 right?",
        r"What is in the \boxed{}? ?",  # nothing is dropped, the odd mark neither
        STEPS,  # nothing would be left
        f"{DAPO}\n{STEPS}",
    ],
)
def test_a_sentence_that_says_more_than_how_to_answer_is_the_problems(problem, tmp_path):
    (task,) = read_tasks(write_jsonl(tmp_path / "a.jsonl", {"problem": problem, "answer": "1"}))
    assert task.prompt == problem


def test_looking_for_instructions_takes_linear_time():
    units = ("word ", "Please \\boxed{} ", "Let's think ", "a. ", "? ", "(", "\n", "\\boxed{", "x")
    assert_linear(without_instructions, *units, around="{} x step by step")
    assert_linear(without_instructions, "Please ", "(", " ", around="step by step {}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", r"bad\.jsonl:2: not JSON"),
        ("[1]", r"bad\.jsonl:2: need an object, got list"),
        ({"answer": "2"}, r"bad\.jsonl:2: no question"),
        ({"problem": "P"}, r"bad\.jsonl:2: no gold answer"),
        ({"problem": "P", "answer": {"a": 1}}, r"bad\.jsonl:2: gold answer"),
        ({"problem": "P", "answer": []}, r"bad\.jsonl:2: gold answer"),
        ({"problem": " ", "answer": "2"}, r"bad\.jsonl:2: the question is empty"),
        ({"prompt": [{"role": "system", "content": "s"}], "answer": "2"}, "question: need text"),
        ({**ROW, "reward_model": "2"}, r"bad\.jsonl:2: reward_model"),
    ],
)
def test_bad_rows_name_file_and_line(row, message, tmp_path):
    with pytest.raises(TaskError, match=message) as caught:
        read_tasks(write_jsonl(tmp_path / "bad.jsonl", ROW, row))
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path):
    (tmp_path / "a.parquet").write_text("not parquet at all")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    for name, message in (
        ("a.parquet", "not Parquet"),
        ("a.csv", "jsonl or .parquet"),
        ("empty.jsonl", "no tasks"),
        ("none.jsonl", "no such file"),
    ):
        with pytest.raises(TaskError, match=message):
            read_tasks(tmp_path / name)
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["P", "Q"]}), tmp_path / "b.parquet")
    with pytest.raises(TaskError, match=r"b\.parquet: row 1: no gold"):
        read_tasks(tmp_path / "b.parquet")


# ---- teacher ------------------------------------------------------------------------------------

TASK = Task("t", "12+7+30", "49", extra={"expression": "12+7+30"})
LARGEST = Task("t", "99+98+97", "294", extra={"expression": "99+98+97"})


def tokens(text: str) -> int:
    """Tokens at one for each digit, mark, space, word and tag."""
    return len(re.findall(r"[0-9]|\\boxed\{|</?[a-z]+>|[A-Za-z]+|\s|[^\sA-Za-z0-9]", text))


def drafted(next_: str, *answers) -> MathState:
    texts = tuple((f"solver_{i + 1}", f"\\boxed{{{a}}}") for i, a in enumerate(answers))
    turns = (Turn("solve", 1, texts),) if answers else ()
    return MathState("12+7+30", solvers=3, next=next_, turns=turns)


def test_work_out_by_hand():
    assert work_out("12+7+30") == (["12+7=19", "19+30=49"], 49)
    assert work_out("5-9+1") == (["5-9=-4", "-4+1=-3"], -3)
    assert work_out("7") == ([], 7)


def test_a_slip_is_in_one_step_and_carried_on():
    rng = random.Random(0)
    for _ in range(200):
        steps, value = work_out("12+7+30", rng)
        wrong = [eval(s.split("=")[0]) != int(s.split("=")[1]) for s in steps]
        assert sum(wrong) == 1 and value != 49
        assert steps[1].startswith(steps[0].split("=")[1] + "+")


def test_a_good_teacher_is_right_in_every_role():
    rng = random.Random(0)
    assert reply("solver_1", drafted("solve"), TASK, rng) == r"12+7=19 19+30=49 \boxed{49}"
    verify = reply("verifier", drafted("verify", 49, 48, 49), TASK, rng)
    assert verify == "12+7=19 19+30=49 <verify>approve</verify>"
    assert parse_verdict(reply("verifier", drafted("verify", 48, 48, 49), TASK, rng)) is False
    final = reply("aggregator", drafted("aggregate", 48, 48), TASK, rng)
    assert parse_final(final) == "49"
    assert parse_route(reply("router", drafted("route", 49, 49), TASK, rng), 3) == ()
    assert parse_route(reply("router", drafted("route", 48, 49), TASK, rng), 3) != ()


def test_a_poor_teacher_errs_in_every_role_and_keeps_the_form():
    rng = random.Random(0)
    for _ in range(50):
        assert last_boxed(reply("solver_1", drafted("solve"), TASK, rng, 1.0)) not in (None, "49")
        assert parse_verdict(reply("verifier", drafted("verify", 49), TASK, rng, 1.0)) is False
        assert parse_verdict(reply("verifier", drafted("verify", 48), TASK, rng, 1.0)) is True
        assert parse_final(reply("aggregator", drafted("aggregate", 49), TASK, rng, 1.0)) != "49"
        assert parse_route(reply("router", drafted("route", 48), TASK, rng, 1.0), 3) == ()
        assert parse_route(reply("router", drafted("route"), TASK, rng, 1.0), 3) != ()


def test_poor_is_a_rate():
    rng = random.Random(1)
    wrong = sum(
        last_boxed(reply("solver_1", drafted("solve"), TASK, rng, 0.3)) != "49" for _ in range(2000)
    )
    assert 520 < wrong < 680  # 600 expected, standard deviation 20


def test_transcripts_of_whole_episodes_are_well_formed_and_short():
    workflow = MathWorkflow(
        solvers=3, rounds=2, router=True, final_revision=True, prompt_style="short"
    )
    longest_reply = longest_chat = 0
    for seed in range(200):
        rng = random.Random(seed)
        team = ScriptedTeam(lambda role, state, _, rng=rng: reply(role, state, LARGEST, rng, 0.4))
        asyncio.run(workflow.run(LARGEST, team))
        for call in team.calls:
            assert call.malformed == {}
            for prompt in call.prompts:
                longest_chat = max(longest_chat, tokens(prompt.system + "\n" + prompt.text()))
            longest_reply = max(longest_reply, *(tokens(o.text) for o in call.outputs))
    assert longest_reply <= 32
    assert longest_chat <= 96 - 32  # leaves room for the chat's own control tokens


def test_the_teacher_refuses_what_is_not_a_sum():
    with pytest.raises(ValueError, match="a sum like 12"):
        reply("solver_1", drafted("solve"), Task("q", "legs?", "4"), random.Random(0))
