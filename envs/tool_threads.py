"""Threads for blocking tools: a call that hangs costs its own thread and nobody else's."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

# What is to be entered while a call of this context waits for a thread or a connection.
QUEUEING: ContextVar[Callable[[], contextlib.AbstractContextManager[None]]] = ContextVar("QUEUEING")
WIDTH = 64  # calls at once; threads are started as needed


class ToolThreads(concurrent.futures.ThreadPoolExecutor):
    """Up to ``width`` calls at once, each in a daemon thread; more wait in order of submission.

    Python cannot stop a thread. Cancelling the future of a running call writes its thread off and
    gives its place to another, so the width stays; daemons, they hold up no process that ends.
    (An executor of the standard library is joined at exit. asyncio takes no other kind as a loop's
    default executor, hence the base class.)
    """

    def __init__(self, width: int = WIDTH):
        super().__init__(width)
        self.width = width
        self._busy = 0  # places taken, by threads that are not written off
        self._queue: collections.deque[_Work] = collections.deque()
        self._lock = threading.Lock()

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Raises RuntimeError where the system has no thread left and none here will be free."""
        work = _Work(self, partial(function, *args, **kwargs), _enter_queue())
        with self._lock:
            self._queue.append(work)
            if not self._start_thread() and not self._busy:
                self._queue.pop().leave_queue()
                raise RuntimeError("the system starts no more threads: too many calls hang")
        return work

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: the threads outlive an event loop and end when nothing is queued."""

    def leave(self, work: _Work) -> None:
        """Takes a call out of the queue, or writes off the thread that it runs in."""
        with self._lock:
            if work in self._queue:
                self._queue.remove(work)
                work.leave_queue()
            elif not work.over:
                work.over = True
                self._busy -= 1
                self._start_thread()

    def _start_thread(self) -> bool:
        """Starts a thread if one is due; whether the system did."""
        if self._queue and self._busy < self.width:
            try:
                threading.Thread(target=self._work, name="tool", daemon=True).start()
            except RuntimeError:
                return False
            self._busy += 1
        return True

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy -= 1
                    return
                work = self._queue.popleft()
                work.leave_queue()
                work.set_running_or_notify_cancel()
            finish = work.run()
            with self._lock:
                if work.over:
                    return  # written off: another has this thread's place
                work.over = True
            finish()


class _Work(concurrent.futures.Future):
    """One call: ``over`` once it has ended, or nobody waits for it any more."""

    def __init__(
        self, threads: ToolThreads, call: Callable[[], Any], leave_queue: Callable[[], None]
    ):
        super().__init__()
        self._threads, self._call, self.leave_queue = threads, call, leave_queue
        self.over = False

    def cancel(self) -> bool:
        if not self.done():
            self._threads.leave(self)
        return super().cancel()

    def run(self) -> Callable[[], None]:
        """Makes the call and returns what tells its end."""
        try:
            return partial(self.set_result, self._call())
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # asyncio hangs on the first, and the others would end the whole run.
            failure = RuntimeError(f"{type(error).__name__} {error}".rstrip())
            return partial(self.set_exception, failure.with_traceback(error.__traceback__))
        except BaseException as error:
            return partial(self.set_exception, error)


def _enter_queue() -> Callable[[], None]:
    """Enters QUEUEING if the context has it; returns what leaves it, from any thread."""
    waiting = QUEUEING.get(None)
    if waiting is None:
        return lambda: None
    loop, entered = asyncio.get_running_loop(), contextlib.ExitStack()
    entered.enter_context(waiting())

    def leave() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(entered.close)

    return leave


TOOL_THREADS = ToolThreads()  # the process's own
