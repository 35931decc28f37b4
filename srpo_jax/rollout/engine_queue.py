"""Episodes before the engine: futures over its submit and step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from envs.clock import Clock
from envs.workflow import EpisodeFailed
from srpo_jax.engine import Completion, Engine, Request
from srpo_jax.engine.remote import RemoteEngine, RemoteEngineError


class EngineQueue:
    """What episodes await while ``pump`` steps the engine. ``seconds`` bounds a wait for slots."""

    def __init__(self, engine: Engine | RemoteEngine, seconds: float):
        self.engine = engine
        self._seconds = seconds
        self._futures: dict[int, asyncio.Future[Completion | RemoteEngineError]] = {}
        self._waiting: dict[asyncio.Future[None], Sequence[int]] = {}  # calls without their slots
        self._wake = asyncio.Event()

    async def generate(self, requests: Sequence[Request], clock: Clock) -> list[Completion]:
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
