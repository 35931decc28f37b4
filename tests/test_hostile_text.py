"""Text that is built to cost time: linear time in each pattern and parser, limits in the grader."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from envs.math import parsing as math_parsing
from envs.math.grading import (
    Grade,
    GraderPool,
    answers,
    compare,
    grade,
    latex,
    names,
    numbers,
    symbols,
    units,
)
from envs.math.grading.compare import same_answer
from envs.math.grading.numbers import Undecided
from envs.parsing import Malformed, parse_route
from envs.search import parsing as search_parsing
from tests.process_cases import resident_mib

MODULES = (answers, compare, latex, names, numbers, symbols, units, math_parsing, search_parsing)
# Each family is a head, a piece that is repeated, and a tail that breaks what the pieces promise.
FAMILIES = {
    "braces": ("", "{", ""),
    "closed braces": ("", "{", "}"),
    "closing braces": ("", "}", ""),
    "escaped braces": ("", r"\{", ""),
    "parentheses": ("x", "(", ""),
    "calls": ("", "f(", "!"),
    "brackets": ("", "[", ""),
    "row breaks": ("", r"\\[", ""),
    "backslashes": ("", "\\", "x"),
    "spaces": ("5", " ", "!"),
    "thin spaces": ("5", r"\,", "!"),
    "tildes": ("", "~", "x"),
    "tabs and newlines": ("a", "\t\n", "b"),
    "units": ("1 ", r"\text{cm}", " !"),
    "spaced units": ("1", r" \text{cm} ", "!"),
    "unclosed text": ("", r"\text{", ""),
    "text in text": ("", r"\text{a ", "}"),
    "units over units": ("1", r"/\text{m}^2", "!"),
    "words": ("5 ", "aa ", "!"),
    "letters": ("", "a", "1"),
    "numbers and words": ("", "5 aa ", "!"),
    "commas": ("", ",", "x"),
    "spaced commas": ("", " , ", "x"),
    "thousands": ("1", ",000", "x"),
    "spaced thousands": ("1", " 000", "x"),
    "digits": ("", "7", "x"),
    "zeros": ("", "0", "x"),
    "decimals": ("", "1.", "x"),
    "full stops": ("", ".", "x"),
    "punctuation": ("", ":;.,", "x"),
    "signs": ("", "+-", "5"),
    "plus or minus": ("", r"\pm", "5"),
    "equations": ("", "x=", "1"),
    "primes": ("x", "'", "!"),
    "prime commands": ("x^{", r"\prime ", "!"),
    "members": ("", r"x\in ", "!"),
    "subscripts": ("", "x_{", ""),
    "roots": ("", r"\sqrt(", ""),
    "fractions": ("", r"\frac{", ""),
    "short fractions": ("", r"\frac1", ""),
    "boxes": ("", r"\boxed{", ""),
    "boxes without braces": ("", r"\boxed ", "{"),
    "dollars": ("", "$", "x"),
    "percents": ("", " percent", "s"),
    "and, or": ("", "and or ", "!"),
    "dots": ("", r"\ldots,", "!"),
    "matrices": ("", r"\begin{pmatrix}1&2\\", ""),
    "environments": (r"\begin{", "a", ""),
    "exponents": ("2", "^{10}", "!"),
    "routes": ("", "<route>", ""),
    "route indices": ("<route>1", ",1", "</route>"),
    "open route indices": ("<route>1", ", 1", ""),
    "digits in a route": ("<route>", "1", "</route>"),
    "spaces in a route": ("<route>1", " ", "!</route>"),
    "verdicts": ("", "<verify>", ""),
    "spaces in a verdict": ("<verify>", " ", "!</verify>"),
    "searches": ("", "<search>", "</search>"),
    "thoughts": ("<think>", "a</thin ", "</think><search>x</search> !"),
    "spaces after a search": ("<think>a</think><search>x</search>", " ", "!"),
    "spaces before a search": ("<think>a</think>", " ", "<search x</search>"),
    "answers": ("<think>a</think>", "<answer", "<answer>x</answer>"),
    "final lines": ("", "FINAL:\n", ""),
    "final lines with spaces": ("", " FINAL: a", "\n"),
    "one final line": ("FINAL: \\boxed{1}", "\naaaa", ""),
    "final line in itself": ("FINAL: ", "\\boxed{1} ", "\nFINAL \\boxed{1}"),
    "accents": ("", "é’′", "x"),
    "emoji": ("", "🙂", ""),
}
# Patterns that only whole texts are matched with: a search of theirs would take quadratic time.
ANCHORED = {
    "envs.math.grading.answers._BASE",
    "envs.math.grading.answers._MATRIX",
    "envs.math.grading.numbers._NUMBER_FORMS",
    "envs.math.grading.numbers._PLAIN",
    "envs.math.grading.units._PLAIN_TAIL",
    "envs.search.parsing._WORKER",
}


def hostile(family: str, size: int) -> str:
    head, piece, tail = FAMILIES[family]
    if family == "closed braces":
        return "{" * (size // 2) + "}" * (size // 2)
    return head + piece * (size // len(piece)) + tail


def patterns() -> dict[str, re.Pattern[str]]:
    """Every compiled pattern of the modules that read model or task text."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            values = [item[0] for item in value] if isinstance(value, list) and value else [value]
            for place, pattern in enumerate(values):
                if isinstance(pattern, re.Pattern):
                    found[f"{module.__name__}.{name}[{place}]"] = pattern
    return found


PATTERNS = patterns()


def quiet(function: Callable[[str], object]) -> Callable[[str], None]:
    """A parser without its refusals; any other exception is a fault."""

    def call(text: str) -> None:
        try:
            function(text)
        except (Undecided, Malformed):
            pass

    return call


PARSERS = {
    "last_boxed": math_parsing.last_boxed,
    "last_boxed of an answer": lambda text: math_parsing.last_boxed(rf"\boxed{{{text}}}"),
    "parse_route": lambda text: parse_route(text, 8),
    "math parse_verdict": math_parsing.parse_verdict,
    "parse_box": math_parsing.parse_box,
    "parse_final": math_parsing.parse_final,
    "search parse_route": lambda text: search_parsing.parse_route(text, 8, dedupe=True),
    "parse_query": search_parsing.parse_query,
    "search parse_verdict": search_parsing.parse_verdict,
    "parse_answer": search_parsing.parse_answer,
    "clean": latex.clean,
    "unwrap": latex.unwrap,
    "squeeze": latex.squeeze,
    "deepest": latex.deepest,
    "matching_end": lambda text: latex.matching_end(text, 0),
    "split_top": lambda text: latex.split_top(text, {","}),
    "parse_number": numbers.parse_number,
    "plain_verdict": lambda text: numbers.plain_verdict(text, "5"),
    "plain_verdict of itself": lambda text: numbers.plain_verdict(text, text + "0"),
    "answer_key": numbers.answer_key,
    "same_answer": lambda text: same_answer(text, "5"),
    "read": answers.read,
    "unknowns": names.unknowns,
    "names_quantity": names.names_quantity,
    "read_unit": units.read_unit,
}


@pytest.fixture
def alarm():
    """Ends a test that hangs: the engine of patterns looks at signals in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError("backtracks without end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def seconds_of(function: Callable[[str], object], *texts: str, rounds: int = 1) -> list[float]:
    """The best time of each text; the texts take turns, so that a busy machine slows all alike."""
    best = [float("inf")] * len(texts)
    for _ in range(rounds):
        for i, text in enumerate(texts):
            started = time.thread_time()
            function(text)
            best[i] = min(best[i], time.thread_time() - started)
    return best


def superlinear(function: Callable[[str], object], family: str, longest: int) -> str | None:
    """The first doubling that takes 2.5 times as long, where the larger text takes over 2 ms.

    A doubling that seems to is measured again, best of 5 and up to eight times over seven seconds:
    a neighbour on the machine doubles a time for a while, quadratic time does so always.
    """
    half, before = "", float("inf")
    size = 1000
    while size <= longest:
        text = hostile(family, size)
        (seconds,) = seconds_of(function, text)
        if seconds > max(0.002, 2.5 * before) and all(
            _doubles(function, half, text, pause=pause / 4) for pause in range(8)
        ):
            return f"{family}: {size} characters take {seconds / before:.1f} times half of them"
        half, before, size = text, seconds, 2 * size
    return None


def _doubles(function: Callable[[str], object], half: str, text: str, pause: float) -> bool:
    time.sleep(pause)
    before, seconds = seconds_of(function, half, text, rounds=5)
    return seconds > max(0.002, 2.5 * before)


LONGEST = pytest.mark.parametrize("longest", [16_000, pytest.param(64_000, marks=pytest.mark.slow)])


@LONGEST
@pytest.mark.parametrize("name", PARSERS)
def test_parsers_take_linear_time(name, longest, alarm):
    parser = quiet(PARSERS[name])
    assert [slow for f in FAMILIES if (slow := superlinear(parser, f, longest))] == []


@LONGEST
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_take_linear_time(name, longest, alarm):
    pattern = PATTERNS[name]

    def match(text: str) -> None:
        pattern.fullmatch(text)
        if name.partition("[")[0] not in ANCHORED:
            pattern.subn("", text)

    assert [slow for f in FAMILIES if (slow := superlinear(match, f, longest))] == []


def test_patterns_are_found():
    assert len(PATTERNS) > 80


# ---- the grader ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        r"1 \text{cm}" + r"\text{cm}" * 40 + " !",
        "{" * 900 + "}" * 900,
        r"5\," * 600,
        "(" * 30 + "x" + ")" * 30,
        r"\{" * 38 + "5" + r"\}" * 38,
        "+-" * 450 + "5",
        "x=" * 400 + "1",
    ],
    ids=lambda answer: answer[:20],
)
def test_an_answer_built_to_hang_costs_milliseconds(answer, pool):
    grade(r"\boxed{\sqrt{4}}", "2", pool)  # a process is up
    started = time.process_time()
    assert not grade(rf"So \boxed{{{answer}}}", "7", pool).correct
    assert time.process_time() - started < 0.2  # this process does not read it


@pytest.mark.parametrize(
    "answer", ["x+" * 1500 + "x", "5 " * 2000, "(" * 60 + "5" + ")" * 60, "-" * 900 + "x"]
)
def test_an_answer_over_a_limit_is_undecided(answer, pool):
    for _ in range(4):  # in each process the first of a kind takes a second on a busy machine
        grade(r"\boxed{--x}", "5", pool)
    for response, gold in ((answer, "5"), ("5", answer)):
        result = grade(rf"\boxed{{{response}}}", gold, pool)
        assert (result.correct, result.answer) == (False, response.strip())
        assert result.error.startswith("length limit: ")


def test_numbers_of_any_length_are_compared_in_full():
    number = "7" * 100_000
    assert grade(rf"\boxed{{{number}}}", number) == Grade(True, number)
    assert grade(rf"\boxed{{{number}.0}}", number).correct
    assert grade(rf"\boxed{{{number}8}}", number + "9") == Grade(False, number + "8")


_PIECES = [
    *"0123456789xyzABfeiId+-=<>,.;:|&^_(){}[]/%!? \n\\'\"$~é½∞𝟙\u0301",
    *r"""\frac \dfrac \text{ \text{cm} \text{not} \{ \} \pm \mp \cup \in \mid \le \ge \ne \lor \sqrt
    \sqrt[ \$ \% ^\circ \\ \, \! \left( \right) \lfloor \rceil \sum_{ \int_0^1 \binom \ldots \infty
    \pi \theta \mathbb{R} \overline{ \boxed{ \begin{pmatrix} \end{pmatrix} ^{ _{ ^T \prime \cdot
    <route> </route> <route>1,2</route> <route>STOP</route> <verify> </verify> <verify>yes</verify>
    <verify>approve</verify> <search> </search> <think> </think> <answer> </answer> FINAL: million
    and or percent""".split(),
    "\nFINAL: \\boxed{",
    "\n<route>",
    " cm",
    "9" * 40,
]
COUNT = int(os.environ.get("HOSTILE_OUTPUTS", "2000"))
_GOLDS = ["5", r"\frac{1}{2}", "x^2+1", "(1,2)", r"\{1,2\}", r"\text{yes}", "B", "x>2", r"2\pi"]


def outputs(count: int, seed: int) -> Iterator[str]:
    """Hostile model outputs of up to some thousand characters, a box in most of them."""
    rng = random.Random(seed)
    for _ in range(count):
        length = int(2 ** rng.uniform(0, 6))
        text = "".join(rng.choices(_PIECES, k=length))
        if rng.random() < 0.1:
            text = rng.choice(_PIECES) * rng.choice((10, 100, 1000)) + text
        elif rng.random() < 0.1:
            text = hostile(rng.choice(list(FAMILIES)), rng.choice((100, 1000, 4000)))
        yield rf"So \boxed{{{text}}}" if rng.random() < 0.8 else text


def run_hostile(count: int, seed: int, pool: GraderPool) -> tuple[float, float, dict[str, int]]:
    """Worst seconds of a parse and of a grade, and how often each error came."""
    parsers = [quiet(parser) for name, parser in PARSERS.items() if name != "same_answer"]
    slowest_parse = slowest_grade = 0.0
    errors: dict[str, int] = {}
    for i, text in enumerate(outputs(count, seed)):
        started = time.perf_counter()
        for parser in parsers:
            parser(text)
        parsed = time.perf_counter()
        result = grade(text, _GOLDS[i % len(_GOLDS)], pool)
        slowest_parse = max(slowest_parse, parsed - started)
        slowest_grade = max(slowest_grade, time.perf_counter() - parsed)
        if result.error:
            kind = result.error.split(":")[0]
            errors[kind] = errors.get(kind, 0) + 1
    return slowest_parse, slowest_grade, errors


@pytest.mark.parametrize("count", [400, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_hostile_outputs_are_read_and_graded_within_limits(pool, count):
    """None over its limit, and memory flat. HOSTILE_OUTPUTS says how many, 2,000 by default."""
    run_hostile(count // 4, 1, pool)  # caches and processes are there
    held, peak = resident_mib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    parse, graded, errors = run_hostile(count, 2, pool)
    seconds = time.perf_counter() - started
    held = resident_mib() - held
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print(f"{seconds:.0f} s; worst parse {parse:.3f} s, worst grade {graded:.2f} s; {errors}")
    print(f"memory: {held:.1f} MiB more held, peak {peak / 1024:.1f} MiB higher")
    assert graded < 2 * pool._wall
    assert held < 16
    assert set(errors) <= {"length limit", "time limit", "memory limit"}
