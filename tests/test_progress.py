"""What a run says without a terminal: when, what, and how long it thinks that it will take."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from srpo_jax.run.progress import REPEAT_WARNING, RunProgress, span
from srpo_jax.run.warnings import step_warnings


class Display:
    """A progress display without a terminal, whose clock is set by hand."""

    def __init__(self, steps: int = 10, **options):
        self.now, self.tokens, self.file = 0.0, 0, io.StringIO()
        console = Console(file=self.file, width=300)
        self.progress = RunProgress(steps, 0, console, clock=lambda: self.now, **options)
        self.progress.generated = lambda: self.tokens

    def said(self) -> list[str]:
        lines = self.file.getvalue().splitlines()
        self.file.seek(0)
        self.file.truncate()
        return lines


def test_a_line_comes_after_30_s_of_silence_and_not_before():
    display = Display()
    display.progress.starting("loading model some/model")
    assert display.said() == ["loading model some/model ..."]
    for now in (10, 29.9):
        display.now = now
        display.progress.tick()
    assert display.said() == []
    display.now = 30
    display.progress.tick()
    assert display.said() == ["0:00:30  loading model some/model ..."]
    with display.progress.phase("rollout", 512) as advance:
        display.now, display.tokens = 40, 1000
        for _ in range(3):
            advance()
        assert display.said() == []
        display.now, display.tokens = 60, 3000
        advance()
        # 3,000 tokens in the 30 s since the phase began
        assert display.said() == ["0:01:00  step 1/10  rollout: 4 of 512 episodes  100 tok/s"]
    with display.progress.phase("update", 2, "optimiser steps"):
        display.now = 3690
        display.progress.tick()
    assert display.said() == ["1:01:30  step 1/10  update: 0 of 2 optimiser steps"]


def test_the_line_of_a_step_has_its_seconds_its_rate_and_the_remaining_time():
    display = Display(steps=4)
    display.now = 100  # the first step compiles
    metrics = {"reward/mean": 0.5, "time/rollout": 60.0, "time/update": 30.25}
    display.progress.step(1, metrics | {"time/tokens_per_second": 1234.4})
    assert display.said() == [
        "step 1/4  reward 0.500  rollout 60.0 s  update 30.2 s  1234 tok/s  eta 0:05:00"
    ]
    display.now = 120
    display.progress.step(2, {"time/evaluation": 5.0})
    assert display.said() == ["step 2/4  evaluation 5.0 s  eta 0:00:40"]
    display.now = 130
    display.progress.step(3, {})
    assert display.said() == ["step 3/4  eta 0:00:15"]  # a step of 20 s and one of 10
    display.now = 140
    display.progress.step(4, {})
    assert display.said() == ["step 4/4"]
    assert span(3 * 3600 + 62) == "3:01:02"


def test_a_display_speaks_by_itself_and_falls_silent_at_its_end():
    file = io.StringIO()
    with RunProgress(3, 0, Console(file=file, width=200), every=0.02) as progress:
        with progress.phase("evaluate sums", 8):
            until = time.monotonic() + 20
            while file.getvalue().count("evaluate sums: 0 of 8 episodes") < 2:
                assert time.monotonic() < until
                time.sleep(0.01)
    time.sleep(0.1)
    length = len(file.getvalue())
    time.sleep(0.1)
    assert len(file.getvalue()) == length


def test_a_warning_is_said_once_and_then_every_so_often():
    display = Display(steps=200)
    said = []
    for done in range(1, 121):
        display.progress.warn("cut", "outputs are cut")
        display.progress.step(done, {})
        said += [done for line in display.said() if line == "warning: outputs are cut"]
    assert said == [1, 1 + REPEAT_WARNING, 1 + 2 * REPEAT_WARNING]


def made(rewards, *, cut=0, malformed=0, advantage=0.0):
    """Results of one event of one member for each of ``rewards``, two to a task."""
    results, events = [], []
    for i, reward in enumerate(rewards):
        member = SimpleNamespace(
            stop_reason="length" if i < cut else "stop", well_formed=i >= malformed
        )
        event = SimpleNamespace(id=f"e{i}", members=(member,))
        events.append(event)
        results.append(
            SimpleNamespace(
                plan=SimpleNamespace(slot=i // 2),
                failure=None,
                team=SimpleNamespace(members={0: member}),
                episode=SimpleNamespace(reward=reward, events=(event,)),
            )
        )
    return results, events, [np.full(1, advantage)] * len(events)


@pytest.mark.parametrize(
    "case, norm, kinds",
    [
        (made([1, 0] * 4, cut=2, malformed=4, advantage=1.0), 50.0, set()),
        (made([1, 0] * 4, cut=3), 1.0, {"cut"}),
        (made([1, 0] * 4, malformed=5), 1.0, {"malformed"}),
        (made([1, 0] * 4), 50.1, {"clipped"}),
        (made([1, 0] * 4), None, set()),
        # Equal rewards, an advantage and a malformed output: the penalty made the contrast.
        (made([0, 0, 0, 0], malformed=2, advantage=0.5), 1.0, set()),
        (made([0, 0, 1, 1, 0, 0], malformed=3, advantage=0.5), 1.0, {"penalty"}),
        (made([0, 0, 1, 1, 0, 0], malformed=3), 1.0, set()),
        (([], [], []), None, set()),
    ],
)
def test_signs_of_a_run_that_does_not_learn_what_is_expected(case, norm, kinds):
    found = step_warnings(*case, norm, 1.0)
    assert found.keys() == kinds
    assert all("\n" not in text for text in found.values())


def test_without_clipping_there_is_nothing_to_say_about_it():
    assert step_warnings([], [], [], 1e9, None) == {}
