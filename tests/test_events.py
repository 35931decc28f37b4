"""Event records and the event audit, on episodes with given outputs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from envs.audit import audit_episode, render_audit
from envs.workflow import Outcome, Prompt, Score, ScriptedTeam, Task
from srpo_jax.events import Event, Member, record_episode, split_complete


@dataclass(frozen=True)
class Solving:
    problem: str
    drafts: tuple[str, ...] = ()
    verdict: str = ""


def prompt(role, state):
    return Prompt(system=role, user=(state.problem, *state.drafts, state.verdict))


class SolveAndVerify:
    roles = ("solver_1", "solver_2", "verifier")

    async def run(self, task, team):
        state = Solving(task.prompt)
        await team.draft(state, roles=["solver_1"], render=prompt)
        drafts = await team.act("solve", state, roles=self.roles[:2], render=prompt)
        team.malformed(drafts[1], "no box")
        state = replace(state, drafts=tuple(d.text for d in drafts))
        (verdict,) = await team.act("verify", state, roles=["verifier"], render=prompt)
        return Outcome(response=drafts[0].text, state=replace(state, verdict=verdict.text))


def play(workflow, replies=None):
    replies = replies or {
        "solver_1": ["scratch", "four"],
        "solver_2": ["4 perhaps\nor 5"],
        "verifier": ["right"],
    }
    team = ScriptedTeam(replies)
    outcome = asyncio.run(workflow.run(Task("t0", "2+2?", "4"), team))
    return team.calls, outcome


def member(role, uid=0, index=0):
    ids = np.array([7, 8, 9])
    return Member(
        role, "policy", 3, [1, 2], ids, np.full(3, -0.5, np.float32), index=index, uid=uid
    )


def members_of(calls):
    return {o.uid: member(o.role) for call in calls for o in call.outputs}


def record(calls, members):
    score = Score(reward=1.0, correct=True, info={"boxed": 1.0})
    return record_episode(
        calls, members, score, id="t0#1", task="t0", slot=2, rollout=1, answer="4",
        cost={"tokens": 9.0}, info={"rounds": 1.0},
    )  # fmt: skip


def test_events_come_from_acts_and_drafts_are_left_out():
    calls, _ = play(SolveAndVerify())
    episode = record(calls, members_of(calls))
    solve, verify = episode.events
    assert [(e.id, e.type, e.turn, e.k, e.reward) for e in episode.events] == [
        ("t0#1/0", "solve", 0, 2, 1.0),
        ("t0#1/1", "verify", 1, 1, 1.0),
    ]
    assert [(m.role, m.index, m.uid, m.well_formed) for m in solve.members] == [
        ("solver_1", 0, 1, True),
        ("solver_2", 1, 2, False),
    ]
    assert (verify.episode, verify.task, verify.state_id) == ("t0#1", "t0", calls[2].state_id)
    assert solve.slot == verify.slot == 2
    assert solve.complete and verify.complete
    assert solve.members[0].response_ids.tolist() == [7, 8, 9] and solve.members[0].version == 3
    assert (episode.slot, episode.rollout, episode.correct, episode.answer) == (2, 1, True, "4")
    assert episode.cost == {"tokens": 9.0} and episode.info == {"boxed": 1.0, "rounds": 1.0}


def test_a_missing_member_makes_the_event_incomplete_and_it_is_dropped_whole():
    calls, _ = play(SolveAndVerify())
    members = members_of(calls)
    del members[1]
    episode = record(calls, members)
    solve = episode.events[0]
    assert (solve.k, len(solve.members), solve.complete) == (2, 1, False)
    assert solve.members[0].index == 1
    complete, dropped = split_complete(episode.events)
    assert [e.type for e in complete] == ["verify"] and [e.type for e in dropped] == ["solve"]


@pytest.mark.parametrize(
    "indices, complete",
    [
        ([0, 1], True),
        ([1, 0], True),
        ([0, 0], False),
        ([0, 2], False),
        ([0], False),
        ([0, 1, 1], False),
    ],
)
def test_complete_means_every_index_once(indices, complete):
    members = tuple(member("solver", index=i) for i in indices)
    event = Event("e", "ep", "t", "solve", 0, "s", 2, members, 0.0)
    assert event.complete is complete


def test_a_sound_episode_audits_without_problems():
    calls, outcome = play(SolveAndVerify())
    solve, verify = audit_episode(calls, outcome.state)
    assert solve.problems == verify.problems == ()
    assert (solve.id, solve.type, solve.k) == ("event 0", "solve", 2)
    assert solve.consumed == (("solver_1", "four"), ("solver_2", "4 perhaps\nor 5"))
    assert solve.malformed == {1: "no box"}
    assert solve.state == "Solving(problem='2+2?', drafts=(), verdict='')"
    assert solve.state_id == calls[1].state_id
    assert solve.post_state_id == verify.state_id != solve.state_id
    assert verify.post_state_id not in (None, verify.state_id)


def problems(workflow, replies=None, final=True):
    calls, outcome = play(workflow, replies)
    return [event.problems for event in audit_episode(calls, outcome.state if final else None)]


def test_without_a_final_state_the_last_transition_is_unproven():
    first, last = problems(SolveAndVerify(), final=False)
    assert first == () and len(last) == 1 and "no final state" in last[0]


def test_a_state_that_does_not_move_is_a_problem():
    class Idle(SolveAndVerify):
        async def run(self, task, team):
            state = Solving(task.prompt)
            await team.act("solve", state, roles=["solver_1"], render=prompt)
            await team.act("solve", state, roles=["solver_1"], render=prompt)
            return Outcome("", state=state)

    for found in problems(Idle()):
        assert len(found) == 1 and "did not move" in found[0]


def test_a_member_that_saw_anothers_current_output_is_a_problem():
    class Leaky(SolveAndVerify):
        async def run(self, task, team):
            seen = []  # grows while the event is under way

            def leaking(role, state):
                seen.append(role)
                return Prompt(role, (state.problem, *seen))

            state = Solving(task.prompt)
            drafts = await team.act("solve", state, roles=self.roles[:2], render=leaking)
            return Outcome("", state=replace(state, drafts=tuple(d.text for d in drafts)))

    (found,) = problems(Leaky())
    assert len(found) == 2 and "solver_1 did not act on the pre-action state alone" in found[0]


def test_a_state_changed_in_place_is_a_problem():
    @dataclass
    class Mutable:
        problem: str
        drafts: list

    class InPlace(SolveAndVerify):
        async def run(self, task, team):
            state = Mutable(task.prompt, [])
            render = lambda role, s: Prompt(role, (s.problem, *s.drafts))  # noqa: E731
            (draft,) = await team.act("solve", state, roles=["solver_1"], render=render)
            state.drafts.append(draft.text)
            return Outcome("", state=state)

    (found,) = problems(InPlace())
    assert [text.split(":")[0] for text in found] == ["state", "prompt"]


@pytest.mark.parametrize("change", ["missing", "twice"])
def test_outputs_that_do_not_match_the_roles_are_a_problem(change):
    calls, outcome = play(SolveAndVerify())
    first, second = calls[1].outputs
    calls[1].outputs = (first,) if change == "missing" else (first, first)
    found = audit_episode(calls, outcome.state)[0].problems
    assert found[0].startswith("K: 2 roles")
    calls[1].outputs = (second, first)
    (found,) = audit_episode(calls, outcome.state)[0].problems
    assert "the outputs are of ['solver_2', 'solver_1']" in found


def test_the_audit_as_text():
    calls, outcome = play(SolveAndVerify())
    audited = audit_episode(calls, outcome.state)
    solve, verify = (a.state_id for a in audited)
    assert render_audit(audited).splitlines() == [
        f"event 0  solve  K=2  {solve} -> {verify}",
        "  state  Solving(problem='2+2?', drafts=(), verdict='')",
        "  solver_1: four",
        "  solver_2 [malformed: no box]: 4 perhaps or 5",
        f"event 1  verify  K=1  {verify} -> {audited[1].post_state_id}",
        "  state  Solving(problem='2+2?', drafts=('four', '4 perhaps\\nor 5'), verdict='')",
        "  verifier: right",
        "2 events, all event-atomic",
    ]
    text = render_audit(audit_episode(calls), width=40)
    assert "-> unknown" in text and "PROBLEM  transition" in text
    assert text.endswith("2 events, 1 with problems")
    assert "  state  Solving(problem='2+2?', draf..." in text
