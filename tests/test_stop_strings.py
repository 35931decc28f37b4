"""Stop strings: found in any split into bursts, at the same token as by reading the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import ChatTokenizer
from srpo_jax.engine.stop_strings import StopStrings, text_before


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer("assets/tiny_team")


def ids_of(tokenizer, *pieces):
    """The ids of pieces of text; a special token's text is that token."""
    ids = []
    for piece in pieces:
        special = piece in tokenizer.special_tokens
        ids += [tokenizer._backend.token_to_id(piece)] if special else tokenizer.encode_text(piece)
    return ids


def by_reading_everything(tokenizer, strings, ids):
    """The plain reference: the first beginning of the response whose text holds a string."""
    for end in range(1, len(ids) + 1):
        for string in strings:
            special = any(token in string for token in tokenizer.special_tokens)
            if string in tokenizer.decode(ids[:end], special=special):
                return end
    return None


def in_bursts(tokenizer, strings, ids, sizes):
    stops, said = StopStrings(strings, tokenizer), []
    while len(said) < len(ids):
        said += ids[len(said) : len(said) + next(sizes)]
        if (end := stops.end(said)) is not None:
            return end
    return None


def every(size):
    while True:
        yield size


@pytest.mark.parametrize("burst", [1, 2, 3, 16])
def test_special_tokens_end_a_response(tokenizer, burst):
    ids = ids_of(tokenizer, "1", "2", "<|im_start|>", "use", "r", " ", "4")
    strings = ["<|im_start|>", "<|endoftext|>"]
    assert in_bursts(tokenizer, strings, ids, every(burst)) == 3


def test_only_strings_that_name_special_tokens_see_them(tokenizer):
    ids = ids_of(tokenizer, "a", "<|im_start|>", "b", "<|im_start|>", "c")
    assert StopStrings(["a<|im_start|>b"], tokenizer).end(ids) == 3
    assert StopStrings(["b<|im_start|>", "zz"], tokenizer).end(ids) == 4
    assert StopStrings(["ab"], tokenizer).end(ids) == 3
    assert StopStrings(["im_start", "|>"], tokenizer).end(ids) is None
    assert StopStrings(["c", "<|im_start|>b<|im_start|>"], tokenizer).end(ids) == 4


def test_the_text_before_a_stop_string(tokenizer):
    ids = ids_of(tokenizer, "a", "<|im_start|>", "bé", "b", "<|im_start|>")

    def before(*strings, special=False):
        return text_before(ids, strings, tokenizer, special=special)

    assert before("zz") == "abéb" and before("zz", special=True) == tokenizer.decode(
        ids, special=True
    )
    assert before("<|im_start|>") == "a" and before("b<|im_start|>") == "abé"
    assert before("éb<|im_start|>", "b") == "a"
    assert before("b<|im_start|>", special=True) == "a<|im_start|>bé"
    assert before("abé", special=True) == ""
    assert before("éb", special=True) == "a<|im_start|>b"


PIECES = ["a", "ab", "b", " ", "é", "日本", "\U0001f600", "1", "answer", "<|im_start|>", "<|", "|>"]
STRINGS = ["ab", "b a", "é", "本a", "\U0001f600b", "1<|im_start|>", "<|im_start|>", "answer1", "|>"]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=30),
    st.lists(st.integers(3, 258), max_size=6),
    st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_split_into_bursts_finds_the_same_token(tokenizer, pieces, bytes_, strings, random):
    """Characters of several tokens, and single bytes that are no text, among the pieces."""
    ids = ids_of(tokenizer, *pieces)
    for byte in bytes_:
        ids.insert(random.randrange(len(ids) + 1), byte)

    def sizes():
        while True:
            yield random.randint(1, 9)

    expected = by_reading_everything(tokenizer, strings, ids)
    assert in_bursts(tokenizer, strings, ids, sizes()) == expected


@pytest.mark.parametrize("kind, tokens", [("text", 16_384), ("half characters", 2048)])
def test_a_response_of_twice_the_length_takes_twice_the_time(tokenizer, kind, tokens):
    one = ids_of(tokenizer, "The answer is 12. ") if kind == "text" else ids_of(tokenizer, "é")[:1]

    def seconds(length):
        ids = (one * length)[:length]
        best = float("inf")
        for _ in range(5):
            started = time.thread_time()
            assert in_bursts(tokenizer, ["never there", "<|im_start|>"], ids, every(16)) is None
            best = min(best, time.thread_time() - started)
        return best

    def doubles(pause):
        time.sleep(pause)
        short, long = seconds(tokens), seconds(2 * tokens)
        return long > 2.5 * short

    # A neighbour on the machine slows it for a while, a quadratic function does so always.
    assert not all(doubles(pause / 4) for pause in range(8))
