"""Prompts cut to their budget, with a tokenizer of one token a letter and with a real one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workflow import Cut, EpisodeFailed, Prompt
from models.tokenizer import ChatTokenizer
from srpo_jax.rollout.prompting import MARK, equal_share, fit_prompt
from tests.make_tiny_tokenizer import TINY


class Letters:
    """One token a letter; the chat adds three, around the system message and the user turn."""

    def encode_chat(self, system, user, *, thinking=False):
        return [1, *map(ord, system), 2, *map(ord, user), 4 if thinking else 3]

    def count_text(self, text):
        return len(text)

    def cut_text(self, text, limit, keep="last"):
        return text[max(0, len(text) - limit) :] if keep == "last" else text[:limit]


LETTERS = Letters()


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer(TINY)


def fit(user, room, system="sys"):
    """Fits a prompt whose user turn has ``room`` letters."""
    return fit_prompt(LETTERS, Prompt(system, tuple(user)), len(system) + 3 + room)


def test_what_fits_is_encoded_as_it_is(tokenizer):
    user = ("the sum: ", Cut("the answer is 4"), "\n", Cut("", "first"))
    prompt = Prompt("solve the problem", user)
    for thinking in (False, True):
        ids = tokenizer.encode_chat(prompt.system, prompt.text(), thinking=thinking)
        fitted = fit_prompt(tokenizer, prompt, len(ids), thinking=thinking)
        assert fitted.ids == tuple(ids)
        assert (fitted.text, fitted.cuts) == (prompt.text(), 0)
        cut = fit_prompt(tokenizer, prompt, len(ids) - 1, thinking=thinking)
        assert len(cut.ids) < len(ids) and cut.cuts == 1


def test_the_last_tokens_stay_and_the_cut_is_marked():
    fitted = fit(["? ", Cut("abcdefghijklmnop")], room=2 + 10)
    assert (fitted.text, fitted.cuts) == ("? [...] mnop", 1)


def test_the_first_tokens_stay_and_the_cut_is_marked():
    fitted = fit(["? ", Cut("abcdefghijklmnop", "first")], room=2 + 10)
    assert (fitted.text, fitted.cuts) == ("? abcd [...]", 1)


def test_no_mark_where_it_has_no_room():
    assert fit(["? ", Cut("abcdefghijklmnop")], room=2 + 6).text == "? klmnop"
    assert fit(["? ", Cut("abcdefghijklmnop")], room=2 + 7).text == "? [...] p"
    assert fit(["? ", Cut("abcdefghijklmnop")], room=2).text == "? "


def test_equal_shares_and_what_short_texts_leave():
    """22 letters in three texts and room for 18: the short text's 6 spare ones go to the others."""
    fitted = fit([Cut("a" * 10), "|", Cut("bb"), "|", Cut("c" * 10)], room=2 + 18)
    assert (fitted.text, fitted.cuts) == ("[...] aa|bb|[...] cc", 2)


@pytest.mark.parametrize(
    "lengths, room, share",
    [
        ([10, 2, 10], 18, 8),
        ([10, 2, 10], 17, 7),
        ([10, 10], 4, 2),
        ([1, 2, 30], 12, 9),
        ([3, 3], 0, 0),
        ([3, 3], -5, 0),
    ],
)
def test_shares(lengths, room, share):
    assert equal_share(lengths, room) == share


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 100))
def test_the_share_is_the_largest_that_fits(lengths, room):
    def used(share):
        return sum(min(length, share) for length in lengths)

    share = equal_share(lengths, room)
    assert used(share) <= room
    assert used(share + 1) > room or used(share) == sum(lengths)


def test_own_limits_hold_also_where_all_fits_and_count_as_cuts():
    user = ["x=", Cut("abcdefgh", limit=3), " y=", Cut("abcdefgh", "first", 3), Cut("z", limit=3)]
    fitted = fit(user, room=100)
    assert (fitted.text, fitted.cuts) == ("x=fgh y=abcz", 2)  # the mark has six letters


def test_a_cut_to_its_own_limit_is_marked():
    user = [Cut("abcdefghijkl", limit=9), "|", Cut("abcdefghijkl", "first", 9), "|", Cut("z")]
    fitted = fit(user, room=100)
    assert (fitted.text, fitted.cuts) == ("[...] jkl|abc [...]|z", 2)


def test_a_text_cut_to_its_limit_and_then_to_its_share_has_one_mark():
    """The shares are 8 letters each."""
    user = [Cut("abcdefghijkl", limit=9), Cut("abcdefghijkl", "first", limit=9)]
    fitted = fit(user, room=16)
    assert (fitted.text, fitted.cuts) == ("[...] klab [...]", 2)


def test_limited_texts_share_like_the_others():
    fitted = fit([Cut("abcdefgh", limit=6), Cut("ijklmnopqrst")], room=8)
    assert (fitted.text, fitted.cuts) == ("efgh" + "qrst", 2)


def test_every_text_goes_before_the_fixed_part_does():
    fitted = fit(["fixed", Cut("abc"), Cut(""), Cut("def")], room=5)
    assert (fitted.text, fitted.cuts) == ("fixed", 2)


def test_seams_that_cost_tokens_shrink_the_shares_no_more_than_needed():
    class Seams(Letters):
        def encode_chat(self, system, user, *, thinking=False):
            return [*super().encode_chat(system, user), *[5] * user.count(MARK)]

    prompt = Prompt("", (Cut("a" * 10), Cut("b" * 10)))
    fitted = fit_prompt(Seams(), prompt, 3 + 17)
    # Shares of 8 and two seams are 18 tokens: shares of 7.
    assert (fitted.text, fitted.cuts, len(fitted.ids)) == ("[...] a[...] b", 2, 3 + 16)


@pytest.mark.parametrize("user", [["fixed", Cut("abc")], ["fixed"]])
def test_a_fixed_part_over_the_budget_fails_the_episode(user):
    with pytest.raises(EpisodeFailed, match="has 11 tokens, the limit is 10") as caught:
        fit(user, room=4)
    assert caught.value.cause == "prompt_budget"


texts = st.text(st.sampled_from("the answer of sum 12+3\nß漢"), max_size=40)
ends = st.sampled_from(["last", "first"])
cuts = st.builds(Cut, texts, ends, st.none() | st.integers(0, 12))


@settings(deadline=None, max_examples=100)
@given(texts, st.lists(texts | cuts, max_size=6), st.integers(10, 90))
def test_a_fitted_prompt_is_a_chat_within_its_budget(tokenizer, system, user, budget):
    prompt = Prompt(system, tuple(user))
    fixed_text = "".join(part for part in user if isinstance(part, str))
    fixed = len(tokenizer.encode_chat(system, fixed_text))
    try:
        fitted = fit_prompt(tokenizer, prompt, budget)
    except EpisodeFailed as error:
        assert error.cause == "prompt_budget" and fixed > budget
        return
    assert len(fitted.ids) <= budget
    assert fitted.ids == tuple(tokenizer.encode_chat(system, fitted.text))
    limited = [part for part in user if isinstance(part, Cut) and part.limit is not None]
    longer = sum(tokenizer.count_text(part.text) > part.limit for part in limited)
    assert longer <= fitted.cuts <= sum(isinstance(part, Cut) for part in user)
    assert fitted.cuts or fitted.text == prompt.text()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), ends), min_size=1, max_size=5),
    st.integers(0, 80),
)
def test_cut_texts_use_their_room_and_keep_their_end(parts, room):
    letters = "abcde"
    user = [Cut(letters[i] * n, keep) for i, (n, keep) in enumerate(parts)]
    fitted = fit(user, room)
    whole = sum(n for n, _ in parts)
    if whole <= room:
        assert fitted.cuts == 0 and len(fitted.text) == whole
        return
    assert room - len(parts) < len(fitted.text) <= room
    share = equal_share([n for n, _ in parts], room)
    marks = sum(n > share > len(MARK) for n, _ in parts)
    assert fitted.text.count(MARK.strip()) == marks
    assert fitted.cuts == sum(n > share for n, _ in parts)
