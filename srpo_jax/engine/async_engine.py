"""The engine as coroutines see it, and the thread that steps a local engine for them."""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from srpo_jax.engine.engine import Engine
from srpo_jax.engine.requests import Completion, Request

LOOP_ITERATIONS = 4  # of an event loop, in which resumed episodes reach their next call
LOOP_SECONDS = 1.0  # the longest that the engine waits for them


T = TypeVar("T")


class EngineClosed(RuntimeError):
    """The engine takes no requests: it is not entered, or was left while they ran."""


class EngineFull(RuntimeError):
    """More requests at once than the engine was told to take."""


def _nothing() -> None:
    pass


class AsyncEngine(Protocol):
    """What rollouts and servers sample from: ``EngineThread`` here, ``RemoteEngine`` over HTTP.

    It takes requests within ``async with``, from any number of coroutines at once.
    """

    @property
    def slots(self) -> int:
        """Requests that are decoded at once."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def generate(
        self, requests: Sequence[Request], started: Callable[[], object] = _nothing
    ) -> list[Completion]:
        """Generates all ``requests``; cancelled, it frees their slots.

        Args:
            requests: Those of one call.
            started: Called in the caller's loop as soon as each of them has had a slot, before
                the result is there.

        Returns:
            Their completions, in their order.

        Raises:
            ValueError: For a request that cannot be served (PromptTooLong where it does not fit).
            EpisodeFailed: Where a server refuses the requests or gives no usable answer.
        """


@dataclass(eq=False)
class _Call:
    """The requests of one ``generate``, in the loop that awaits them."""

    requests: tuple[Request, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[list[Completion]]
    started: Callable[[], object]
    uids: list[int] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)

    # The methods run in the loop.

    def begin(self) -> None:
        if not self.done.done():
            self.started()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result([self.completions[uid] for uid in self.uids])

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class EngineThread:
    """An engine stepped in a thread of its own, so that tools and HTTP run beside it.

    The thread lives within ``async with`` (or from ``start`` to ``close``); it alone touches the
    engine meanwhile, and steps it while there are requests. After it has handed out results, and
    when requests come to an idle engine, it lets the callers' loops run LOOP_ITERATIONS before it
    steps, for LOOP_SECONDS at most: what they ask for next is decoded together.

    An error of the engine ends the thread. Every waiting and every later ``generate`` raises it.

    Args:
        engine: The engine.
        max_requests: How many requests may be waiting or running at once (None: any number).

    Attributes:
        engine: Not to be touched while the thread runs.
        failure: What the engine has raised, if it has.
        broken: Set once it has.
    """

    def __init__(self, engine: Engine, max_requests: int | None = None):
        self.engine = engine
        self.failure: Exception | None = None
        self.broken = threading.Event()
        self._max_requests = max_requests
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the next two
        self._closed: Exception | None = EngineClosed("the engine is not running")
        self._open: set[_Call] = set()
        # What the thread is to do, by its own code and by others.
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Of the thread alone:
        self._stopping = False
        self._calls: dict[int, _Call] = {}  # by the uid of every request that runs
        self._queued: list[_Call] = []  # those whose requests had not all a slot yet
        self._loops: set[object] = set()  # a token of every loop that is waited for
        self._loops_until = 0.0

    @property
    def slots(self) -> int:
        """Requests that the engine decodes at once."""
        return self.engine.slots

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: Where it runs already.
        """
        if self._thread is not None:
            raise RuntimeError("the engine's thread runs already")
        self.failure, self._stopping = None, False
        self.broken.clear()
        self._inbox = queue.SimpleQueue()
        self._loops.clear()
        with self._lock:
            self._closed = None
        thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Ends the thread after its present step; what still waits fails with EngineClosed."""
        if self._thread is not None:
            self._inbox.put(self._stop)
            self._thread.join()
            self._thread = None

    async def generate(
        self, requests: Sequence[Request], started: Callable[[], object] = _nothing
    ) -> list[Completion]:
        """As ``AsyncEngine.generate``, from a coroutine of any loop in any thread.

        Raises:
            ValueError: For a request that cannot be served (PromptTooLong where it does not fit).
            EngineFull: Where these would be more than ``max_requests`` at once.
            EngineClosed: Where the thread does not run, or is ended meanwhile.
            Exception: What the engine's step raised.
        """
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        call = _Call(tuple(requests), loop, loop.create_future(), started)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            count = sum(len(other.requests) for other in self._open) if self._max_requests else 0
            if self._max_requests and count + len(call.requests) > self._max_requests:
                raise EngineFull(f"{count} requests are running, at most {self._max_requests} can")
            self._open.add(call)
        self._inbox.put(partial(self._submit, call))
        try:
            return await call.done
        finally:
            with self._lock:
                self._open.discard(call)
            if call.done.cancelled() or not call.done.done():
                self._inbox.put(partial(self._cancel, call))

    # ---- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        end: Exception = EngineClosed("the engine is stopping")
        try:
            while self._receive():
                self._deliver(self.engine.step())
            for call in set(self._calls.values()):
                self._cancel(call)
        except ValueError as error:  # one of a step is none of a request
            end = self.failure = RuntimeError(f"{type(error).__name__}: {error}")
            end.__cause__ = error
        except Exception as error:  # every waiting caller must hear of it
            end = self.failure = error
        self._calls.clear()
        self._queued.clear()
        with self._lock:
            self._closed, late = end, list(self._open)
        for call in late:
            self._tell(call.loop, [partial(call.fail, end)])
        if self.failure is not None:
            self.broken.set()

    def _receive(self) -> bool:
        """Does what is asked for until there is a step to take (True) or the thread is to end."""
        while not self._stopping:
            if self._loops:
                timeout: float | None = max(self._loops_until - time.monotonic(), 0.0)
            else:
                timeout = None if self.engine.idle else 0.0
            try:
                do = self._inbox.get(timeout=timeout)
            except queue.Empty:
                self._loops.clear()  # one that is busy for so long is waited for no longer
                if not self.engine.idle:
                    return True
            else:
                do()
        return False

    def _stop(self) -> None:
        self._stopping = True

    def _submit(self, call: _Call) -> None:
        if self.engine.idle:
            self._tell(call.loop, [])  # others of its loop are about to come
        try:
            for request in call.requests:
                uid = self.engine.submit(request)
                call.uids.append(uid)
                self._calls[uid] = call
        except ValueError as error:
            self._cancel(call)
            self._tell(call.loop, [partial(call.fail, error)])
        else:
            self._queued.append(call)

    def _cancel(self, call: _Call) -> None:
        """Frees the slots of what still runs."""
        for uid in call.uids:
            if self._calls.pop(uid, None) is not None:
                self.engine.cancel(uid)
        if call in self._queued:
            self._queued.remove(call)

    def _deliver(self, finished: Sequence[tuple[int, Completion]]) -> None:
        """Tells the loops which calls have begun and which are done."""
        news: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]]
        news = collections.defaultdict(list)
        queued = self.engine.queued if self._queued else set()
        for call in [call for call in self._queued if queued.isdisjoint(call.uids)]:
            self._queued.remove(call)
            news[call.loop].append(call.begin)
        for uid, completion in finished:
            call = self._calls.pop(uid)
            call.completions[uid] = completion
            if len(call.completions) == len(call.requests):
                news[call.loop].append(call.finish)
        for loop, callbacks in news.items():
            self._tell(loop, callbacks)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, callbacks: Sequence[Callable[[], object]]
    ) -> None:
        """Calls ``callbacks`` in a loop; the next step waits until what follows them is there."""
        token = object()
        ready = partial(self._inbox.put, partial(self._loops.discard, token))
        try:
            loop.call_soon_threadsafe(_iterate, loop, callbacks, ready)
        except RuntimeError:
            return  # the loop is closed: nobody waits there any more
        self._loops.add(token)
        self._loops_until = time.monotonic() + LOOP_SECONDS


def _iterate(
    loop: asyncio.AbstractEventLoop,
    callbacks: Sequence[Callable[[], object]],
    ready: Callable[[], object],
    iterations: int = LOOP_ITERATIONS,
) -> None:
    """Runs in ``loop``: the callbacks at once, ``ready`` after so many iterations of the loop."""
    for callback in callbacks:
        callback()
    if iterations:
        loop.call_soon(_iterate, loop, (), ready, iterations - 1)
    else:
        ready()


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where an event loop runs in this thread (a notebook's)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "rollout") as thread:
        return thread.submit(asyncio.run, work).result()
