"""A reward of one's own: 1 for the right sum, half of it for a sum that is off by one."""

from envs.math.parsing import last_boxed
from envs.workflow import Score


def reward(task, outcome):
    answer, right = last_boxed(outcome.response), int(task.answer)
    if answer is None or not answer.lstrip("-").isdecimal() or len(answer) > 9:
        return Score(0.0, correct=False)
    distance = abs(int(answer) - right)
    return Score({0: 1.0, 1: 0.5}.get(distance, 0.0), correct=distance == 0)
