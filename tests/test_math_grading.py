"""Grading: every pair of the data file, exactness, limits, threads, and the death of workers."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.math.grading import Grade, GraderPool, grade
from envs.math.grading.compare import same_answer
from envs.math.grading.latex import matching_end, split_top
from envs.math.grading.numbers import Undecided, answer_key, parse_number
from tests.process_cases import python

_FILE = Path(__file__).parent / "data/math_grading.jsonl"
PAIRS = [json.loads(line) for line in _FILE.read_text().splitlines()]
TOWER = r"\boxed{9^{9^{9^{9}}}}"
IN_ALGEBRA = (r"\boxed{\frac{x+2}{7}}", r"\frac{x}{7}+\frac{2}{7}")


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_pair(pair, pool):
    result = grade(pair["response"], pair["gold"], pool)
    assert result.correct is pair["correct"]
    hangs = pair["id"] == "GS62"
    assert result.error == ("time limit" if hangs else None)


def test_all_kinds_of_pairs_are_there():
    kinds = [pair["kind"] for pair in PAIRS]
    assert (kinds.count("firm"), kinds.count("policy")) == (65, 17)
    assert len({pair["id"] for pair in PAIRS}) == len(PAIRS)


def test_the_answer_is_reported():
    assert grade(r"\boxed{3} or rather \boxed{ 4 }", "4") == Grade(True, "4")
    assert grade(r"\boxed{\frac{1}{2", "1/2") == Grade(False, None)


def test_any_of_several_golds(pool):
    assert grade(r"\boxed{0.5}", ("3", "1/2")).correct
    assert grade(r"\boxed{\sqrt{8}}", ["7", r"2\sqrt{2}"], pool).correct
    assert not grade(r"\boxed{\sqrt{8}}", ["7", r"3\sqrt{2}"], pool).correct


def test_plain_numbers_need_no_process():
    class NoPool:
        def compare(self, answer, golds):
            raise AssertionError("asked a process")

    for answer, gold in (
        ("49", "49.0"),
        ("48", "49"),
        (r"\frac{3}{4}", "0.75"),
        ("1,000", "1000"),
        ("12", "007"),
        ("1" * 100_000, "1" * 99_999 + "2"),
        (r"\text{East}", r"\text{East}"),
    ):
        grade(rf"\boxed{{{answer}}}", gold, NoPool())
    with pytest.raises(AssertionError, match="asked a process"):
        grade(r"\boxed{\sqrt{4}}", "2", NoPool())


def test_an_unreadable_gold_is_an_error_not_a_wrong_answer(pool):
    result = grade(r"\boxed{x+1}", r"\frac{1}", pool)
    assert not result.correct and result.error.startswith("gold not readable")
    unreadable_answer = grade(r"\boxed{\frac{1}}", "x+1", pool)
    assert unreadable_answer == Grade(False, r"\frac{1}")


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", Fraction(5)),
        ("-0", Fraction(0)),
        ("033", Fraction(33)),
        (" 1,234,567.5 ", Fraction(2469135, 2)),
        (r"1\,000", Fraction(1000)),
        (".5", Fraction(1, 2)),
        (r"-\dfrac{3}{-4}", Fraction(3, 4)),
        ("6/4", Fraction(3, 2)),
        (r"2\frac12", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        (r"4.5 \times 10^{3}", Fraction(4500)),
        ("4.5e-1", Fraction(9, 20)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("1,2,3", None),
        ("12,34", None),
        ("1/0", None),
        ("x", None),
        ("1e99999", None),
        ("", None),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


def spellings(value: Fraction) -> list[str]:
    a, b = value.numerator, value.denominator
    return [f"{a}/{b}", rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}", f"{a}.0/{b}"]


@settings(deadline=None, max_examples=100)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_spellings_of_a_number_agree_and_other_numbers_do_not(a, b):
    for x in spellings(a):
        assert all(same_answer(x, y) for y in spellings(a))
        assert same_answer(x, spellings(b)[0]) == (a == b)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**60))
def test_integers_are_compared_in_full(n):
    assert same_answer(f"{n:,}", str(n))
    assert not same_answer(str(n + 1), str(n))


def test_answer_key_joins_equal_numbers_and_keeps_texts_apart():
    assert answer_key("0.50") == answer_key(r"\frac12") == Fraction(1, 2)
    assert answer_key("x + 1") == answer_key("x+1") != answer_key("x+2")


# ---- any text -----------------------------------------------------------------------------------

_PIECES = st.lists(
    st.sampled_from(
        list("0123456789xyzAB+-=<>,.;:|&^_(){}[]/% \n\\")
        + r"\frac \text{ \{ \} \pm \cup \in \mid \le \lor \sqrt \$ ^\circ é \\".split()
        + [r"\begin{pmatrix}", r"\end{pmatrix}", " and ", " cm"]
    ),
    max_size=25,
).map("".join)


@settings(deadline=None, max_examples=500)
@given(_PIECES, _PIECES)
def test_no_text_breaks_the_reader(answer, gold):
    try:
        assert same_answer(answer, gold) in (True, False)
    except Undecided:
        pass
    assert same_answer(answer, answer) is (answer.strip() != "")


def test_long_and_deep_answers_are_quick():
    started = time.perf_counter()
    for answer in (
        "(" * 5000 + "x" + ")" * 5000,
        "{" * 5000,
        "a " * 5000,
        "1," * 5000,
        r"\pm" * 500,
        "x=" * 1000 + "1",
        "5 " + "aa " * 3000 + "!",
        r"\text{a}" * 2500,
        r"\text{a}" * 280,
        "a" + " " * 20000 + "b",
        r"x\in " * 390,
        "," * 20000,
        "." * 20000 + "x",
        "1" * 20000,
    ):
        try:
            assert not same_answer(answer, "7")
        except Undecided:
            pass
    assert time.perf_counter() - started < 4


def test_splitting_outside_brackets():
    assert split_top(r"(1,2),\{3,4\},\frac{a,b}{c}", {","}) == [
        "(1,2)",
        r"\{3,4\}",
        r"\frac{a,b}{c}",
    ]
    assert split_top("0<x<1", {"<"}, keep=True) == ["0", "<", "x", "<", "1"]
    assert matching_end("(a(b)c)d", 0) == 6
    assert matching_end("(a", 0) is None


# ---- limits and processes -----------------------------------------------------------------------


def test_eight_threads_at_once_with_a_hanging_answer_among_them():
    """A hanging answer stops in its limit and does not change the others' verdicts."""
    jobs = [(r"\boxed{3}", "3"), IN_ALGEBRA, (TOWER, "1"), (r"\boxed{\sqrt{8}}", r"2\sqrt2")] * 2
    with GraderPool(workers=3) as pool, ThreadPoolExecutor(8) as threads:
        started = time.perf_counter()
        results = list(threads.map(lambda job: grade(*job, pool), jobs))
        assert time.perf_counter() - started < 30
    for (response, _), result in zip(jobs, results, strict=True):
        if response == TOWER:
            assert (result.correct, result.error) == (False, "time limit")
        else:
            assert (result.correct, result.error) == (True, None)


def test_a_hanging_answer_costs_its_limit(pool):
    grade(*IN_ALGEBRA, pool)  # a process is up
    started = time.perf_counter()
    assert grade(TOWER, "1", pool).error == "time limit"
    assert time.perf_counter() - started < 8
    assert grade(*IN_ALGEBRA, pool).correct


def test_a_memory_bomb_meets_the_memory_limit():
    with GraderPool(workers=1, seconds=60, memory_mb=300) as pool:
        assert grade(r"\boxed{2^{2^{31}}}", "3^{4}+1", pool).error == "memory limit"
        assert grade(*IN_ALGEBRA, pool).correct


def scripted(pool: GraderPool, code: str) -> GraderPool:
    pool._command = [sys.executable, "-c", code]
    return pool


def test_a_process_that_dies_once_is_replaced(tmp_path):
    mark = tmp_path / "died"
    code = (
        "import os, sys\n"
        "print('ready', flush=True); input()\n"
        f"if not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w'); os._exit(3)\n"
        'print(\'{"correct": true, "error": null}\', flush=True); input()\n'
    )
    with scripted(GraderPool(workers=1), code) as pool:
        assert grade(r"\boxed{x}", "y", pool) == Grade(True, "x")
    assert mark.exists()


@pytest.mark.parametrize("code", ["import os; os._exit(3)", "print('ready'); input(); exit(3)"])
def test_a_process_that_dies_twice_is_a_crash(code):
    with scripted(GraderPool(workers=1), code) as pool:
        result = grade(r"\boxed{x}", "y", pool)
        assert result == Grade(False, "x", "crash: exit code 3")
        assert grade(r"\boxed{x}", "y", pool) == result  # the place in the pool is free again


def test_processes_end_with_the_pool():
    pool = GraderPool(workers=1)
    assert grade(*IN_ALGEBRA, pool).correct
    (worker,) = pool._alive
    pid = worker._process.pid
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        grade(*IN_ALGEBRA, pool)


def test_grading_does_not_import_sympy_here():
    code = (
        "import sys\n"
        "from envs.math.grading import grade\n"
        "print(grade(r'\\boxed{\\sqrt{8}}', r'2\\sqrt{2}').correct)\n"
        "print([m for m in ('sympy', 'math_verify', 'jax') if m in sys.modules])\n"
    )
    done = python("-c", code)
    assert done.stdout == "True\n[]\n", done.stderr
