"""The engine's thread: any caller's loop, batching, cancellation, failures, tools beside it."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time

import httpx
import numpy as np
import pytest

from benchmarks import async_tool
from envs.workflow import Outcome, Score
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import PromptTooLong, Request
from srpo_jax.engine import async_engine as module
from srpo_jax.engine.async_engine import EngineClosed, EngineFull, EngineThread
from tests.rollout_cases import FakeEngine, State, render, run
from tests.server_cases import TINY, new_request, tiny_engine


def letters(text, key=0):
    return Request([ord(c) for c in text], (key, 0), 8)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()


# ---- what comes back -----------------------------------------------------------------------------


def test_any_loop_of_any_thread_gets_what_the_engine_gives():
    """Three loops at once, each with calls of several requests: the bits of the engine alone."""
    engine = tiny_engine(ChatTokenizer(TINY))
    requests = [new_request(i) for i in range(12)]
    expected = engine.run(requests)
    thread, found = EngineThread(engine), {}

    async def ask(numbers):
        calls = [(i, i + 1) for i in numbers]
        done = await asyncio.gather(
            *(thread.generate([requests[i] for i in call]) for call in calls)
        )
        found.update(zip(calls, done, strict=True))

    thread.start()
    loops = [
        threading.Thread(target=asyncio.run, args=(ask(range(first, first + 4, 2)),))
        for first in (0, 4, 8)
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(60)
    thread.close()
    for call in [(i, i + 1) for i in range(0, 12, 2)]:
        for number, completion in zip(call, found[call], strict=True):
            assert completion.ids == expected[number].ids
            np.testing.assert_array_equal(completion.logps, expected[number].logps)
    assert engine.idle


def test_nothing_is_asked_for():
    async def main():
        async with EngineThread(FakeEngine()) as engine:
            return await engine.generate([])

    assert asyncio.run(main()) == []


def test_the_caller_hears_of_its_slots_before_the_result():
    """Two slots: the second call of two has one of them at once, both only after a step."""
    heard = []

    async def main():
        async with EngineThread(FakeEngine(slots=2)) as engine:

            async def call(name, count):
                requests = [letters(name, i) for i in range(count)]
                await engine.generate(requests, lambda: heard.append(f"{name} started"))
                heard.append(f"{name} done")

            await asyncio.gather(call("a", 1), call("b", 2))

    asyncio.run(main())
    assert heard == ["a started", "a done", "b started", "b done"]


# ---- batching ------------------------------------------------------------------------------------


def test_what_follows_a_result_is_in_the_next_step():
    engine = FakeEngine()

    async def main():
        async with EngineThread(engine) as thread:

            async def episode(turns):
                for turn in range(5):
                    await thread.generate([letters("x", turn)])
                    for _ in range(turns):
                        await asyncio.sleep(0)

            await asyncio.gather(*(episode(turns) for turns in (0, 1, 2, 2, 1, 0)))

    asyncio.run(main())
    assert engine.together == [6] * 5


def test_a_loop_that_is_busy_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(module, "LOOP_SECONDS", 0.05)
    released, stepped = threading.Event(), threading.Event()

    class Watched(FakeEngine):
        def step(self):
            done = super().step()
            if len(self.requests) == 3:
                stepped.set()
            return done

    async def busy(thread):
        await thread.generate([letters("x")])
        released.wait(10)  # blocks its loop

    async def other(thread):
        for _ in range(2):
            await thread.generate([letters("y")])

    thread = EngineThread(Watched())
    thread.start()
    loops = [threading.Thread(target=asyncio.run, args=(f(thread),)) for f in (busy, other)]
    for loop in loops:
        loop.start()
    assert stepped.wait(5)
    released.set()
    for loop in loops:
        loop.join(5)
    thread.close()


# ---- ends ----------------------------------------------------------------------------------------


def test_a_cancelled_call_frees_its_slots_and_no_others():
    engine = FakeEngine(slots=2)

    async def main():
        async with EngineThread(engine) as thread:
            stuck = asyncio.create_task(thread.generate([letters("stuck"), letters("stuck")]))
            other = asyncio.create_task(thread.generate([letters("x")]))
            await asyncio.sleep(0.05)
            assert not other.done()
            stuck.cancel()
            assert len(await asyncio.wait_for(other, 5)) == 1
            with pytest.raises(asyncio.CancelledError):
                await stuck

    asyncio.run(main())
    assert engine.idle and engine.cancelled == [0, 1]


def test_a_request_that_is_refused_takes_its_call_with_it():
    engine = FakeEngine(limit=10)

    async def main():
        async with EngineThread(engine) as thread:
            bad = thread.generate([letters("x"), letters("much longer than ten")])
            good = thread.generate([letters("y")])
            return await asyncio.gather(bad, good, return_exceptions=True)

    bad, good = asyncio.run(main())
    assert isinstance(bad, PromptTooLong) and len(good) == 1
    assert engine.idle and engine.cancelled == [0]


class Breaks(FakeEngine):
    def step(self):
        raise RuntimeError("the device is gone")


def test_an_engine_that_breaks_is_told_to_all():
    thread = EngineThread(Breaks())

    async def main():
        async with thread:
            calls = [thread.generate([letters("x", i)]) for i in range(3)]
            waiting = await asyncio.gather(*calls, return_exceptions=True)
            assert thread.broken.wait(5)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await thread.generate([letters("late")])
            return waiting

    found = asyncio.run(main())
    assert [str(error) for error in found] == ["the device is gone"] * 3
    assert str(thread.failure) == "the device is gone"


def test_closing_ends_what_waits():
    engine = FakeEngine()

    async def main():
        async with EngineThread(engine) as thread:
            stuck = asyncio.create_task(thread.generate([letters("stuck")]))
            await asyncio.sleep(0.02)
        with pytest.raises(EngineClosed, match="stopping"):
            await stuck
        with pytest.raises(EngineClosed):
            await thread.generate([letters("late")])

    asyncio.run(main())
    assert engine.idle and engine.cancelled == [0]


def test_it_runs_only_within_its_block_and_any_number_of_times():
    engine = EngineThread(FakeEngine())

    async def main():
        with pytest.raises(EngineClosed, match="not running"):
            await engine.generate([letters("early")])
        for _ in range(2):
            async with engine:
                assert len(threads()) == 1
                assert len(await engine.generate([letters("x")])) == 1
                with pytest.raises(RuntimeError, match="already"):
                    engine.start()
            assert not threads()

    asyncio.run(main())


def test_more_requests_than_it_may_take():
    async def main():
        async with EngineThread(FakeEngine(), max_requests=3) as engine:
            stuck = asyncio.create_task(engine.generate([letters("stuck"), letters("stuck")]))
            await asyncio.sleep(0)
            with pytest.raises(EngineFull, match="2 requests are running, at most 3 can"):
                await engine.generate([letters("x"), letters("y")])
            assert len(await engine.generate([letters("x")])) == 1
            stuck.cancel()
            await asyncio.wait({stuck})
            assert len(await engine.generate([letters("x")] * 3)) == 3

    asyncio.run(main())


def test_a_loop_that_has_ended_holds_up_nobody():
    engine = FakeEngine()
    thread = EngineThread(engine)
    thread.start()

    async def leave():
        task = asyncio.create_task(thread.generate([letters("stuck")]))
        await asyncio.wait({task}, timeout=0.02)  # asyncio.run cancels it

    async def ask():
        return await asyncio.wait_for(thread.generate([letters("x")]), 5)

    asyncio.run(leave())
    assert len(asyncio.run(ask())) == 1
    thread.close()
    assert engine.idle


# ---- tools beside it -----------------------------------------------------------------------------


class Asks:
    """One call, then an HTTP request of a coroutine as a tool; its seconds are noted. A task named
    "decodes" makes calls only, until all others have ended."""

    roles = ("a",)

    def __init__(self, url, episodes):
        self.url, self.left, self.seconds = url, episodes, []

    async def run(self, task, team):
        await team.act("say", State(task.prompt), roles=["a"], render=render)
        if task.prompt == "decodes":
            while self.left:
                await team.act("say", State(task.prompt), roles=["a"], render=render)
            return Outcome("", score=Score(1.0, True))
        for _ in range(5):
            await team.tool("ask", self.ask)
        self.left -= 1
        return Outcome("", score=Score(1.0, True))

    async def ask(self):
        start = time.perf_counter()
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            assert (await client.get(self.url)).text == "ok"
        self.seconds.append(time.perf_counter() - start)


def test_an_async_http_tool_takes_its_own_time_beside_the_engine():
    """Steps of 0.2 s in which the engine leaves the interpreter, as in a device's work; a tool of
    0.2 s would take 0.3 s or more if the steps were taken in its event loop."""
    medians = []
    with async_tool.answering(0.2) as url:
        for others in (0, 4):
            workflow = Asks(url, 2)
            results = run(
                workflow, ["x"] * 2 + ["decodes"] * others, engine=FakeEngine(step_seconds=0.2)
            )
            assert all(r.failure is None for r in results)
            medians.append(statistics.median(workflow.seconds))
    alone, beside = medians
    assert beside <= 1.2 * alone


def test_the_benchmark_of_a_real_engine(capsys):
    assert async_tool.main(["--slots", "2", "--calls", "3", "--answer-ms", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["burst_ms", "alone_ms", "beside_ms", "ratio"]
    assert found["alone_ms"] >= 20 and found["burst_ms"] > 0
    assert found["ratio"] == pytest.approx(found["beside_ms"] / found["alone_ms"], abs=0.01)
