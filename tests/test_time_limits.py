"""Time limits count from the start of the work; what hangs costs its own episode and nothing else.

The limits are far above what the work takes, so that a busy machine changes no outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from envs.tool_threads import ToolThreads
from envs.workflow import EpisodeFailed, Outcome, Score, ScriptedTeam
from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.rollout.rollout import Rollout, count_failures
from tests.process_cases import python
from tests.rollout_cases import CONFIG, FakeEngine, Letters, State, TwoTurns, plans_of, render, run

NEVER = threading.Event()


class OneCall:
    roles = ("a",)

    async def run(self, task, team):
        (output,) = await team.act("say", State(task.prompt), roles=["a"], render=render)
        return Outcome(output.text)


def right(task, outcome):
    return 1


async def asynchronous():
    await asyncio.sleep(0)
    return 1.0


class Asynchronous:
    async def __call__(self):
        return await asynchronous()


def play(tool, *, tool_seconds=20.0, queue_seconds=20.0, **options):
    """What a tool gives in an episode without an engine."""

    async def episode():
        team = ScriptedTeam([], tool_seconds, queue_seconds)
        return await team.tool("tool", tool, **options)

    return asyncio.run(episode())


class TestRewards:
    @pytest.mark.parametrize("blocking", [True, False])
    def test_more_at_once_than_there_are_threads(self, blocking):
        """The last of 200 begins 1.5 s after the first: more than the limits of 1.2 s. An async
        reward may use threads too."""

        def reward(task, outcome):
            time.sleep(0.5)
            return 1

        async def asynchronous(task, outcome):
            return await asyncio.to_thread(reward, task, outcome)

        config = replace(CONFIG, tool_seconds=1.2, episode_seconds=1.2)
        results = run(
            OneCall(), ["x"] * 200, reward=reward if blocking else asynchronous, config=config
        )
        assert not count_failures(results)
        assert all(r.episode.reward == 1 for r in results)

    @pytest.mark.parametrize("wait", [NEVER.wait, lambda: asyncio.to_thread(NEVER.wait)])
    def test_those_that_hang_drop_no_healthy_one(self, wait):
        """Three times as many hang as there are threads: each costs its own episode."""

        def reward(task, outcome):
            return wait() if task.prompt == "hangs" else 1

        prompts = ["hangs", "hangs", "hangs", "x"] * 64
        config = replace(CONFIG, tool_seconds=0.5)
        results = run(OneCall(), prompts, reward=reward, config=config)
        assert count_failures(results) == {"tool_timeout": 192}
        assert [r.episode is not None for r in results] == [p == "x" for p in prompts]

    def test_a_process_with_rewards_that_hang_ends(self):
        """Blocking and async ones that hang in a thread of asyncio's; nothing waits for them."""
        script = (
            "import asyncio, threading\n"
            "from dataclasses import replace\n"
            "from tests.rollout_cases import CONFIG, TwoTurns, run\n"
            "wait = threading.Event().wait\n"
            "async def reward(task, outcome):\n"
            "    await asyncio.to_thread(wait)\n"
            "config = replace(CONFIG, tool_seconds=0.2)\n"
            "for hangs in (reward, lambda task, outcome: wait()):\n"
            "    results = run(TwoTurns(), ['x'] * 3, reward=hangs, config=config)\n"
            "    print([r.failure for r in results])\n"
        )
        done = python("-c", script, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [str(["tool_timeout"] * 3)] * 2


class TestSlots:
    def test_waiting_for_a_slot_is_no_time_of_the_episode(self):
        """256 episodes of 40 ms on 4 slots: the last is served after 2.6 s, the limit is 2 s."""
        engine = FakeEngine(slots=4, step_seconds=0.04)
        results = run(
            OneCall(), ["x"] * 256, engine=engine, reward=right,
            config=replace(CONFIG, episode_seconds=2.0),
        )  # fmt: skip
        assert len(engine.together) == 64 and not count_failures(results)

    def test_waiting_has_a_limit_and_a_cause_of_its_own(self):
        """The first episode never gives its slot back in time; the others never get it."""
        engine = FakeEngine(slots=1)
        config = replace(CONFIG, episode_seconds=1.0, queue_seconds=0.3)
        results = run(OneCall(), ["stuck", "x", "y"], engine=engine, reward=right, config=config)
        assert [r.failure for r in results] == ["episode_timeout", "queue_timeout", "queue_timeout"]
        assert results[1].detail == "waited more than 0.3 s for one of 1 slots"
        assert engine.idle and len(engine.cancelled) == 3

    def test_the_clock_goes_on_after_a_wait(self):
        """Time before and after a wait for a slot adds up to the limit."""

        class Sleeps(OneCall):
            async def run(self, task, team):
                if task.prompt == "x":
                    await asyncio.sleep(0.5)
                outcome = await super().run(task, team)
                if task.prompt == "x":
                    await asyncio.sleep(0.5)
                return outcome

        config = replace(CONFIG, episode_seconds=0.8)
        slow, quick = run(Sleeps(), ["x", "y"], reward=right, config=config)
        assert (slow.failure, quick.failure) == ("episode_timeout", None)


class TestTools:
    def test_a_thread_that_hangs_is_replaced(self):
        threads = ToolThreads(2)

        async def episode():
            team = ScriptedTeam([], 0.2)
            hung = [team.tool("hangs", NEVER.wait, threads=threads) for _ in range(5)]
            fine = [team.tool("fine", str.upper, "x", threads=threads) for _ in range(5)]
            return await asyncio.gather(*hung, *fine, return_exceptions=True)

        results = asyncio.run(episode())
        assert [r.cause for r in results[:5]] == ["tool_timeout"] * 5
        assert results[5:] == ["X"] * 5

    def test_a_call_that_got_no_thread(self):
        threads, release = ToolThreads(1), threading.Event()
        threads.submit(release.wait)
        with pytest.raises(EpisodeFailed, match="tool waited more than") as e:
            play(str, queue_seconds=0.1, threads=threads)
        assert e.value.cause == "tool_queue"
        release.set()
        assert play(str, threads=threads) == ""

    def test_calls_at_once_are_no_more_than_the_width(self):
        threads, now, most = ToolThreads(3), itertools.count(), []
        lock, running = threading.Lock(), []

        def tool():
            with lock:
                running.append(next(now))
                most.append(len(running))
            time.sleep(0.01)
            with lock:
                running.pop()

        async def episode():
            team = ScriptedTeam([])
            await asyncio.gather(*(team.tool("tool", tool, threads=threads) for _ in range(30)))

        asyncio.run(episode())
        assert len(most) == 30 and max(most) == 3

    def test_threads_end_when_nothing_is_queued(self):
        def count():
            return sum(thread.name == "tool" for thread in threading.enumerate())

        before = count()
        run(OneCall(), ["x"] * 40, reward=right)
        for _ in range(100):
            if count() <= before:
                return
            time.sleep(0.05)
        raise AssertionError(f"{count()} threads, {before} before")

    @pytest.mark.parametrize(
        "tool",
        [
            asynchronous,
            partial(asynchronous),
            Asynchronous(),
            lambda: asynchronous(),
            partial(Asynchronous()),
            lambda: 1.0,
        ],
        ids=["async", "partial", "object", "lambda", "partial object", "blocking"],
    )
    def test_what_can_be_awaited_is_awaited(self, tool):
        assert play(tool) == 1.0
        (result,) = run(OneCall(), ["x"], reward=lambda task, outcome: tool())
        assert (result.episode.reward, result.episode.correct) == (1.0, True)

    @pytest.mark.parametrize("blocking", [True, False])
    def test_its_own_timeout_keeps_its_name(self, blocking):
        def tool():
            raise TimeoutError("the socket of a tool")

        async def asynchronous():
            tool()

        with pytest.raises(TimeoutError, match="the socket of a tool"):
            play(tool if blocking else asynchronous)

    def test_what_a_thread_hands_on_after_its_call_has_the_rest_of_the_time(self):
        """A blocking call that makes a coroutine: one limit for both."""
        started = time.perf_counter()
        with pytest.raises(EpisodeFailed, match="tool took more than") as e:
            play(lambda: asyncio.sleep(60), tool_seconds=0.3)
        assert e.value.cause == "tool_timeout" and time.perf_counter() - started < 10

    @pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(0), KeyboardInterrupt()])
    def test_what_would_end_or_hang_the_run_is_an_error_of_the_tool(self, error):
        def tool():
            raise error

        with pytest.raises(RuntimeError, match=type(error).__name__):
            play(tool)

    def test_context_variables_reach_the_tool(self):
        variable = contextvars.ContextVar("variable", default="none")

        async def episode():
            variable.set("set")
            return await ScriptedTeam([]).tool("tool", variable.get)

        assert asyncio.run(episode()) == "set"


class Stubborn(TwoTurns):
    """Waits in the way that its prompt names, for ever."""

    async def trouble(self, task, team):
        match task.prompt:
            case "tool":
                await team.tool("hangs", NEVER.wait)
            case "async tool":
                await team.tool("sleeps", asyncio.sleep, 1000)
            case "stuck":
                await team.act("wait", State("stuck"), roles=["a"], render=render)
            case "swallows":
                for _ in range(3):
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        continue


class TestCancellation:
    @pytest.mark.parametrize("turns", range(8))
    def test_it_is_not_lost_where_a_tool_ends_in_the_same_turn(self, turns):
        async def episode(team, ends):
            await team.tool("tool", ends.wait)
            await asyncio.sleep(1000)

        async def cancel():
            ends = asyncio.Event()
            task = asyncio.create_task(episode(ScriptedTeam([]), ends))
            await asyncio.sleep(0.01)
            ends.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=1)
            return task.cancelled()

        assert asyncio.run(cancel())

    @pytest.mark.parametrize("seconds", [0.3, 0.31, 0.32])
    def test_an_interrupt_ends_a_rollout_at_once(self, seconds):
        interrupted = []

        def interrupt():
            interrupted.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(seconds, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            self.hang()
        assert time.perf_counter() - interrupted[0] < 2

    def test_a_run_that_is_to_stop_ends_its_rollout_at_once(self):
        class Stopped(Exception):
            pass

        def check():
            if time.perf_counter() > stopped:
                raise Stopped

        stopped = time.perf_counter() + 0.3
        with pytest.raises(Stopped):
            self.hang(check=check)
        assert time.perf_counter() - stopped < 2

    def hang(self, **options):
        """Hung rewards and tools, requests with and without a slot: nothing is waited for."""
        engine = FakeEngine(slots=4)
        prompts = ["tool", "async tool", "swallows", "x", "x", "stuck", "stuck"]
        rollout = Rollout(
            EngineThread(engine), Letters(), Stubborn(),
            reward=lambda task, outcome: NEVER.wait(), **options,
        )  # fmt: skip
        try:
            rollout.run(plans_of(prompts * 4), CONFIG)
        finally:
            assert engine.idle

    def test_an_episode_that_cancels_itself_ends_alone(self):
        class Cancels(TwoTurns):
            async def trouble(self, task, team):
                if task.prompt == "bad":
                    inner = asyncio.create_task(asyncio.sleep(1000))
                    inner.cancel()
                    await inner

        bad, good = run(Cancels(), ["bad", "x"], reward=lambda task, outcome: Score(1, True))
        assert (bad.failure, good.failure) == ("CancelledError", None)
