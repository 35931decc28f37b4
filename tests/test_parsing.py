"""How the built-in workflows read what roles wrote: routes, and the mark on what is malformed."""

from __future__ import annotations

import asyncio

import pytest

from envs.arguments import check_arguments, preset_arguments
from envs.parsing import Malformed, check_one_pair, parse_route, read
from envs.search import parsing as search_parsing
from envs.workflow import Prompt, ScriptedTeam


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("<route>1,3</route>", (1, 3)),
        ("Hard.\n<route> 3 , 1 </route>\n", (3, 1)),
        ("not <route>9</route> but\n<route>2</route>", (2,)),
        ("<route>STOP</route>", ()),
        ("none is needed\n<route> STOP </route>", ()),
    ],
)
def test_routes(text, route):
    assert parse_route(text, 3) == route


MALFORMED = [
    "",
    "1,2",
    "I choose <route>1</route>",
    "<route>1</route> <route>2</route>",
    "<route>1</route>\nthat is it",
    "<route>1</route> then",
    "<route>1,2",
    "<route>1,1</route>",
    "<route>4</route>",
    "<route>0</route>",
    "<route>01</route>",
    "<route>-1</route>",
    "<route></route>",
    "<route>1,</route>",
    "<route>1;2</route>",
    "<route>stop</route>",
    "<route>STOP,1</route>",
    "<route>1,STOP</route>",
    "<route>²</route>",
    "<route>١</route>",
    f"<route>{'1' * 5000}</route>",
    f"<route>1,{'0' * 5000}</route>",
]


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("parse", [parse_route, search_parsing.parse_route])
def test_malformed_routes(parse, text):
    with pytest.raises(Malformed):
        parse(text, 3)


def test_search_allows_one_route_in_the_whole_text():
    text = "not <route>1</route> but\n<route>2</route>"
    assert parse_route(text, 3) == (2,)
    with pytest.raises(Malformed, match="2 <route> and 2 </route>, want one pair"):
        search_parsing.parse_route(text, 3)


@pytest.mark.parametrize("parse", [parse_route, search_parsing.parse_route])
def test_dedupe_keeps_the_first_place(parse):
    assert parse("<route>3,1,3</route>", 3, dedupe=True) == (3, 1)
    with pytest.raises(Malformed, match=r"outside 1\.\.3"):
        parse("<route>3,4,3</route>", 3, dedupe=True)


def test_what_is_read_and_what_is_marked():
    async def episode():
        team = ScriptedTeam(["<route>2</route>", "both"])
        outputs = []
        for _ in range(2):
            outputs += await team.act(
                "route", "s", roles=["router"], render=lambda role, state: Prompt("", "")
            )
        return team, [read(team, output, lambda text: parse_route(text, 2)) for output in outputs]

    team, (first, second) = asyncio.run(episode())
    assert first == (2,)
    assert isinstance(second, Malformed) and str(second) == "the last line is not one <route> pair"
    assert [call.malformed for call in team.calls] == [{}, {1: str(second)}]


def test_a_pair_stands_once():
    check_one_pair("<verify>yes</verify>", "verify")
    for text in ("yes", "<verify>yes", "<verify></verify><verify></verify>"):
        with pytest.raises(Malformed, match="want one pair"):
            check_one_pair(text, "verify")


def test_arguments_are_checked_in_one_dialect():
    values = {"count": 1, "word": "a", "switch": False}
    check_arguments(values, counts=("count",), choices={"word": ("a", "b")})
    for change, line in (
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        ({"count": True}, "count must be a whole number of at least 1, got True"),
        ({"word": "c"}, "word must be one of a, b, got 'c'"),
        ({"switch": "no"}, "switch must be true or false, got 'no'"),
    ):
        with pytest.raises(ValueError) as caught:
            check_arguments(values | change, counts=("count",), choices={"word": ("a", "b")})
        assert str(caught.value) == line
    assert preset_arguments({"one": {"count": 2}}, "one") == {"count": 2}
    with pytest.raises(ValueError, match="preset must be one of one, got 'two'"):
        preset_arguments({"one": {}}, "two")
