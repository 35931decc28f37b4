"""Exact match, F1 and answer extraction of the Search workflow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.search.scoring import contains_answer, exact_match, extract_answer, f1, normalize
from tests.linear_time import assert_linear


@pytest.mark.parametrize(
    ("prediction", "golds", "want"),
    [
        ("Paris, France", ["Paris"], False),
        ("The Beatles!", ["beatles"], True),
        ("U.S.A.", ["USA", "United States"], True),
        ("1,000", ["1000"], True),
        ("", ["The"], False),
        ("The", ["The"], False),
        ("not Paris", ["Paris"], False),
        ("Beyonce", ["Beyoncé"], False),
        ("Beyonce\u0301", ["Beyonc\u00e9"], True),  # one text: the accent apart, and composed
        ("\u1112\u1161\u11ab", ["\ud55c"], True),  # Hangul likewise
        # SQuAD's rules, which Search-R1 has: only ASCII punctuation is dropped.
        ("St. Peter\u2019s Basilica", ["St. Peter's Basilica"], False),
        ("1914\u20131918", ["1914-1918"], False),
        ("\u22125", ["-5"], False),
        ("  an   Apple ", ["apple"], True),
        ("theatre", ["atre"], False),
        ("Paris", "Paris", True),  # one gold, not a list of letters
        ("P", "Paris", False),
        ("Paris", [], False),
    ],
)
def test_exact_match(prediction, golds, want):
    assert exact_match(prediction, golds) is want


@pytest.mark.parametrize(
    ("prediction", "golds", "want"),
    [
        ("Paris, France", ["Paris"], 2 / 3),  # precision 1/2, recall 1
        ("not Paris", ["Rome", "Paris"], 2 / 3),
        ("big big cat", ["big cat"], 4 / 5),  # a repeated word counts once: precision 2/3, recall 1
        ("The Beatles!", ["beatles"], 1.0),
        ("", ["The"], 0.0),
        ("Rome", ["Paris"], 0.0),
    ],
)
def test_f1(prediction, golds, want):
    assert f1(prediction, golds) == pytest.approx(want)


@given(st.text("aAthe .,P1", max_size=12), st.lists(st.text("aAthe .,P1", max_size=12), max_size=3))
@settings(max_examples=300, deadline=None)
def test_exact_match_never_exceeds_f1(prediction, golds):
    assert exact_match(prediction, golds) <= f1(prediction, golds) <= 1.0


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("<answer>Paris</answer>", "Paris"),
        ("I do not know", None),
        ("<answer>Rome</answer> no wait <answer> Paris </answer>", "Paris"),
        ("<answer>Paris", None),
        ("<answer></answer>", ""),
        ("<answer>Rome <answer>Paris</answer>", "Paris"),
        ("<answer>Rome</answer> and then <answer>Par", "Rome"),
        ("Paris</answer>", None),
        ("<answer>New\nYork</answer>", "New\nYork"),
    ],
)
def test_extract_answer(response, want):
    assert extract_answer(response) == want


def test_only_the_response_is_scored():
    responses = [
        "<answer>Paris</answer>",
        "I do not know",
        "<answer>Rome</answer> no wait <answer> Paris </answer>",
        "<answer>Paris",
        "<answer></answer>",
    ]
    scores = [int(exact_match(extract_answer(r) or "", ["Paris"])) for r in responses]
    assert scores == [1, 0, 1, 0, 0]
    assert not exact_match(extract_answer(responses[1]) or "", ["Beijing"])


def test_contains_answer_matches_whole_words():
    assert contains_answer("The capital of Chad is N'Djamena.", ["ndjamena"])
    assert contains_answer("code: XAF.", ["xaf"])
    assert not contains_answer("Chadian francs", ["Chad"])
    assert not contains_answer("anything", ["the", ""])


def test_two_encodings_of_a_text_count_as_one_in_f1_and_as_evidence():
    composed, apart = "\u00c9mile Zola", "E\u0301mile Zola"
    assert f1(apart, [composed]) == 1.0
    assert contains_answer(f"by {apart} in 1885", [composed])
    assert contains_answer(f"by {composed} in 1885", [apart])


def test_scoring_takes_linear_time():
    units = ("word ", "the ", "<answer>", "<answer></answer>", "</answer>", ".", "e\u0301", "a")
    assert_linear(normalize, *units)
    assert_linear(extract_answer, *units, around="<answer>{}")
    assert_linear(lambda text: f1(text, [text]), "word ", "a b ")
    assert_linear(lambda text: contains_answer(text, ["b c"]), "b ", " b", "c b ")


def test_normalize_keeps_accents():
    assert normalize("  The  Côte d'Ivoire, an état ") == "côte divoire état"
