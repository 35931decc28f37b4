"""Grades in worker processes that can be killed when they pass a limit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.math.grading.latex import MAX_CHARACTERS
from envs.math.grading.numbers import LENGTH_LIMIT, plain_verdict
from envs.math.parsing import last_boxed

TIME_LIMIT, MEMORY_LIMIT, CRASH = "time limit", "memory limit", "crash"


@dataclass(frozen=True)
class Grade:
    """A verdict. ``answer``: the box's content, None without one.

    ``error`` says why no verdict was reached (``correct`` is False then): ``time limit``, ``memory
    limit``, ``length limit: ...``, ``crash: ...`` (the process died twice), ``gold not readable:
    ...``, or what stopped the comparison.
    """

    correct: bool
    answer: str | None
    error: str | None = None


def grade(response: str, gold: str | Sequence[str], pool: GraderPool | None = None) -> Grade:
    """Grades a whole model output against the gold answer, or against any of several.

    ``pool`` defaults to one that is shared by the process and started on first need. Raises
    TypeError where the response is no text, or the gold neither text nor a list of texts.
    """
    if not isinstance(response, str):
        raise TypeError(f"a response is text, not {type(response).__name__}: {response!r}")
    golds = (gold,) if isinstance(gold, str) else gold
    if not isinstance(golds, Sequence) or not golds or not all(isinstance(g, str) for g in golds):
        raise TypeError(f"a gold answer is text, or a list of texts, not {gold!r}")
    answer = last_boxed(response)
    if answer is None:
        return Grade(False, None)
    unread = []
    for text in (last_boxed(gold) or gold for gold in golds):
        if text.strip().casefold() == "nan":  # a missing value, as tables of data write it
            return Grade(False, answer, "gold not readable: nan")
        verdict = plain_verdict(answer, text)
        if verdict:
            return Grade(True, answer)
        if verdict is None:
            unread.append(text)
    if not unread:
        return Grade(False, answer)
    if (longest := max(map(len, (answer, *unread)))) > MAX_CHARACTERS:
        limit = f"{LENGTH_LIMIT}: {longest} characters, at most {MAX_CHARACTERS}"
        return Grade(False, answer, limit)
    correct, error = (pool or default_pool()).compare(answer, unread)
    return Grade(correct, answer, error)


@functools.cache
def default_pool() -> GraderPool:
    """The process's own pool, closed at exit."""
    pool = GraderPool()
    atexit.register(pool.close)
    return pool


class GraderPool:
    """Worker processes that compare answers; each is killed and replaced when it passes a limit.

    ``workers`` processes at most, started one by one when all others are busy. ``seconds``:
    processor time of one comparison, so that a busy machine changes no verdict; by the clock it is
    ten times that, and at least 8. ``memory_mb``: address space of a process.
    """

    _WALL_SECONDS = 8.0
    _START_SECONDS = 60.0

    def __init__(self, workers: int | None = None, seconds: float = 1.0, memory_mb: int = 1024):
        self.size = workers or max(2, min(8, (os.cpu_count() or 2) // 2))
        self._command = [
            sys.executable,
            "-m",
            "envs.math.grading.worker",
            str(seconds),
            str(memory_mb),
        ]
        self._wall = max(self._WALL_SECONDS, 10 * seconds)
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)  # a place whose process is not started yet
        self._lock = threading.Lock()
        self._closed = False
        self._alive: set[_Worker] = set()

    def compare(self, answer: str, golds: Sequence[str]) -> tuple[bool, str | None]:
        """(correct, error) of one answer against any of several golds."""
        request = json.dumps({"answer": answer, "golds": list(golds)})
        worker = self._idle.get()
        if self._closed:
            self._idle.put(None)
            raise RuntimeError("the grader pool is closed")
        try:
            for last_try in (False, True):
                if worker is None:
                    worker = self._start()
                reply = worker.ask(request, self._START_SECONDS, self._wall)
                if isinstance(reply, dict):
                    return reply["correct"], reply["error"]
                self._drop(worker)
                worker = None
                if not reply.startswith(CRASH) or last_try:
                    return False, reply
        finally:
            self._idle.put(worker)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Ends all processes; later comparisons raise RuntimeError."""
        with self._lock:
            self._closed = True
            workers, self._alive = self._alive, set()
        for worker in workers:
            worker.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                if (idle := self._idle.get_nowait()) is not None:
                    idle.close_pipes()
        self._idle.put(None)  # threads that wait for a worker learn that the pool is closed

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader pool is closed")
            worker = _Worker(self._command)
            self._alive.add(worker)
            return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        worker.close_pipes()
        with self._lock:
            self._alive.discard(worker)


class _Worker:
    """One process and its pipes; used by one thread at a time."""

    def __init__(self, command: Sequence[str]):
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        self._stdin, self._stdout = stdin, stdout
        self._buffer = b""
        self._ready = False

    def ask(self, request: str, start_seconds: float, seconds: float) -> dict | str:
        """The verdict, or in text what ended the process."""
        if not self._ready:
            if self._line(start_seconds) is None:
                return self._ending()
            self._ready = True
        try:
            self._stdin.write(request.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            return self._ending()
        line = self._line(seconds)
        return self._ending() if line is None else json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close_pipes(self) -> None:
        """For the thread that holds the worker."""
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self, seconds: float) -> bytes | None:
        """The next line, or None at the end of the stream or of the time."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            chunk = os.read(self._stdout.fileno(), 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return TIME_LIMIT
        return TIME_LIMIT if code == -signal.SIGPROF else f"{CRASH}: exit code {code}"
