"""What a user's workflow and reward give back: wrong values are dropped and counted with the user's
line, or refused before anything runs."""

from __future__ import annotations

import asyncio
import math

import pytest

from envs.workflow import Cut, EpisodeFailed, Outcome, Prompt, Score
from launch.cli import exit_code
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.plugins import check_reward, check_workflow, load_object
from srpo_jax.rollout.rollout import count_failures
from srpo_jax.rollout.user_code import UserCodeError, raised_at
from srpo_jax.run.step_metrics import rollout_metrics
from tests.rollout_cases import run

TEAM = """
import asyncio, json, math
from envs.workflow import Cut, EpisodeFailed, Outcome, Prompt, Score

def prompt(role, state):
    if state == "as text":
        return state
    return Prompt("system", (state,))

class Team:
    roles = ("a", "b")
    async def run(self, task, team):
        (output,) = await team.act("say", "the state", roles=["a"], render=prompt)
        if task.prompt == "bad":
            {run}
        return Outcome(output.text)

def reward(task, outcome):
    if task.prompt == "bad":
        {reward}
    return 1.0
"""
RUN_LINE, REWARD_LINE = 15, 20


@pytest.fixture
def play(tmp_path):
    """Results of two good episodes around one whose ``run`` or ``reward`` does something else."""

    def play(run_line="pass", reward_line="pass"):
        name = "my_team.py"
        (tmp_path / name).write_text(TEAM.format(run=run_line, reward=reward_line))
        team = load_object(f"{name}:Team", tmp_path)()
        reward = load_object(f"{name}:reward", tmp_path)
        results = run(team, ["x", "bad", "y"], reward=reward)
        return results, str(tmp_path / name)

    return play


@pytest.mark.parametrize(
    "line, cause, said",
    [
        ("return", "bad_outcome", "Team.run ({file}:12) must return an Outcome, got None"),
        ("return 'yes'", "bad_outcome", "must return an Outcome, got str 'yes'"),
        ("return Outcome(None)", "TypeError", "Outcome: response: a string is due, got None"),
        ("return Outcome(7)", "TypeError", "Outcome: response: a string is due, got int 7"),
        ("return Outcome('', score=1.0)", "TypeError", "a Score or None is due, got float 1.0"),
        ("return Outcome('', info={'n': 'many'})", "TypeError", "Outcome: info['n']: a finite"),
        ("return Outcome('', info={'n': None})", "TypeError", "a finite number is due, got None"),
        ("return Outcome('', info={1: 1.0})", "TypeError", "a name: a string is due, got int 1"),
        ("return Outcome('', info=3)", "TypeError", "a mapping of names to numbers is due"),
        ("Cut(5)", "TypeError", "Cut: text: a string is due, got int 5"),
        ("Cut('', 'middle')", "TypeError", "Cut: keep: 'last' or 'first' is due"),
        ("Cut('', limit=-1)", "TypeError", "Cut: limit: a number of tokens or None is due"),
        ("Prompt(None, ('x',))", "TypeError", "Prompt: system: a string is due, got None"),
        ("Prompt('', ('x', 5))", "TypeError", "a part of user: a string or a Cut is due, got int"),
        ("Prompt('', None)", "TypeError", "strings and Cuts in a tuple is due, got None"),
        ("await team.act('say', 'as text', roles=['a'], render=prompt)", "TypeError",
         "say: what 'a' is shown: a Prompt is due, got str 'as text'"),
        ("await team.act('say', '', roles=['c'], render=prompt)", "ValueError",
         "say: 'c' is none of the workflow's roles: a, b"),
        ("await team.act('say', '', roles='a', render=prompt)", "TypeError", "a list of roles"),
        ("await team.act(5, '', roles=['a'], render=prompt)", "TypeError", "an event: a string"),
        ("team.malformed(output, ValueError('x'))", "TypeError", "the reason: a string is due"),
        ("json.loads('{')", "JSONDecodeError", "Expecting property name"),
        ("asyncio.timeout('soon'); await asyncio.timeout('soon').__aenter__()", "TypeError", "str"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_workflow_drops_its_episode(play, line, cause, said):
    """Errors within libraries too: the line is the user's."""
    results, file = play(run_line=line)
    assert [r.failure for r in results] == [None, cause, None]
    detail = results[1].detail
    assert said.format(file=file) in detail and "\n" not in detail
    assert cause == "bad_outcome" or detail.endswith(f"({file}:{RUN_LINE})")


@pytest.mark.parametrize(
    "line, cause, said",
    [
        ("return None", "bad_reward",
         "reward ({file}:18) must return a Score, a bool, 0 or 1, got None"),
        ("return math.nan", "bad_reward", "must return a Score, a bool, 0 or 1, got float nan"),
        ("return math.inf", "bad_reward", "0 or 1, got float inf"),
        ("return '1'", "bad_reward", "0 or 1, got str '1'"),
        ("return [1.0]", "bad_reward", "0 or 1, got list [1.0]"),
        ("return Score(None, True)", "TypeError", "reward: a finite number is due, got None"),
        ("return Score(math.nan, False)", "TypeError", "a finite number is due, got float nan"),
        ("return Score(-math.inf, False)", "TypeError", "a finite number is due, got float -inf"),
        ("return Score('1', True)", "TypeError", "a finite number is due, got str '1'"),
        ("return Score(1.0, None)", "TypeError", "Score: correct: True or False is due, got None"),
        ("return Score(1.0, 'yes')", "TypeError", "True or False is due, got str 'yes'"),
        ("return Score(1.0, True, error=5)", "TypeError", "Score: error: a string or None is due"),
        ("return Score(1.0, True, info={'f1': 'high'})", "TypeError", "info['f1']: a finite"),
        ("json.loads('{')", "JSONDecodeError", "Expecting property name"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_reward_drops_its_episode(play, line, cause, said):
    results, file = play(reward_line=line)
    assert [r.failure for r in results] == [None, cause, None]
    assert said.format(file=file) in results[1].detail
    assert cause == "bad_reward" or results[1].detail.endswith(f"({file}:{REWARD_LINE})")
    metrics = rollout_metrics(results, [], [])
    assert metrics["reward/mean"] == 1.0 and metrics[f"episodes/failed_{cause}"] == 1


def test_values_that_mean_the_same_are_taken(play):
    score = Score(1, 1, info={"f1": True})
    assert (score, type(score.reward), score.correct) == (
        Score(1.0, True, info={"f1": 1.0}),
        float,
        True,
    )
    assert Prompt("s", "text") == Prompt("s", ["text"]) == Prompt("s", ("text",))
    assert Prompt("s", Cut("x")).user == (Cut("x"),)
    assert EpisodeFailed(404).cause == "404"


def test_a_workflow_that_nobody_scores_ends_the_run_at_once():
    class Unscored:
        roles = ("a",)

        async def run(self, task, team):
            return Outcome("done")

    class Scored(Unscored):
        def reward(self, task, outcome, team):  # needs no event loop: a plain method will do
            return Score(0.5, True)

    with pytest.raises(
        UserCodeError, match=r"Outcome without a score, Unscored has no `reward`"
    ) as e:
        run(Unscored(), ["x"] * 3)
    assert exit_code(e.value) == 2
    (result,) = run(Scored(), ["x"])
    assert (result.episode.reward, result.episode.correct) == (0.5, True)


class Fine:
    roles = ("a",)

    async def run(self, task, team): ...

    async def reward(self, task, outcome, team): ...


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"roles": None}, "Wrong.roles must be the names of its roles, like ('solver', 'judge'), "
         "got None"),
        ({"roles": "solver"}, "got 'solver'"),
        ({"roles": ()}, "got ()"),
        ({"roles": ("a", 1)}, "got ('a', 1)"),
        ({"run": None}, "Wrong has no `async def run(self, task, team)`"),
        ({"run": lambda self, task: None}, "run takes (task), but is called with (task, team)"),
        ({"reward": lambda self, task: None}, "Wrong.reward takes (task), but is called with"),
    ],
)  # fmt: skip
def test_a_workflow_without_its_form_is_refused_at_start(changes, said):
    assert check_workflow(Fine())
    with pytest.raises(RecipeError) as caught:
        check_workflow(type("Wrong", (Fine,), changes)())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "reward, said",
    [(5, "reward: must be a function, got 5"), (lambda task: 1, "reward takes (task), but is")],
)
def test_a_reward_without_its_form_is_refused_at_start(reward, said):
    with pytest.raises(RecipeError) as caught:
        check_reward(reward)
    assert said in str(caught.value)
    assert check_reward(max) is max and check_reward(lambda task, outcome, more=1: 1)


def test_failures_within_a_task_group_keep_their_cause():
    class Groups:
        roles = ("a",)

        async def run(self, task, team):
            async def fail():
                raise EpisodeFailed("retrieval", "no index")

            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

    assert count_failures(run(Groups(), ["x"])) == {"retrieval": 1}


def test_the_line_of_an_error():
    with pytest.raises(ValueError) as caught:
        math.sqrt(-1)
    line = caught.value.__traceback__.tb_lineno
    assert raised_at(caught.value) == f"math domain error ({__file__}:{line})"
    assert raised_at(ValueError("never raised")) == "never raised"
