"""Time limits that do not count waiting.

A limit of an episode or a tool is about its service. How long it waits for a slot of the engine or
for a thread says how many others there are, so waiting has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType


class Clock:
    """An async context manager that ends its body with TimeoutError after ``seconds``; it stands
    still while anything is within ``stopped()``."""

    def __init__(self, seconds: float):
        self._left = seconds
        self._waits, self._open = 0, False
        self._since: float | None = None  # when it began to run; None while it does not
        self._timeout = asyncio.timeout(None)

    @property
    def expired(self) -> bool:
        return self._timeout.expired()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self._waits += 1
        self._stop()
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._start()

    async def __aenter__(self) -> Clock:
        await self._timeout.__aenter__()
        self._loop, self._open = asyncio.get_running_loop(), True
        self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        self._open = False  # nothing that outlives the body starts it again
        await self._timeout.__aexit__(kind, error, traceback)

    def _start(self) -> None:
        if self._open and not self.expired:
            self._since = self._loop.time()
            self._timeout.reschedule(self._since + max(self._left, 0.0))

    def _stop(self) -> None:
        if self._since is not None and not self.expired:
            self._left -= self._loop.time() - self._since
            self._since = None
            self._timeout.reschedule(None)
