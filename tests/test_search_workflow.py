"""The Search workflow: its event traces, its parsing, and what goes into the shared state."""

from __future__ import annotations

import asyncio
from dataclasses import FrozenInstanceError

import pytest

from envs.parsing import Malformed
from envs.search.parsing import parse_answer, parse_query, parse_verdict
from envs.search.retrieval.base import Passage, RetrievalError, merge
from envs.search.workflow import SearchWorkflow
from envs.workflow import Cut, EpisodeFailed, ScriptedTeam, Task

TASK = Task("t", "What is the currency of the country whose capital is Lome?", ("XOF", "CFA franc"))
YES, NO = "<verify>yes</verify>", "missing a link\n<verify>no</verify>"
ANSWER = "<think>doc 2</think><answer>XOF</answer>"


def query(text: str) -> str:
    return f"<think>go</think><search>{text}</search>"


class Shelf:
    """A retriever that makes up passages named after the query, and keeps what it was asked."""

    def __init__(self, error: Exception | None = None):
        self.asked: list[tuple[list[str], int]] = []
        self.error = error

    async def search(self, queries, topk):
        self.asked.append((list(queries), topk))
        if self.error:
            raise self.error
        return [
            [Passage(f"{q}#{i}", f'"{q}"\nbody {i} XOF', 1.0 / (i + 1)) for i in range(topk)]
            for q in queries
        ]


def play(replies, *, error=None, preset=None, task=TASK, **options):
    shelf, team = Shelf(error), ScriptedTeam(replies)
    if preset:
        workflow = SearchWorkflow.preset(preset, retriever=shelf, **options)
    else:
        workflow = SearchWorkflow(retriever=shelf, **options)
    outcome = asyncio.run(workflow.run(task, team))
    score = asyncio.run(workflow.reward(task, outcome, team))
    return team, outcome, score, shelf


def trace(team):
    return [(call.type, len(call.roles)) for call in team.calls]


def reasons(team):
    return [reason for call in team.calls for reason in call.malformed.values()]


# ---- traces -----------------------------------------------------------------------------------


def test_router_and_verifier_with_search_cardinalities_2_1():
    team, outcome, score, shelf = play(
        [
            "two facts are missing\n<route>1,3</route>",
            query("capital Lome"),
            query("currency Togo"),
            NO,
            "<route>2</route>",
            query("Togo currency code"),
            YES,
            ANSWER,
        ]
    )
    assert trace(team) == [
        ("route", 1),
        ("search", 2),
        ("verify", 1),
        ("route", 1),
        ("search", 1),
        ("verify", 1),
        ("answer", 1),
    ]
    assert team.calls[1].roles == ("worker_1", "worker_3")
    assert team.calls[4].roles == ("worker_2",)
    assert shelf.asked == [(["capital Lome", "currency Togo"], 3), (["Togo currency code"], 3)]
    assert score.reward == 1.0 and score.correct and score.info["f1"] == 1.0
    assert outcome.info == {
        "turns": 2.0,
        "queries": 3.0,
        "duplicate_queries": 0.0,
        "evidence_support": 1.0,
    }
    assert team.tool_calls == {"retrieve": 2}
    assert not reasons(team)


def test_router_only_with_search_cardinalities_3_2():
    team, outcome, score, _ = play(
        [
            "<route>1,2,3</route>",
            query("a"),
            query("b"),
            query("c"),
            "<route>1,2</route>",
            query("d"),
            query("e"),
            "enough\n<route>STOP</route>",
            "<think>so</think><answer>the CFA franc zone</answer>",
        ],
        verifier=False,
    )
    assert trace(team) == [
        ("route", 1),
        ("search", 3),
        ("route", 1),
        ("search", 2),
        ("route", 1),
        ("answer", 1),
    ]
    assert outcome.info["turns"] == 3.0
    assert score.reward == 0.0 and not score.correct
    assert score.info["f1"] == pytest.approx(0.8)  # precision 2/3, recall 1


def test_verifier_only_asks_the_verifier_first_and_every_worker():
    team, _, score, _ = play(
        [NO, query("a"), query("b"), NO, query("c"), query("d"), YES, ANSWER],
        router=False,
        workers=2,
    )
    assert trace(team) == [
        ("verify", 1),
        ("search", 2),
        ("verify", 1),
        ("search", 2),
        ("verify", 1),
        ("answer", 1),
    ]
    assert score.correct


def test_stop_before_any_search_lets_the_answer_agent_speak():
    team, outcome, score, shelf = play(["<route>STOP</route>", ANSWER], verifier=False)
    assert trace(team) == [("route", 1), ("answer", 1)]
    assert shelf.asked == [] and outcome.info["evidence_support"] == 0.0 and score.correct


@pytest.mark.parametrize("answers", [True, False])
def test_router_and_verifier_at_max_turns(answers):
    turn = ["<route>1</route>", query("a"), NO]
    team, outcome, score, _ = play(turn + turn + [ANSWER], max_turns=2, answer_at_max_turns=answers)
    assert [t for t, _ in trace(team)] == ["route", "search", "verify"] * 2 + ["answer"] * answers
    assert (outcome.response == ANSWER) is answers and score.correct is answers
    assert outcome.info["duplicate_queries"] == 1.0


def test_router_only_without_answer_at_max_turns_skips_a_search_nobody_reads():
    replies = ["<route>1</route>", query("a"), "<route>2</route>"]
    team, outcome, score, _ = play(replies, verifier=False, max_turns=2, answer_at_max_turns=False)
    assert trace(team) == [("route", 1), ("search", 1), ("route", 1)]
    assert outcome.response == "" and score.reward == 0.0


def test_dr_mas_preset_has_three_searches_and_eight_calls_at_most():
    turn = [NO, query("a")]
    team, _, score, _ = play(turn * 3 + [YES, ANSWER], preset="dr_mas")
    assert trace(team) == [("verify", 1), ("search", 1)] * 3 + [("verify", 1), ("answer", 1)]
    assert score.correct
    team, outcome, score, _ = play(turn * 3 + [NO], preset="dr_mas")
    assert trace(team) == [("verify", 1), ("search", 1)] * 3 + [("verify", 1)]
    assert outcome.response == "" and score.reward == 0.0
    team, *_ = play(["no tag at all", ANSWER], preset="dr_mas")  # a missing verdict is a yes
    assert trace(team) == [("verify", 1), ("answer", 1)] and len(reasons(team)) == 1


# ---- malformed outputs and failures -----------------------------------------------------------


def test_a_route_that_does_not_parse_spends_the_turn():
    team, outcome, *_ = play(
        ["1 and 2", "<route>1,1</route>", "<route>4</route>", ANSWER], max_turns=3
    )
    assert trace(team) == [("route", 1)] * 3 + [("answer", 1)]
    assert len(reasons(team)) == 3 and outcome.state.steps == ()


def test_dedupe_accepts_a_repeated_worker():
    team, *_ = play(["<route>2,1,2</route>", query("a"), query("b"), YES, ANSWER], dedupe=True)
    assert team.calls[1].roles == ("worker_1", "worker_2") and not reasons(team)


def test_a_malformed_query_stays_in_its_event_and_is_not_searched():
    team, outcome, _, shelf = play(
        ["<route>1,2</route>", "<search>no thought</search>", query("b"), YES, ANSWER]
    )
    assert trace(team)[1] == ("search", 2)
    assert list(team.calls[1].malformed) == [team.calls[1].outputs[0].uid]
    assert shelf.asked == [(["b"], 3)] and outcome.state.steps[0].queries == ("b",)


def test_no_valid_query_at_all_retrieves_nothing_and_goes_on():
    team, outcome, _, shelf = play(["<route>1</route>", "hm", YES, ANSWER])
    assert trace(team) == [("route", 1), ("search", 1), ("verify", 1), ("answer", 1)]
    assert shelf.asked == [] and outcome.state.steps[0].passages == ()


@pytest.mark.parametrize(("missing", "searches"), [("no", 1), ("yes", 0)])
def test_missing_verdict_decides_how_the_loop_goes_on(missing, searches):
    team, *_ = play(
        ["<verify>perhaps</verify>", query("a"), ANSWER] if searches else ["hm", ANSWER],
        router=False, workers=1, max_turns=1, missing_verdict=missing,
    )  # fmt: skip
    assert [t for t, _ in trace(team)] == ["verify"] + ["search"] * searches + ["answer"]
    assert len(reasons(team)) == 1


def test_a_malformed_answer_is_marked_and_its_last_pair_still_scored():
    team, _, score, _ = play(["<route>STOP</route>", "<answer>XOF</answer>"])
    assert len(reasons(team)) == 1 and score.correct


def test_a_retrieval_that_fails_for_good_fails_the_episode():
    replies = ["<route>1</route>", query("a"), YES, ANSWER]
    with pytest.raises(EpisodeFailed, match="every address refused") as failure:
        play(replies, error=RetrievalError("every address refused"))
    assert failure.value.cause == "retrieval"
    with pytest.raises(KeyError):  # anything else is a defect, not a failed retrieval
        play(replies, error=KeyError("bug"))


# ---- parsing ----------------------------------------------------------------------------------


def test_parse_query():
    assert parse_query("<think>\nfirst\n</think>\n<search> capital of Togo </search>\n") == (
        "capital of Togo"
    )
    assert parse_query("<think></think><search>x</search>") == "x"


@pytest.mark.parametrize(
    "text",
    [
        "<search>x</search>",
        "<think>a</think><think>b</think><search>x</search>",
        "<think>a</think><search>x</search><search>y</search>",
        "<think>a</think><search>x</search> bye",
        "<think>a</think> so <search>x</search>",
        "<search>x</search><think>a</think>",
        "<think>a<search>x</search></think>",
        "<think>a</think><search>  </search>",
        "<think>a</think><search>x",
        "</think>a<think><search>x</search>",
    ],
)
def test_malformed_queries(text):
    with pytest.raises(Malformed):
        parse_query(text)


def test_parse_verdict():
    assert parse_verdict("all there: <verify>yes</verify>") is True
    assert parse_verdict("<verify> no </verify>\n") is False
    for text in ("", "yes", "<verify>maybe</verify>", "<verify>yes</verify><verify>no</verify>"):
        with pytest.raises(Malformed):
            parse_verdict(text)


def test_parse_answer():
    assert parse_answer("<think>x</think>\nSo: <answer> XOF </answer>.") == "XOF"
    for text in (
        "<answer>XOF</answer>",
        "<answer>XOF</answer><think>x</think>",
        "<think>x</think><answer> </answer>",
        "<think>x</think><answer>a</answer><answer>b</answer>",
        "<think>x</think><answer>a",
    ):
        with pytest.raises(Malformed):
            parse_answer(text)


# ---- state and prompts ------------------------------------------------------------------------


def test_members_of_an_event_share_the_state_before_it():
    team, *_ = play(["<route>1,2</route>", query("secret a"), query("secret b"), YES, ANSWER])
    search, verify = team.calls[1], team.calls[2]
    assert search.state.steps == () and len(verify.state.steps) == 1
    for prompt in search.prompts:
        assert "secret" not in prompt.text()
    assert "secret a" in verify.prompts[0].text() and "secret b" in verify.prompts[0].text()
    with pytest.raises(FrozenInstanceError):
        search.state.turn = 3


def test_passages_are_observations_and_thoughts_stay_private():
    team, outcome, *_ = play(
        ["<route>1</route>", "<think>my plan</think><search>q</search>", YES, ANSWER]
    )
    assert all("body 0" not in output.text for call in team.calls for output in call.outputs)
    text = team.calls[-1].prompts[0].text()
    assert '<search>q</search>\n<information>\nDoc 1: "q"\nbody 0' in text
    assert "my plan" not in text
    assert [p.id for p in outcome.state.passages] == ["q#0", "q#1", "q#2"]


@pytest.mark.parametrize("style", ["full", "short"])
def test_everything_but_the_question_and_the_instruction_may_be_cut(style):
    team, *_ = play(
        ["<route>1</route>", query("q"), NO, "<route>2</route>", query("r"), YES, ANSWER],
        prompt_style=style, passage_tokens=32,
    )  # fmt: skip
    prompt = team.calls[-1].prompts[0]
    cuts = [part for part in prompt.user if isinstance(part, Cut)]
    fixed = "".join(part for part in prompt.user if isinstance(part, str))
    assert "body" not in fixed and "Lome" in fixed
    passages = [cut for cut in cuts if "body" in cut.text]
    assert len(passages) == 6
    assert all(cut.keep == "first" and cut.limit == 32 for cut in passages)
    assert any(cut.text == "<route>2</route>" and cut.keep == "last" for cut in cuts)
    assert not any(cut.text == "<route>1</route>" for cut in cuts)  # the latest only


def test_short_style_names_the_role_and_stays_small():
    team, *_ = play(
        ["<route>1,2</route>", query("a"), query("b"), YES, ANSWER], prompt_style="short", topk=1
    )
    assert [call.prompts[0].system for call in team.calls] == [
        "router", "worker 1", "verifier", "answerer",
    ]  # fmt: skip
    assert team.calls[0].prompts[0].text() == TASK.prompt
    assert team.calls[-1].prompts[0].text() == (
        TASK.prompt + "\n<search>a</search>\n<search>b</search>\n<information>"
        '"a"\nbody 0 XOF\n"b"\nbody 0 XOF\n</information>\n<route>1,2</route>\n<verify>yes</verify>'
    )


def test_full_prompts_tell_each_role_its_tags():
    team, *_ = play(["<route>1,2</route>", query("a"), query("b"), YES, ANSWER])
    texts = {role: p.text() for c in team.calls for role, p in zip(c.roles, c.prompts, strict=True)}
    assert "workers 1 to 3" in texts["router"] and "<route>STOP</route>" in texts["router"]
    assert "worker 2 of 3" in texts["worker_2"] and "</search>" in texts["worker_2"]
    assert "<verify>yes</verify>" in texts["verifier"]
    assert "<answer>" in texts["answerer"]


def test_merge_takes_every_querys_best_first_and_drops_repeats():
    a, b, c, d = (Passage(name, name) for name in "abcd")
    assert merge([[a, b], [a, c, d], []]) == (a, b, c, d)
    assert merge([[a, b], [c]], limit=2) == (a, c)
    assert merge([]) == ()


def test_the_same_query_twice_in_one_event_is_searched_once_and_counted():
    _, outcome, _, shelf = play(["<route>1,2</route>", query("a"), query("a"), YES, ANSWER])
    assert shelf.asked == [(["a"], 3)] and outcome.info["duplicate_queries"] == 1.0


def test_roles_and_refused_arguments():
    workflow = SearchWorkflow(retriever=Shelf(), workers=2, verifier=False)
    assert workflow.roles == ("router", "worker_1", "worker_2", "answerer")
    for options in (
        {"router": False, "verifier": False},
        {"workers": 0},
        {"max_turns": 0},
        {"topk": 0},
        {"topk": 2.5},
        {"workers": "3"},
        {"max_turns": True},
        {"max_passages": -1},  # would drop the last passage
        {"passage_tokens": 0},
        {"router": "no"},  # a text is true
        {"dedupe": 1},
        {"answer_at_max_turns": None},
        {"missing_verdict": "approve"},
        {"prompt_style": "tiny"},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            SearchWorkflow(retriever=Shelf(), **options)
    with pytest.raises(ValueError, match="dr_mas"):
        SearchWorkflow.preset("drmas", retriever=Shelf())
