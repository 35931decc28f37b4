"""Episodes shared by processes; threads stand for these."""

from __future__ import annotations

import itertools
import pickle
import threading
import time

import pytest

from srpo_jax.engine.async_engine import EngineThread
from srpo_jax.rollout.rollout import Rollout
from srpo_jax.rollout.transcript import episode_transcript
from srpo_jax.run.shared_rollout import run_shared
from srpo_jax.run.stopping import Stopped
from tests.rollout_cases import CONFIG, FakeEngine, Letters, TwoTurns, plans_of

TASKS, GROUP = 24, 4


class Shared:
    """What the threads of one test have in common."""

    def __init__(self, count):
        self.count, self.barrier = count, threading.Barrier(count, timeout=60)
        self.counters, self.lock, self.said = {}, threading.Lock(), [None] * count


class ThreadProcesses:
    """``Processes`` of threads; values travel as they do between processes."""

    def __init__(self, shared, index):
        self._shared, self.index, self.count = shared, index, shared.count
        self._names = itertools.count()

    def new_counter(self):
        return str(next(self._names))

    def take(self, counter):
        with self._shared.lock:
            self._shared.counters[counter] = self._shared.counters.get(counter, -1) + 1
            return self._shared.counters[counter]

    def gather(self, value):
        self._shared.said[self.index] = pickle.dumps(value)
        self._shared.barrier.wait()
        found = [pickle.loads(data) for data in self._shared.said]
        self._shared.barrier.wait()
        return found

    agree = gather


def run_in(count, plans, seconds, check=lambda index: None):
    """The results of every process, and the seconds until the last one's work was done; ``seconds``
    are those of a step of each one's engine."""
    shared, results = Shared(count), [None] * count

    def one(index):
        engine = FakeEngine(slots=16, step_seconds=seconds[index])
        rollout = Rollout(EngineThread(engine), Letters(), TwoTurns(), check=lambda: check(index))
        processes = ThreadProcesses(shared, index)
        try:
            results[index] = run_shared(rollout, processes, plans, CONFIG, lambda result: None)
        except Stopped as error:
            results[index] = error

    started = time.perf_counter()
    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, time.perf_counter() - started


def told(results):
    """What is kept of results: transcripts and events."""
    return [
        ({k: v for k, v in episode_transcript(r, 1, {}).items() if k != "seconds"}, r.plan.id,
         [e.id for e in r.episode.events], r.outcome.response, r.failure)
        for r in results
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_have_all_results_as_of_one(count):
    plans = plans_of([f"task {i}" for i in range(TASKS)], rollouts=GROUP)
    (alone,), _ = run_in(1, plans, [0.0])
    found, _ = run_in(count, plans, [0.001] * count)
    for results in found:
        assert told(results) == told(alone)


def test_a_slow_process_takes_fewer_tasks_and_holds_nobody_up():
    """One is four times slower. The last result comes within 1.2 times of the time that both would
    need with work that can be split at will (the least of three tries; the machine is shared)."""
    plans = plans_of(["x"] * 60, rollouts=GROUP)
    _, alone = run_in(1, plans, [0.01])
    ideal, best = alone / (1 + 1 / 4), float("inf")
    for _ in range(3):
        found, took = run_in(2, plans, [0.01, 0.04])
        assert len(found[0]) == len(found[1]) == len(plans)
        best = min(best, took)
    assert best < 1.2 * ideal, (best, ideal)


def test_a_stop_of_one_stops_all():
    stop = threading.Event()

    def check(index):
        if index == 1:
            stop.set()
        if stop.is_set():
            raise Stopped("asked to")

    plans = plans_of(["x"] * 60, rollouts=GROUP)
    found, _ = run_in(2, plans, [0.05, 0.05], check)
    assert all(isinstance(result, Stopped) for result in found)
