"""Verdicts on pairs of the kinds of AIME, AMC, MATH500, Minerva and OlympiadBench.

``firm`` pairs are right or wrong by mathematics; ``policy`` pairs by the conventions of
envs/math/grading, and say what these are now.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest.mock import ANY

import pytest

from envs.math.grading import Grade, grade

_DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (_DATA / name).read_text().splitlines()]


PAIRS = rows("grading_pairs.jsonl")
WRONG = rows("wrong_answers.jsonl")
GOLDS = sorted({row["gold"] for row in PAIRS + WRONG + rows("math_grading.jsonl")} - {"", "nan"})
KINDS = sorted({row["what"] for row in WRONG})


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_pair(pair, pool):
    result = grade(pair["response"], pair["gold"], pool)
    assert result.correct is pair["correct"], pair["what"]


def test_all_kinds_of_pairs_are_there():
    counts = Counter((pair["kind"], pair["correct"]) for pair in PAIRS)
    assert counts[("firm", False)] == 76 and counts[("firm", True)] == 128


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_answers_are_refused(kind, pool):
    """A wrong answer is 0 and decided: an error would hide that it was not refused."""
    accepted = []
    for row in WRONG:
        if row["what"] == kind:
            result = grade(rf"So \boxed{{{row['answer']}}}", row["gold"], pool)
            if result.correct or result.error:
                accepted.append((row["answer"], row["gold"], result.error))
    assert accepted == []


@pytest.mark.parametrize("box", [r"Therefore \boxed{%s}.", r"Therefore \boxed{{%s}}."])
def test_every_gold_agrees_with_itself(box, pool):
    """As one text, and in braces that make it be read."""
    refused = [
        gold for gold in GOLDS if grade(box % gold.rstrip(".:"), gold, pool) != Grade(True, ANY)
    ]
    assert refused == ([r"\text{!}"] if "{{" in box else [])  # signs alone are no words


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x = 2+3 = 5", "5"),
        (r"\frac{10!}{8!} = 90", "90"),
        (r"P(X>3) = \frac12", r"\frac12"),
        ("e = 0.5", r"\frac12"),
        ("f'(x) = 2x", "2x"),
        (r"5\text{ million}", "5000000"),
        (r"2\text{ dozen}", "24"),
        (r"12\text{ ways}", "12"),
        (r"5\text{ sq. units}", "5"),
        (r"5\text{ kg}\cdot\text{m/s}", "5"),
        (r"\text{Area is }5", "5"),
        (r"\text{Number of ways: }5", "5"),
        (r"\text{The minimum value is }5", "5"),
        (r"1\text{ way}", "1"),
        (r"5\text{ MeV}", "5"),
        ("2(3)", "6"),
        (r"\pi(3)", r"3\pi"),
        (r"\alpha(x+1)", r"\alpha x+\alpha"),
        ("y(0)e^{kt}", "e^{kt}y(0)"),
        ("I_0e^{-t}", "e^{-t}I_0"),
        (r"\max(a,b)", r"\frac{a+b+|a-b|}{2}"),
        (r"\lfloor -x\rfloor", r"-\lceil x\rceil"),
        (r"\lfloor\frac{n}{2}\rfloor+\lceil\frac n2\rceil", "n"),
        (r"\sqrt{1-x^2}", r"\sqrt{(1-x)(1+x)}"),
        (r"\ln(x-40)", r"\ln(x-40)+0x"),
        (r"2^{2^{2^n}}", r"4^{2^{2^n-1}}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        (r"\{2k:k\in\mathbb{Z}\}", r"\{2k\mid k \in \mathbb{Z}\}"),
        (r"n\bmod 7", r"n \mod 7"),
        ("at least 5", "at least 5"),
        ("(n+1)!!", "(1+n)!!"),
        (r"(a,b) = (2, 3)", "(a,b)=(2,3)"),
    ],
)
def test_what_is_right_beside_the_wrong_kinds(answer, gold, pool):
    assert grade(rf"\boxed{{{answer}}}", gold, pool) == Grade(True, answer)


def test_a_gold_that_is_no_answer_is_an_error():
    assert grade(r"\boxed{nan}", "nan").error == "gold not readable: nan"
    assert grade(r"\boxed{5}", "NaN") == Grade(False, "5", "gold not readable: nan")


@pytest.mark.parametrize("response", [None, 5, b"\\boxed{5}", ["\\boxed{5}"]])
def test_a_response_that_is_no_text_is_refused(response):
    with pytest.raises(TypeError, match="a response is text, not"):
        grade(response, "5")


@pytest.mark.parametrize("gold", [None, 5, 0.5, [], [5], ["5", None], {"5"}])
def test_a_gold_that_is_no_text_is_refused(gold):
    with pytest.raises(TypeError, match="a gold answer is text"):
        grade(r"\boxed{5}", gold)
