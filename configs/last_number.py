"""A reward of one's own: the last number of the response, for models too small to box an answer."""

import re


def reward(task, outcome):
    """1 if the last number in the scored response is a gold answer, else 0."""
    numbers = re.findall(r"-?\d[\d,]*", outcome.response)
    return float(bool(numbers) and numbers[-1].replace(",", "") in task.answers)
