"""Traces of the Math workflow with scripted teams: active sets, states, outputs, rewards."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from envs.math import workflow as workflow_module
from envs.math.grading import Grade, default_pool
from envs.math.parsing import last_boxed, parse_box, parse_final, parse_verdict
from envs.math.prompts import MathState, Turn, render
from envs.math.workflow import MathWorkflow
from envs.parsing import Malformed
from envs.workflow import Cut, EpisodeFailed, Outcome, ScriptedTeam, Task

TASK = Task(id="t", prompt="What is 12+7+30?", answer="49", extra={"expression": "12+7+30"})
APPROVE, REJECT = "Fine. <verify>approve</verify>", "No. <verify>reject</verify>"


def box(answer) -> str:
    return f"so \\boxed{{{answer}}}"


def play(workflow: MathWorkflow, replies) -> tuple[ScriptedTeam, Outcome]:
    """Runs the workflow and checks that every event left a state of its own."""
    team = ScriptedTeam(replies)
    outcome = asyncio.run(workflow.run(TASK, team))
    ids = [call.state_id for call in team.calls]
    assert len(set(ids)) == len(ids)
    assert outcome.state not in [call.state for call in team.calls]
    return team, outcome


def events(team: ScriptedTeam) -> list[tuple[str, tuple[str, ...]]]:
    assert all(call.kind == "event" for call in team.calls)
    return [(call.type, call.roles) for call in team.calls]


def cardinalities(team: ScriptedTeam) -> list[int]:
    return [len(call.roles) for call in team.calls]


def malformed(team: ScriptedTeam) -> list[tuple[str, str]]:
    """(role, reason) of every marked output, in order."""
    return [
        (output.role, call.malformed[output.uid])
        for call in team.calls
        for output in call.outputs
        if output.uid in call.malformed
    ]


NO_BOX = "no \\boxed answer"
NO_VERDICT = "0 <verify> and 0 </verify>, want one pair"


def value_or_none(parse, text):
    try:
        return parse(text)
    except Malformed:
        return None


# ---- parsing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"a \boxed{3}, no, \boxed{ 7 } indeed", "7"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\frac{1}{2}} and so on", r"\frac{1}{2}"),
        (r"I mark it with \boxed at the end: \boxed{17}.", "17"),
        (r"\boxed{17}. That was the \boxed answer.", "17"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("\\boxed{\n 12\n}", "12"),
        (r"\boxed{\frac{1}{2", None),
        (r"\boxed{3} and then \boxed{\frac{1}{2", None),
        (r"\boxed{5\}", None),
        (r"\boxed{3}, no: \boxed{ }", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (APPROVE, True),
        (REJECT, False),
        ("approve", None),
        ("<verify>approve</verify> <verify>approve</verify>", None),
        ("<verify>approve</verify> <verify>reject</verify>", None),
        ("<verify>approve", None),
        ("<verify>Approve</verify>", None),
        ("<verify> approve </verify>", None),
        ("<verify><verify>approve</verify>", None),
    ],
)
def test_parse_verdict(text, verdict):
    assert value_or_none(parse_verdict, text) is verdict


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12+7=19, 19+30=49\nFINAL: \\boxed{49}", "49"),
        ("  FINAL: the answer is \\boxed{49}.\n", "49"),
        ("\\boxed{49}", None),
        ("FINAL: 49", None),
        ("FINAL: \\boxed{}", None),
        ("so FINAL: \\boxed{49}", None),
        ("FINAL: \\boxed{49}\nthen \\boxed\n{50}", None),
        ("FINAL: \\boxed{49}\n> FINAL: \\boxed{49}", None),
        ("FINAL: \\boxed{48}\nFINAL: \\boxed{49}", None),
        ("FINAL: \\boxed{48}\nor rather \\boxed{49}", None),
    ],
)
def test_parse_final(text, answer):
    assert value_or_none(parse_final, text) == answer


def test_parse_box():
    assert parse_box("so \\boxed{48}, no: \\boxed{49}") == "49"
    with pytest.raises(Malformed, match=r"no \\boxed answer"):
        parse_box("so 49")


# ---- the paper's traces -------------------------------------------------------------------------


def test_trace_2_1_1():
    """Two solvers, verifier rejects, one solver revises: K = 2, 1, 1."""
    workflow = MathWorkflow(
        solvers=2, rounds=2, revision="revise", verify_last=False, aggregator=False
    )
    team, outcome = play(
        workflow, {"solver_1": [box(48), box(49)], "solver_2": [box(47)], "verifier": [REJECT]}
    )
    assert cardinalities(team) == [2, 1, 1]
    assert events(team) == [
        ("solve", ("solver_1", "solver_2")),
        ("verify", ("verifier",)),
        ("revise", ("solver_1",)),
    ]
    assert outcome.response == box(49)
    assert outcome.info == {"rounds": 2.0, "approved": 0.0, "stopped": 0.0}
    # Both solvers acted on the state without drafts; the verifier saw both drafts.
    assert team.calls[0].state.turns == ()
    assert team.calls[1].state.drafts == (("solver_1", box(48)), ("solver_2", box(47)))
    assert team.calls[2].state.feedback == REJECT


def test_trace_3_1_1_1():
    """Three solvers, verifier, aggregator, final revision in one round: K = 3, 1, 1, 1."""
    workflow = MathWorkflow(solvers=3, rounds=1, aggregator=True, final_revision=True)
    team, outcome = play(
        workflow,
        {
            "solver_1": [box(48), box(49)],
            "solver_2": [box(47)],
            "solver_3": [box(49)],
            "verifier": [REJECT],
            "aggregator": [f"sum\nFINAL: {box(50)}"],
        },
    )
    assert cardinalities(team) == [3, 1, 1, 1]
    assert [type_ for type_, _ in events(team)] == ["solve", "verify", "aggregate", "final"]
    assert team.calls[3].roles == ("solver_1",)
    assert team.calls[3].state.aggregate == f"sum\nFINAL: {box(50)}"
    assert outcome.response == box(49)
    assert malformed(team) == []


def test_dr_mas_is_solver_verifier_solver():
    workflow = MathWorkflow.preset("dr_mas")
    assert workflow.roles == ("solver_1", "verifier")
    team, outcome = play(workflow, {"solver_1": [box(48), box(49)], "verifier": [REJECT]})
    assert events(team) == [
        ("solve", ("solver_1",)),
        ("verify", ("verifier",)),
        ("solve", ("solver_1",)),
    ]
    assert outcome.response == box(49)


def test_dr_mas_takes_a_missing_verdict_for_an_approval():
    team, outcome = play(
        MathWorkflow.preset("dr_mas"), {"solver_1": [box(48)], "verifier": ["looks good"]}
    )
    assert cardinalities(team) == [1, 1]
    assert malformed(team) == [("verifier", NO_VERDICT)]
    assert (outcome.response, outcome.info["approved"]) == (box(48), 1.0)


def test_single_is_one_solver_call():
    workflow = MathWorkflow.preset("single")
    assert (workflow.roles, workflow.terminal_role) == (("solver_1",), "solver_1")
    team, outcome = play(workflow, {"solver_1": [box(49)]})
    assert events(team) == [("solve", ("solver_1",))]
    assert outcome.response == box(49)


# ---- variants -----------------------------------------------------------------------------------


def test_later_rounds_solve_with_everyone_and_an_approval_ends_the_loop():
    workflow = MathWorkflow(solvers=2, rounds=5, aggregator=False)
    replies = {
        "solver_1": [box(1), box(3)],
        "solver_2": [box(2), box(3)],
        "verifier": [REJECT, APPROVE],
    }
    team, outcome = play(workflow, replies)
    assert cardinalities(team) == [2, 1, 2, 1]
    assert outcome.info == {"rounds": 2.0, "approved": 1.0, "stopped": 0.0}


def test_verify_last_decides_about_the_last_round_only():
    replies = {"solver_1": [box(1), box(2)], "verifier": [REJECT, REJECT]}
    on, _ = play(MathWorkflow(solvers=1, rounds=2, aggregator=False), replies)
    off, _ = play(MathWorkflow(solvers=1, rounds=2, aggregator=False, verify_last=False), replies)
    assert [t for t, _ in events(on)] == ["solve", "verify", "solve", "verify"]
    assert [t for t, _ in events(off)] == ["solve", "verify", "solve"]


def test_without_a_verifier_every_round_is_played():
    workflow = MathWorkflow(solvers=2, rounds=3, verifier=False, aggregator=False)
    team, _ = play(workflow, lambda role, state, prompt: box(state.round))
    assert cardinalities(team) == [2, 2, 2]


def test_an_approval_still_goes_through_the_closing_events():
    workflow = MathWorkflow(solvers=2, rounds=3, final_revision=True)
    team, outcome = play(
        workflow,
        {
            "solver_1": [box(4), box(49)],
            "solver_2": [box(5)],
            "verifier": [APPROVE],
            "aggregator": ["FINAL: \\boxed{4}"],
        },
    )
    assert [t for t, _ in events(team)] == ["solve", "verify", "aggregate", "final"]
    assert outcome.response == box(49)


@pytest.mark.parametrize(
    ("answers", "scored"),
    [
        (["1", "2", "2"], "2"),
        (["3", "2", "1"], "3"),  # a tie: role order
        (["1", "1.0", "2"], "1"),  # equal values vote together, the first text is scored
        (["2", "1", "1.0"], "1"),
        (["", "", "7"], "7"),  # an empty box has no vote
    ],
)
def test_the_last_proposals_plurality_is_scored(answers, scored):
    workflow = MathWorkflow(solvers=3, rounds=1, verifier=False, aggregator=False)
    assert workflow.terminal_role is None
    replies = {f"solver_{i + 1}": [box(answer)] for i, answer in enumerate(answers)}
    _, outcome = play(workflow, replies)
    assert outcome.response == box(scored)


def test_without_any_box_the_first_draft_is_scored():
    workflow = MathWorkflow(solvers=2, rounds=1, verifier=False, aggregator=False)
    team, outcome = play(workflow, {"solver_1": ["49"], "solver_2": ["it is 49"]})
    assert outcome.response == "49"
    assert malformed(team) == [("solver_1", NO_BOX), ("solver_2", NO_BOX)]


# ---- router -------------------------------------------------------------------------------------

ROUTED = MathWorkflow(solvers=3, rounds=3, router=True, verifier=False, aggregator=False)


def test_router_activates_a_subset_before_each_proposal():
    team, outcome = play(
        ROUTED,
        {
            "router": ["<route>3,1</route>", "<route>2</route>", "<route>STOP</route>"],
            "solver_1": [box(1)],
            "solver_2": [box(2)],
            "solver_3": [box(3)],
        },
    )
    assert events(team) == [
        ("route", ("router",)),
        ("solve", ("solver_1", "solver_3")),
        ("route", ("router",)),
        ("solve", ("solver_2",)),
        ("route", ("router",)),
    ]
    assert outcome.response == box(2)
    assert outcome.info == {"rounds": 3.0, "approved": 0.0, "stopped": 1.0}


def test_stop_before_any_draft_has_no_answer():
    workflow = MathWorkflow(solvers=2, router=True, final_revision=True)
    team, outcome = play(workflow, {"router": ["<route>STOP</route>"]})
    assert events(team) == [("route", ("router",))]
    assert (outcome.response, outcome.info["stopped"]) == ("", 1.0)
    score = asyncio.run(workflow.reward(TASK, outcome, team))
    assert (score.reward, score.correct, score.error) == (0.0, False, None)


def test_a_route_that_does_not_parse_spends_the_round():
    workflow = replace(ROUTED, rounds=2, verifier=True)
    team, outcome = play(
        workflow,
        {
            "router": ["everyone", "<route>2</route>"],
            "solver_2": [box(2)],
            "verifier": [REJECT],
        },
    )
    assert cardinalities(team) == [1, 1, 1, 1]
    assert malformed(team) == [("router", "the last line is not one <route> pair")]
    assert outcome.response == box(2)
    # In the last round it leaves the earlier draft, which is not verified again.
    team, outcome = play(
        workflow, {"router": ["<route>2</route>", "?"], "solver_2": [box(2)], "verifier": [REJECT]}
    )
    assert [t for t, _ in events(team)] == ["route", "solve", "verify", "route"]
    assert (outcome.response, outcome.info["stopped"]) == (box(2), 0.0)


def test_a_revise_round_goes_to_the_first_solver_named():
    team, _ = play(
        replace(ROUTED, rounds=2, revision="revise"),
        {
            "router": ["<route>1,2</route>", "<route>3,1</route>"],
            "solver_1": [box(1)],
            "solver_2": [box(2)],
            "solver_3": [box(3)],
        },
    )
    assert events(team)[1] == ("solve", ("solver_1", "solver_2"))
    assert events(team)[3] == ("revise", ("solver_3",))


# ---- malformed outputs go on --------------------------------------------------------------------


def test_malformed_outputs_are_marked_and_the_workflow_goes_on():
    workflow = MathWorkflow(solvers=2, rounds=2, final_revision=True)
    team, outcome = play(
        workflow,
        {
            "solver_1": ["\\boxed{\\frac{1}{2", box(2), "the same"],
            "solver_2": [box(1), box(1)],
            "verifier": ["<verify>approve</verify><verify>approve</verify>", "hm"],
            "aggregator": [box(2)],
        },
    )
    assert cardinalities(team) == [2, 1, 2, 1, 1, 1]
    assert malformed(team) == [
        ("solver_1", NO_BOX),
        ("verifier", "2 <verify> and 2 </verify>, want one pair"),
        ("verifier", NO_VERDICT),
        ("aggregator", "0 lines FINAL:, want one"),
        ("solver_1", NO_BOX),
    ]
    assert outcome.response == "the same"


def test_missing_verdict_decides_how_the_loop_goes_on():
    replies = {"solver_1": [box(1), box(2)], "verifier": ["?", "?"]}
    reject, _ = play(MathWorkflow(solvers=1, aggregator=False), replies)
    approve, _ = play(MathWorkflow(solvers=1, aggregator=False, missing_verdict="approve"), replies)
    assert (len(reject.calls), len(approve.calls)) == (4, 2)


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"solvers": 0}, "solvers"),
        ({"solvers": 2.0}, "solvers"),
        ({"rounds": 0}, "rounds"),
        ({"revision": "both"}, "solve, revise"),
        ({"prompt_style": "long"}, "full, short"),
        ({"router": "no"}, "router must be true or false"),
        ({"missing_verdict": "stop"}, "reject, approve"),
        ({"rounds": 1, "verify_last": False}, "verifier: false"),
        ({"verifier": False, "missing_verdict": "approve"}, "verifier: true"),
    ],
)
def test_nonsense_settings_are_refused_in_one_line(settings, word):
    with pytest.raises(ValueError, match=word) as caught:
        MathWorkflow(**settings)
    assert "\n" not in str(caught.value)


def test_unknown_preset():
    with pytest.raises(ValueError, match="dr_mas, single"):
        MathWorkflow.preset("drmas")


def test_roles_and_terminal_role_follow_from_the_switches():
    full = MathWorkflow(solvers=2, router=True, final_revision=True)
    assert full.roles == ("router", "solver_1", "solver_2", "verifier", "aggregator")
    assert full.terminal_role == "solver_1"
    assert MathWorkflow().terminal_role == "aggregator"
    assert MathWorkflow(solvers=1).terminal_role == "aggregator"
    assert MathWorkflow.preset("dr_mas", solvers=2).terminal_role is None


# ---- reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "reward"), [("49", 1.0), ("49.0", 1.0), ("48", 0.0)])
def test_reward(answer, reward):
    workflow = MathWorkflow.preset("single")
    team, outcome = play(workflow, {"solver_1": [box(answer)]})
    score = asyncio.run(workflow.reward(TASK, outcome, team))
    assert (score.reward, score.correct, score.error) == (reward, reward == 1.0, None)
    assert team.tool_calls == {"grade": 1}


def test_grades_that_wait_for_a_process_are_in_no_time_limit(monkeypatch):
    """Ten grades of 0.1 s a process: the last of them wait for 0.9 s, the limit is 0.5 s."""
    size = default_pool().size
    busy = threading.Semaphore(size)

    def slow(response, gold):
        with busy:
            time.sleep(0.1)
        return Grade(True, "9")

    monkeypatch.setattr(workflow_module, "grade", slow)
    workflow, outcome = MathWorkflow(), Outcome("\\boxed{9}")

    async def grades():
        teams = [ScriptedTeam([], tool_seconds=0.5) for _ in range(10 * size)]
        return await asyncio.gather(*(workflow.reward(TASK, outcome, team) for team in teams))

    assert all(score.correct for score in asyncio.run(grades()))


def test_a_grade_over_its_limits_is_counted_apart(monkeypatch):
    monkeypatch.setattr(workflow_module, "grade", lambda r, g: Grade(False, "9", "time limit"))
    score = asyncio.run(MathWorkflow().reward(TASK, Outcome("\\boxed{9}"), ScriptedTeam([])))
    assert (score.reward, score.error) == (0.0, "time limit")


def test_a_broken_grader_fails_the_episode(monkeypatch):
    monkeypatch.setattr(workflow_module, "grade", lambda r, g: Grade(False, "9", "crash: exit 1"))
    with pytest.raises(EpisodeFailed) as caught:
        asyncio.run(MathWorkflow().reward(TASK, Outcome("\\boxed{9}"), ScriptedTeam([])))
    assert caught.value.cause == "grader"


# ---- prompts ------------------------------------------------------------------------------------


def state_after_everything(next_: str) -> MathState:
    return MathState(
        "12+7+30",
        solvers=3,
        round=2,
        next=next_,
        turns=(
            Turn("solve", 1, (("solver_1", "OLD " + box(1)),)),
            Turn("verify", 1, (("verifier", "OLD " + REJECT),)),
            Turn("solve", 2, (("solver_1", "NEW1 " + box(48)), ("solver_3", "NEW3 no box"))),
            Turn("verify", 2, (("verifier", "CHECK " + REJECT),)),
            Turn("aggregate", 2, (("aggregator", "SUM FINAL: " + box(49)),)),
        ),
    )


def test_full_prompts_show_the_last_proposal_and_check_as_cuttable_text():
    prompt = render("solver_1", state_after_everything("final"))
    cut = [part.text for part in prompt.user if isinstance(part, Cut)]
    assert [text.split()[0] for text in cut] == ["NEW1", "NEW3", "CHECK", "SUM"]
    text = prompt.text()
    assert "OLD" not in text
    assert text.index("12+7+30") < text.index("NEW1") < text.index("# Your role")
    fixed = "".join(part for part in prompt.user if isinstance(part, str))
    assert "NEW" not in fixed


@pytest.mark.parametrize(
    ("role", "next_", "tag"),
    [
        ("router", "route", "<route>STOP</route>"),
        ("solver_2", "solve", "You are Solver 2"),
        ("solver_2", "revise", "earlier attempt"),
        ("verifier", "verify", "<verify>approve</verify>"),
        ("aggregator", "aggregate", "FINAL: \\boxed{...}"),
        ("solver_1", "final", "hands in"),
    ],
)
def test_full_instructions_name_their_tags(role, next_, tag):
    state = state_after_everything(next_)
    assert tag in render(role, state).text().split("# Your role")[1]


def test_braces_in_a_problem_are_plain_text():
    state = MathState("Let $S=\\{1\\}$ and {x}.", solvers=2, next="route")
    assert "$S=\\{1\\}$ and {x}." in render("router", state).text()


def test_short_prompts():
    first = render("solver_1", MathState("12+7+30", 3, next="solve"), "short")
    assert (first.system, first.text()) == ("solver", "12+7+30")
    last = render("solver_1", state_after_everything("final"), "short")
    assert (last.system, last.text()) == ("solver", "12+7+30\nA 48\nC none\nreject\nFINAL 49")
    team, _ = play(MathWorkflow.preset("single", prompt_style="short"), {"solver_1": [box(49)]})
    assert team.calls[0].prompts[0].text() == TASK.extra["expression"]
