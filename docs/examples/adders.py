"""A team of one's own: two solvers add up at once (K = 2), a third reads both answers (K = 1)."""

from dataclasses import dataclass, replace

from envs.math.parsing import last_boxed
from envs.workflow import Cut, Outcome, Prompt


@dataclass(frozen=True)
class Sums:
    """The shared state: frozen, so that nobody changes it unseen."""

    problem: str
    answers: tuple[str, ...] = ()


class Adders:
    roles = ("solver_1", "solver_2", "solver_3")

    def prompt(self, role, state):
        user = [state.problem]
        for i, answer in enumerate(state.answers):
            user += [f"\n{'AB'[i]} ", Cut(answer, limit=8)]  # the label is a part of its own
        return Prompt("solver", tuple(user))

    async def run(self, task, team):
        state = Sums(task.prompt)
        drafts = await team.act("solve", state, roles=self.roles[:2], render=self.prompt)
        state = replace(state, answers=tuple(last_boxed(d.text) or "none" for d in drafts))
        (last,) = await team.act("decide", state, roles=self.roles[2:], render=self.prompt)
        for output in (*drafts, last):
            if last_boxed(output.text) is None:
                team.malformed(output, "box")
        return Outcome(last.text, state)
