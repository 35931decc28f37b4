"""The calls of a rollout's episodes to its engine: waiting for slots is no time of an episode, and
an engine that breaks ends the rollout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from envs.clock import Clock
from envs.workflow import EpisodeFailed
from srpo_jax.engine import Completion, Request
from srpo_jax.engine.async_engine import AsyncEngine


class EngineCalls:
    """The engine of one rollout, made in its event loop.

    Args:
        engine: Within ``async with``.
        queue_seconds: The longest that a call waits for its slots.

    Attributes:
        broken: Raises what the engine has failed with, once it has.
    """

    def __init__(self, engine: AsyncEngine, queue_seconds: float):
        self._engine, self._queue_seconds = engine, queue_seconds
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def generate(self, requests: Sequence[Request], clock: Clock) -> list[Completion]:
        """The completions of one call's requests; cancelled, it frees their slots.

        Args:
            requests: One for each member.
            clock: The episode's; it stands still until all requests have a slot.

        Raises:
            EpisodeFailed: ("queue_timeout") where that takes longer than ``queue_seconds``, and
                what a remote engine has failed one of these requests with.
            ValueError: For a request that the engine does not take.
        """
        limit = asyncio.timeout(self._queue_seconds)
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(clock.stopped())

            def started() -> None:
                waiting.close()
                if not limit.expired():
                    limit.reschedule(None)

            try:
                async with limit:
                    return await self._engine.generate(requests, started)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise EpisodeFailed(
                    "queue_timeout", f"waited more than {self._queue_seconds:g} s for one of "
                    f"{self._engine.slots} slots"
                ) from None  # fmt: skip
            except (EpisodeFailed, ValueError):
                raise
            except Exception as error:
                if not self.broken.done():
                    self.broken.set_exception(error)
                    self.broken.exception()  # seen, also where the rollout ends for another reason
                raise
