"""Math prompts and the shared state they show.

A prompt has three parts: the problem, the teammates' outputs that were visible before this event,
and the role's instruction. Two styles:

* ``full``: for real checkpoints.
* ``short``: for a tiny model with its own tokenizer. The system message names the job in one word,
  the user turn is the bare problem, the boxed answers of the last proposal, one line for each
  solver, and the verdict word. A chat stays under 96 tokens at one token for each digit and mark.

Every prompt shows the last proposal and the last verdict, not older ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from envs.math.parsing import last_boxed, parse_verdict
from envs.parsing import Malformed
from envs.workflow import Cut, Prompt

STYLES = ("full", "short")


@dataclass(frozen=True)
class Turn:
    """What one event left: its type, its round (from 1), and (role, text) for each member."""

    type: str
    round: int
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class MathState:
    """The shared state. ``next`` is the event type under way, ``turns`` all events before it."""

    problem: str
    solvers: int
    round: int = 1
    next: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def drafts(self) -> tuple[tuple[str, str], ...]:
        """(role, text) of the last proposal, or an empty tuple."""
        for turn in reversed(self.turns):
            if turn.type in ("solve", "revise"):
                return turn.outputs
        return ()

    @property
    def feedback(self) -> str | None:
        """The verifier's text on the last proposal, or None if it was not verified."""
        return self._since_drafts("verify")

    @property
    def aggregate(self) -> str | None:
        """The aggregator's text, once there is one."""
        return self._since_drafts("aggregate")

    def _since_drafts(self, type_: str) -> str | None:
        for turn in reversed(self.turns):
            if turn.type == type_:
                return turn.outputs[0][1]
            if turn.type in ("solve", "revise"):
                return None
        return None


def render(role: str, state: MathState, style: str = "full") -> Prompt:
    """The chat of ``role`` for the event ``state.next``."""
    return _short(state) if style == "short" else _full(role, state)


# ---- full ---------------------------------------------------------------------------------------

_SYSTEM = "You are one member of a team that solves a mathematics problem together."

_SOLVE = (
    "You are {name}. Work the problem out step by step on your own. End with your answer in "
    "exactly one \\boxed{{...}} and write nothing after it."
)
_SOLVE_AGAIN = (
    "You are {name}. An earlier attempt of the team and a check of it may stand above. Decide what "
    "in it holds, correct what does not, and work the problem out again step by step. End with "
    "your answer in exactly one \\boxed{{...}} and write nothing after it."
)
_FINAL = (
    "You are {name} and you write the answer that the team hands in. Use what stands above, "
    "correct what is wrong in it, and give one complete solution. End with the answer in exactly "
    "one \\boxed{{...}} and write nothing after it."
)
_VERIFY = (
    "You are the verifier. Check the solutions above: the reading of the problem, each step, each "
    "calculation, and whether the boxed answers answer what was asked. Name the first error that "
    "you find, or say that there is none. Then write exactly one verdict: "
    "<verify>approve</verify> if the answer can be handed in, <verify>reject</verify> if the team "
    "should try again."
)
_AGGREGATE = (
    "You are the aggregator. Compare the solutions above and settle on the right answer; a "
    "majority can be wrong. Write one derivation of it. Then end with one line of the form\n"
    "FINAL: \\boxed{...}"
)
_ROUTE = (
    "You are the router. Solvers 1 to {solvers} are equally able and work independently. Choose "
    "which of them work next: few for an easy problem, more where independent attempts help, or "
    "none when the solutions above already settle the answer. End with one line that is exactly "
    "<route>1,3</route> with the numbers that you choose, or <route>STOP</route>."
)


def _full(role: str, state: MathState) -> Prompt:
    user: list[str | Cut] = [f"# Problem\n{state.problem}\n\n"]
    if state.drafts:
        user.append("# Solutions of the team\n")
        for member, text in state.drafts:
            user += [f"## {_name(member)}\n", Cut(text), "\n\n"]
    if state.feedback is not None:
        user += ["# Verifier\n", Cut(state.feedback), "\n\n"]
    if state.aggregate is not None:
        user += ["# Aggregator\n", Cut(state.aggregate), "\n\n"]
    user.append(f"# Your role\n{_instruction(role, state)}")
    return Prompt(_SYSTEM, tuple(user))


def _instruction(role: str, state: MathState) -> str:
    if state.next == "route":
        return _ROUTE.format(solvers=state.solvers)
    if state.next == "verify":
        return _VERIFY
    if state.next == "aggregate":
        return _AGGREGATE
    if state.next == "final":
        return _FINAL.format(name=_name(role))
    return (_SOLVE_AGAIN if state.drafts else _SOLVE).format(name=_name(role))


def _name(role: str) -> str:
    return role.replace("_", " ").capitalize()


# ---- short --------------------------------------------------------------------------------------

_JOB = {
    "route": "router",
    "solve": "solver",
    "revise": "solver",
    "verify": "verifier",
    "aggregate": "aggregator",
    "final": "solver",
}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _short(state: MathState) -> Prompt:
    user: list[str | Cut] = [state.problem]
    for member, text in state.drafts:
        user += [f"\n{letter(member)} ", Cut(last_boxed(text) or "none", limit=8)]
    if state.feedback is not None:
        user.append(f"\n{_verdict(state.feedback)}")
    if state.aggregate is not None:
        user += ["\nFINAL ", Cut(last_boxed(state.aggregate) or "none", limit=8)]
    return Prompt(_JOB[state.next], tuple(user))


def _verdict(feedback: str) -> str:
    try:
        return "approve" if parse_verdict(feedback) else "reject"
    except Malformed:
        return "none"


def letter(role: str) -> str:
    """A for solver_1, B for solver_2, ...; the number itself beyond 26."""
    index = int(role.rsplit("_", 1)[1])
    return _LETTERS[index - 1] if index <= len(_LETTERS) else str(index)
