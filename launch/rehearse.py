"""Runs one episode of a workflow with a scripted team: every prompt, then the audit of its events.

Without --replies the built-in workflows get a script that ends well, and your own workflow gets
placeholders. With --checkpoint a model speaks instead.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from envs.built_in import WORKFLOWS, load
from envs.workflow import (
    EpisodeFailed,
    Outcome,
    Prompt,
    Replies,
    ScriptedTeam,
    Task,
    Team,
    Workflow,
)
from launch.cli import Parser, entry, output, visible
from srpo_jax.recipe.errors import RecipeError, nearest
from srpo_jax.recipe.paths import find_model
from srpo_jax.recipe.plugins import build_retriever, make_workflow
from srpo_jax.recipe.recipe import RetrieverConfig, WorkflowConfig
from srpo_jax.recipe.yaml import parse_yaml
from srpo_jax.rollout.user_code import UserCodeError, checked_outcome, checked_score, raised_at

Reply = Callable[[str, Any, Prompt], str]  # what a role says of a state that it is shown
Script = Callable[[Task, Sequence[str]], Reply]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.rehearse",
        __doc__,
        "python -m launch.rehearse search --arg workers=2 --arg router=false",
    )
    parser.add_argument("workflow", help="math, search or my_team.py:MyWorkflow")
    parser.add_argument("--task", metavar="TEXT", help="the task's prompt")
    parser.add_argument("--answer", default=None, help="its gold answer")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the workflow"
    )
    parser.add_argument("--corpus", default="factbook", help="what a search workflow searches")
    speaker = parser.add_mutually_exclusive_group()
    speaker.add_argument(
        "--replies", metavar="FILE.json", help="{role: [outputs]}, or all outputs in call order"
    )
    speaker.add_argument("--checkpoint", metavar="PATH", help="sample from this model")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="limit with --checkpoint")
    parser.add_argument("--response-tokens", type=int, default=128, help="limit with --checkpoint")
    parser.add_argument("--temperature", type=float, default=1.0, help="with --checkpoint")
    args = parser.parse_args(argv)
    for limit in ("prompt_tokens", "response_tokens"):
        if (value := getattr(args, limit)) < 1:
            parser.error(f"--{limit.replace('_', '-')} must be at least 1, got {value}")
    if not 0 < args.temperature < math.inf:
        parser.error(f"--temperature must be positive, got {args.temperature:g}")

    built_in = WORKFLOWS.get(args.workflow)
    name = None if built_in is None else args.workflow
    if name is None and ":" not in args.workflow:
        raise RecipeError(
            f"the workflow must be {', '.join(WORKFLOWS)} or my_team.py:MyWorkflow, got "
            f"{args.workflow!r}: {nearest(args.workflow, WORKFLOWS)}"
        )
    config = WorkflowConfig(
        name=name, path=None if name else args.workflow, args=dict(map(_argument, args.arg))
    )
    workflow = make_workflow(config, Path.cwd(), lambda: _retriever(args.corpus))
    prompt, answer = ("What is 6 times 7?", "42") if built_in is None else built_in.example
    if args.task is not None:
        prompt, answer = args.task, args.answer if args.answer is not None else "unknown"
    elif args.answer is not None:
        answer = args.answer
    task = Task("rehearsal", prompt, answer)

    console = output()
    if args.checkpoint is not None:
        limits = (args.prompt_tokens, args.response_tokens, args.temperature)
        return show_rehearsal(speak(workflow, task, args.checkpoint, *limits), console)
    if args.replies is not None:
        replies: Replies = read_replies(args.replies)
    else:
        script: Script = placeholders if built_in is None else load(built_in.script)
        replies = script(task, workflow.roles)
    return show_rehearsal(asyncio.run(act_out(workflow, task, replies)), console)


@dataclass(frozen=True)
class Rehearsal:
    """One episode: its team with the calls it made, and its end or why it had none."""

    team: Team
    outcome: Outcome | None = None
    reward: float | None = None
    failure: str | None = None


async def act_out(workflow: Workflow, task: Task, replies: Any) -> Rehearsal:
    """The episode with given outputs.

    Args:
        workflow: the team's.
        task: its task.
        replies: as :class:`envs.workflow.ScriptedTeam` takes them.

    Raises:
        UserCodeError: the workflow's outcome or reward has not the form that is asked for.
    """
    team = ScriptedTeam(replies, roles=workflow.roles)
    try:
        outcome = checked_outcome(await workflow.run(task, team), workflow.run)
        score = outcome.score
        reward = getattr(workflow, "reward", None) if score is None else None
        if reward is not None:
            value = reward(task, outcome, team)
            value = await value if inspect.isawaitable(value) else value
            score = checked_score(value, reward)
    except EpisodeFailed as error:
        return Rehearsal(team, failure=str(error))
    except UserCodeError:
        raise
    except Exception as error:  # the workflow's own
        return Rehearsal(team, failure=f"{type(error).__name__}: {raised_at(error)}")
    return Rehearsal(team, outcome, None if score is None else score.reward)


def speak(
    workflow: Workflow,
    task: Task,
    checkpoint: str,
    prompt_tokens: int,
    response_tokens: int,
    temperature: float,
) -> Rehearsal:
    """The episode with outputs sampled from a checkpoint.

    Args:
        workflow: the team's.
        task: its task.
        checkpoint: a local folder or hub name.
        prompt_tokens: of a call at most.
        response_tokens: of a call at most.
        temperature: of the sampling, more than 0.

    Raises:
        RecipeError: there is no such folder, or the model was made for shorter calls.
    """
    import jax
    import jax.numpy as jnp

    from models.convert import load_hf
    from models.tokenizer import ChatTokenizer
    from srpo_jax.engine.async_engine import EngineThread
    from srpo_jax.rollout.rollout import EpisodePlan, Rollout, SamplingConfig
    from srpo_jax.run.build_engine import EngineSettings, build_engine

    folder = find_model(checkpoint)
    tokenizer = ChatTokenizer(folder)
    model, config = load_hf(folder, dtype=jnp.float32)
    if (longest := prompt_tokens + response_tokens) > config.max_position:
        raise RecipeError(
            f"--prompt-tokens and --response-tokens make {longest}, but {checkpoint} was made for "
            f"{config.max_position} positions"
        )
    settings = EngineSettings(len(workflow.roles), longest, jnp.dtype(jnp.float32))
    try:
        engine = build_engine(settings, model, tokenizer, jax.local_devices()[:1])
    except ValueError as error:
        raise RecipeError(f"--prompt-tokens and --response-tokens: {error}") from None
    sampling = SamplingConfig(prompt_tokens, response_tokens, temperature)
    plan = EpisodePlan(task, (0, 1, 0), slot=0, rollout=0)
    (result,) = Rollout(EngineThread(engine), tokenizer, workflow).run([plan], sampling)
    team = result.team
    assert isinstance(team, Team)
    if result.episode is None:
        return Rehearsal(team, failure=f"{result.failure}: {result.detail}")
    return Rehearsal(team, result.outcome, result.episode.reward)


def show_rehearsal(rehearsal: Rehearsal, console: Console) -> int:
    """Prints calls, audit and end. Returns 0; 1 for a failed episode or a failed audit."""
    from envs.audit import audit_episode, render_audit

    team, outcome = rehearsal.team, rehearsal.outcome
    _print_calls(team, console)
    audited = audit_episode(team.calls, None if outcome is None else outcome.state)
    console.print(Text("event audit", "bold"))
    console.print(Text(visible(render_audit(audited))), soft_wrap=True)
    if outcome is None:
        console.print(Text(visible(f"the episode failed: {rehearsal.failure}"), "bold red"))
        return 1
    console.print(Text(visible(f"response: {outcome.response}")), soft_wrap=True)
    none = "none, the workflow scores nothing itself"
    console.print(f"reward: {none if rehearsal.reward is None else format(rehearsal.reward, 'g')}")
    return int(any(event.problems for event in audited))


def _print_calls(team: Team, console: Console) -> None:
    for number, call in enumerate(team.calls):
        kind = f"{call.kind} {number}: {call.type}"
        console.print(Text(f"{kind}  K={len(call.roles)}  state {call.state_id}", "bold cyan"))
        texts = {output.role: output for output in call.outputs}
        for role, prompt in zip(call.roles, call.prompts, strict=True):
            _print_block(console, f"{role}: system", prompt.system)
            _print_block(console, f"{role}: user", prompt.text())
            if role in texts:
                reason = call.malformed.get(texts[role].uid)
                note = f" (malformed: {reason})" if reason else ""
                _print_block(console, f"{role}: says{note}", texts[role].text)
        console.print()


def _print_block(console: Console, title: str, text: str) -> None:
    console.print(Text(f"  {title}", "dim"))
    for line in visible(text).split("\n"):
        console.print(Text(f"    {line}"), soft_wrap=True)


# ---- replies ------------------------------------------------------------------------------------



def placeholders(task: Task, roles: Sequence[str]) -> Reply:
    """Any output will do: a look at the prompts and events of a new workflow."""
    return lambda role, state, prompt: f"(a placeholder for what {role} says)"


def read_replies(path: str) -> Mapping[str, Sequence[str]] | Sequence[str]:
    """Outputs by role, or in call order, from a JSON file.

    Raises:
        RecipeError: the file holds something else.
    """
    try:
        replies = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits or brackets
        raise RecipeError(f"{path}: not JSON: {error}") from None
    lists = list(replies.values()) if isinstance(replies, dict) else [replies]
    for texts in lists:
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise RecipeError(f"{path}: must be {{role: [outputs]}} or a list of outputs")
    return replies


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--arg must be KEY=VALUE, got {text!r}")
    return key, parse_yaml(value, f"--arg {text!r}")


def _retriever(corpus: str) -> Any:
    return build_retriever(RetrieverConfig(corpus=corpus), Path.cwd())


if __name__ == "__main__":
    entry(main)
