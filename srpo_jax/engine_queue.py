"""Episodes before the engine: futures over its steps, and time limits that do not count waiting.

A limit of an episode is about its service. How long it waits for a slot or a thread says how many
other episodes there are, so waiting has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from envs.workflow import EpisodeFailed
from srpo_jax.engine import Completion, Engine, Request


class EpisodeClock:
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

    async def __aenter__(self) -> EpisodeClock:
        await self._timeout.__aenter__()
        self._loop, self._open = asyncio.get_running_loop(), True
        self._start()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        self._stop()
        self._open = False  # nothing that outlives the body starts it again
        return await self._timeout.__aexit__(*error)

    def _start(self) -> None:
        if self._open and not self.expired:
            self._since = self._loop.time()
            self._timeout.reschedule(self._since + max(self._left, 0.0))

    def _stop(self) -> None:
        if self._since is not None and not self.expired:
            self._left -= self._loop.time() - self._since
            self._since = None
            self._timeout.reschedule(None)


class EngineQueue:
    """Futures over the engine's submit and step; ``pump`` runs while episodes await."""

    def __init__(self, engine: Engine, seconds: float):
        self.engine = engine
        self._seconds = seconds
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._waiting: dict[asyncio.Future[None], Sequence[int]] = {}  # calls without their slots
        self._wake = asyncio.Event()

    async def generate(self, requests: Sequence[Request], clock: EpisodeClock) -> list[Completion]:
        """Completions of one call's requests; cancelled, it frees their slots.

        ``clock`` stands still until all of them have a slot. Raises EpisodeFailed("queue_timeout")
        where that takes longer than ``seconds``, and what a remote engine gave in a completion's
        place: the episode fails, no other does.
        """
        uids: list[int] = []
        loop = asyncio.get_running_loop()
        try:
            for request in requests:
                uid = self.engine.submit(request)
                uids.append(uid)
                self._futures[uid] = loop.create_future()
            self._wake.set()
            with clock.stopped():
                await self._slots(uids)
            completions = []
            for uid in uids:
                result = await self._futures[uid]
                if isinstance(result, EpisodeFailed):
                    raise result
                completions.append(result)
            return completions
        finally:
            for uid in uids:
                future = self._futures.pop(uid)
                if future.cancelled() or not future.done():  # the one awaited is cancelled with us
                    self.engine.cancel(uid)

    async def _slots(self, uids: Sequence[int]) -> None:
        """Waits until every one of the requests has had a slot."""
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[served] = uids
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                await served
        except TimeoutError:
            raise EpisodeFailed(
                "queue_timeout", f"waited more than {self._seconds:g} s for one of "
                f"{self.engine.slots} slots"
            ) from None  # fmt: skip
        finally:
            del self._waiting[served]

    async def pump(self) -> None:
        """Steps the engine whenever it has work; runs until cancelled."""
        while True:
            if self.engine.idle:
                self._wake.clear()
                await self._wake.wait()
            for uid, completion in self.engine.step():
                if uid in self._futures and not self._futures[uid].done():
                    self._futures[uid].set_result(completion)
            if self._waiting:
                queued = self.engine.queued
                for served, uids in self._waiting.items():
                    if not served.done() and queued.isdisjoint(uids):
                        served.set_result(None)
            # Resumed episodes reach their next call within a few turns of the loop.
            for _ in range(4):
                await asyncio.sleep(0)
