"""Shows an episode of a run event by event, or lists the episodes of its last kept step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from rich.table import Table
from rich.text import Text

from launch.cli import Parser, entry, output, visible
from srpo_jax.recipe.errors import RecipeError, nearest
from srpo_jax.run.logs import RunFileError, episode_steps, find_episode, read_episodes


class MemberRecord(BaseModel):
    """What is shown of a member of an event."""

    role: str
    prompt: str
    response: str
    prompt_tokens: int
    response_tokens: int
    stop_reason: str | None
    well_formed: bool
    malformed: str | None


class EventRecord(BaseModel):
    """What is shown of an event."""

    type: str
    turn: int
    state_id: str
    state: str
    expected: int
    advantage: float | None = None
    members: list[MemberRecord]


class Problem(BaseModel):
    """What is shown of a task."""

    id: str
    prompt: str
    answer: Any


class EpisodeRecord(BaseModel):
    """What is shown of an episode's record; it may hold more."""

    id: str
    step: int
    task: Problem
    reward: float | None
    correct: bool | None
    failure: str | None = None
    detail: str = ""
    events: list[EventRecord]
    outcome: dict[str, Any] | None
    cost: dict[str, float]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("launch.show", __doc__, "python -m launch.show runs/quickstart_math --step 10")
    parser.add_argument("run", help="run folder")
    parser.add_argument("--episode", metavar="ID", help="show this episode whole")
    parser.add_argument("--step", type=int, help="list this step's episodes (default: the last)")
    args = parser.parse_args(argv)
    steps = episode_steps(args.run)
    if not steps:
        raise RecipeError(f"{args.run}: no episodes kept here (see trainer.dump_episodes)")
    console = output()
    if args.episode is not None:
        episode = find_episode(args.run, args.episode)
        if episode is None:
            known = [e["id"] for e in read_episodes(args.run, steps[-1])]
            raise RecipeError(
                f"{args.run}: no episode {args.episode!r}, {nearest(args.episode, known)}"
            )
        console.print(render_episode(_checked(episode, args.run)), soft_wrap=True)
        return 0
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        raise RecipeError(f"{args.run}: no episodes of step {step}; kept: {_ranges(steps)}")
    episodes = [_checked(episode, args.run) for episode in read_episodes(args.run, step)]
    console.print(episode_table(episodes, f"step {step}"))
    return 0


def _checked(record: dict[str, Any], run: str) -> dict[str, Any]:
    try:
        EpisodeRecord.model_validate(record)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise RunFileError(
            f"{run}: episode {record['id']!r} is no episode's record ({place}: {problem['msg']})"
        ) from None
    return record


def render_episode(episode: Mapping[str, Any]) -> Text:
    """The whole episode. What models wrote is never read as markup."""
    out = Text()

    def line(text: str, style: str = "") -> None:
        out.append(visible(text) + "\n", style)

    def block(title: str, text: str) -> None:
        line(f"  {title}", "dim")
        for row in text.split("\n"):
            line(f"    {row}")

    task = episode["task"]
    line(f"episode {episode['id']}  step {episode['step']}", "bold")
    line(f"task {task['id']}  gold {task['answer']!r}  {_verdict(episode)}")
    block("task", task["prompt"])
    for event in episode["events"]:
        line("")
        advantage = event.get("advantage")
        line(
            f"event {event['turn']}  {event['type']}  K={event['expected']}  "
            f"state {event['state_id']}"
            + ("" if advantage is None else f"  advantage {advantage:+.4f}"),
            "bold cyan",
        )
        line(f"  state: {event['state']}", "dim")
        for member in event["members"]:
            note = "" if member["well_formed"] else f"  malformed: {member['malformed']}"
            line(
                f"  {member['role']}  {member['prompt_tokens']} prompt tokens, "
                f"{member['response_tokens']} generated, {member['stop_reason']}{note}",
                "bold" if member["well_formed"] else "bold red",
            )
            block("prompt", member["prompt"])
            block("response", member["response"])
    line("")
    line("outcome", "bold cyan")
    for key, value in (episode["outcome"] or {}).items():
        block(key, str(value))
    if episode.get("failure"):
        line(f"  failed: {episode['failure']}: {episode['detail']}", "bold red")
    if episode["cost"]:
        line("  cost: " + ", ".join(f"{key} {value:g}" for key, value in episode["cost"].items()))
    out.rstrip()
    return out


def episode_table(episodes: Iterable[Mapping[str, Any]], title: str) -> Table:
    """One row an episode: its cardinalities in order, tokens, reward."""
    table = Table(title=title)
    for name in ("episode", "task", "K of its events"):
        table.add_column(name)
    for name in ("generated tokens", "malformed", "verdict"):
        table.add_column(name, justify="right")
    for episode in episodes:
        members = [member for event in episode["events"] for member in event["members"]]
        table.add_row(
            Text(visible(episode["id"])),
            Text(visible(episode["task"]["id"])),
            ",".join(str(event["expected"]) for event in episode["events"]),
            str(sum(member["response_tokens"] for member in members)),
            str(sum(not member["well_formed"] for member in members)),
            _verdict(episode),
        )
    return table


def _verdict(episode: Mapping[str, Any]) -> str:
    if episode["reward"] is None:
        return "failed"
    return f"reward {episode['reward']:g}  {'correct' if episode['correct'] else 'wrong'}"


def _ranges(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return shown if len(steps) <= 8 else f"{shown}, ... {steps[-1]}"


if __name__ == "__main__":
    entry(main)
