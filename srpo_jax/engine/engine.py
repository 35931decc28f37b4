"""Continuous batching over fixed slots and a paged cache: one plain, deterministic scheduler.

``submit`` queues a request, ``step`` gives free slots to requests whose prompts are in the cache,
runs one decode burst, and prepares the next requests while the device is busy. A request is
prepared, in order of submission, once the pages for its whole length are there, so what runs always
ends and frees its pages: nothing waits for itself.

A result depends on the request and on shapes fixed for the run, never on slot, neighbours or order
of admission. A page of a prompt is a function of the ids up to its end, so it does not matter which
request computed it, and every draw is keyed by the request's own key and position.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache_attention import PLAIN
from models.config import ModelConfig
from srpo_jax.engine.pages import UNUSED, Node, PageStore
from srpo_jax.engine.plan import RowPages, Shapes, decode_work, pages_of, prefill_pages
from srpo_jax.engine.programs import (
    Plan,
    Sampling,
    Slots,
    compiled_programs,
    new_state,
    prepare_weights,
)
from srpo_jax.engine.requests import TOP_LOGPS, Completion, PromptTooLong, Request

# Tokens of one prefill: enough for the full speed of the products. One size alone, because a row's
# bits can change with the number of rows beside it (seen on CPU at small widths).
PREFILL_TOKENS = {"cpu": 512}
OTHER_PREFILL_TOKENS = 1024


@dataclass
class _Running:
    """A request and what it holds: the pages of its prompt but for the last token, and its own."""

    uid: int
    request: Request
    nodes: list[Node] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class Engine:
    """Up to ``slots`` requests at once on one device, each with at most ``cache_tokens`` tokens.

    ``vocab_size`` is the tokenizer's length; ``stop_ids`` the union of every declared end id;
    ``decode_text`` (ids -> str) is needed for stop strings only. ``budget_tokens`` bounds the cache
    (None: every slot can have a request of the full length), ``store_tokens`` the part of it that
    keeps prompts which no request holds (None: whatever is free). Without ``sharing`` equal prompts
    are computed, stored and read once for every request: the same bits, slower.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphdef: Any,
        params: dict,
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        slots: int,
        cache_tokens: int,
        burst: int = 16,
        budget_tokens: int | None = None,
        store_tokens: int | None = None,
        sharing: bool = True,
        page: int | None = None,
        dtype: Any = jnp.float32,
        decode_text: Callable[[list[int]], str] | None = None,
        device: jax.Device | None = None,
        version: int = 0,
    ):
        self.slots = slots
        self.cache_tokens = cache_tokens
        self.stats: collections.Counter[str] = collections.Counter()
        self._burst = burst
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._decode_text = decode_text
        self._embedded = config.vocab_size
        self._device = device or jax.local_devices()[0]
        attention = PLAIN
        page = page or attention.page
        self._shapes = Shapes(slots, page, attention.lanes, cache_tokens)
        tokens = PREFILL_TOKENS.get(self._device.platform, OTHER_PREFILL_TOKENS)
        self._prefill_pages = pages_of(tokens, page)
        one = pages_of(cache_tokens, page) + 1  # a request's prompt and response are rounded up
        count = slots * one if budget_tokens is None else budget_tokens // page
        if count < one:
            raise ValueError(
                f"{budget_tokens} tokens are too few: one request of {cache_tokens} tokens needs "
                f"{one * page}"
            )
        kept = None if store_tokens is None else store_tokens // page
        self._store = PageStore(count + 1, page, kept, sharing)
        self._prepare = jax.jit(lambda p: prepare_weights(graphdef, p, dtype))
        self._prefill, self._decode = compiled_programs(
            config, attention, vocab_size, tuple(sorted(self._stop_ids)), burst
        )
        self._new_state = functools.partial(
            new_state,
            config,
            attention,
            slots,
            count + 1,
            page,
            decode_work({}, self._shapes),
            dtype,
        )
        self._state = self._weights = None
        self._waiting: dict[int, _Running] = {}  # by uid, in order of submission
        self._ready: collections.deque[_Running] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._uids = 0
        self.set_weights(params, version)

    def set_weights(self, params: dict, version: int) -> None:
        """Replaces the weights between calls and forgets the stored prompts; running requests would
        mix policies, so none may run.

        Raises RuntimeError if any does.
        """
        self.drop()
        self._state = jax.device_put(self._new_state(), self._device)
        self._weights = self._prepare(jax.device_put(params, self._device))
        self.version = version

    def drop(self) -> None:
        """Frees the memory of weights and cache until ``set_weights``: while a learner updates on
        the same device, it is the learner's. Requests may be submitted but no step be taken.

        Raises RuntimeError if any request runs.
        """
        if self._running:
            raise RuntimeError(
                f"{len(self._running)} requests are running: weights change between batches"
            )
        for ready in self._ready:
            self._release(ready)
        self._waiting = {r.uid: r for r in self._ready} | self._waiting
        self._ready.clear()
        self._store.clear()
        self._state = self._weights = None

    def submit(self, request: Request) -> int:
        """Queues a request and returns its uid.

        Raises PromptTooLong (length and limit), or ValueError for an id that the model does not
        embed and for settings that make no sense.
        """
        length, room = len(request.prompt_ids), self.cache_tokens - request.max_tokens
        if not 0 < length <= room:
            raise PromptTooLong(
                f"prompt has {length} tokens; the limit is {room} "
                f"({self.cache_tokens} cache tokens less {request.max_tokens} for the response)"
            )
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if request.stop_strings and self._decode_text is None:
            raise ValueError("stop_strings need an engine with decode_text")
        if not 0 <= request.top_logps <= min(TOP_LOGPS, self._embedded):
            raise ValueError(f"top_logps is {request.top_logps}, the most is {TOP_LOGPS}")
        top = max(request.prompt_ids)
        if top >= self._embedded or min(request.prompt_ids) < 0:
            raise ValueError(f"prompt id {top} is not among the {self._embedded} embedded ids")
        uid = self._uids
        self._uids += 1
        self._waiting[uid] = _Running(uid, request)
        return uid

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._ready and not self._running

    def cancel(self, uid: int) -> None:
        """Drops a request, waiting or running; its slot and its pages are free at once."""
        self._waiting.pop(uid, None)
        for ready in [r for r in self._ready if r.uid == uid]:
            self._ready.remove(ready)
            self._release(ready)
        for slot in [slot for slot, run in self._running.items() if run.uid == uid]:
            self._release(self._running.pop(slot))

    def compile_count(self) -> int:
        """Programs compiled so far: constant after warm-up."""
        programs = (self._prefill, self._decode, self._prepare)
        return sum(p._cache_size() for p in programs)

    def step(self) -> list[tuple[int, Completion]]:
        """Admits, decodes one burst and returns (uid, completion) of what finished."""
        free = [slot for slot in range(self.slots) if slot not in self._running]
        self._prepare_requests(len(free))
        admitted = {}
        while free and self._ready:
            slot = free.pop(0)
            admitted[slot] = self._running[slot] = self._ready.popleft()
        if not self._running:
            return []
        requests = [running.request for running in self._running.values()]
        self._state, burst = self._decode(
            self._weights, self._state, self._plan(admitted),
            truncated=any(r.truncated for r in requests), top=any(r.top_logps for r in requests),
        )  # fmt: skip
        # The device is busy: what comes next is looked up and queued behind the burst.
        self._prepare_requests(max(1, self.slots // 4))
        burst = jax.device_get(burst)
        self.stats["decode_steps"] += int(burst.counts.max(initial=0))
        self.stats["decode_tokens"] += int(burst.counts.sum())
        finished = []
        for slot in list(self._running):
            finished += self._extend(slot, burst)
        return finished

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits all, steps until all are done, and returns the completions in their order."""
        order = {self.submit(r): i for i, r in enumerate(requests)}
        results: list[Completion | None] = [None] * len(requests)
        while not self.idle:
            for uid, completion in self.step():
                results[order[uid]] = completion
        return results

    def _prepare_requests(self, count: int) -> None:
        """Gets up to ``count`` requests ready: takes their pages and queues their prefill."""
        new: list[Node] = []
        while self._waiting and len(self._ready) < count:
            ready = next(iter(self._waiting.values()))
            request = ready.request
            own = pages_of(request.max_tokens, self._shapes.page)
            prompt = tuple(request.prompt_ids[:-1])
            if not self._store.fits(prompt, own):
                break
            del self._waiting[ready.uid]
            ready.nodes, stored = self._store.hold(prompt)
            ready.own = self._store.take(own)
            new += ready.nodes[stored:]
            self._ready.append(ready)
            self.stats["prompt_tokens"] += len(request.prompt_ids)
        while new:
            size = self._prefill_pages
            part, new = new[:size], new[size:]
            self._state = self._prefill(
                self._weights, self._state, prefill_pages(part, size, self._shapes)
            )
            self.stats["prefill_tokens"] += sum(len(node.ids) for node in part)
            self.stats["prefill_padded_tokens"] += size * self._shapes.page

    def _plan(self, admitted: dict[int, _Running]) -> Plan:
        B = self.slots
        alive, admit = np.zeros(B, bool), np.zeros(B, bool)
        last, prompt, limit = np.zeros((3, B), np.int32)
        temperature, top_p = np.ones((2, B), np.float32)
        top_k, keys = np.zeros(B, np.int32), np.zeros((B, 2), np.uint32)
        own = np.full((B, self._shapes.row_pages), UNUSED, np.int32)
        rows = {}
        for slot, running in self._running.items():
            alive[slot] = True
            own[slot, : len(running.own)] = running.own
            reached = pages_of(len(running.ids) + self._burst, self._shapes.page)
            rows[slot] = RowPages(running.nodes, running.own[:reached])
        for slot, running in admitted.items():
            r = running.request
            admit[slot], last[slot], prompt[slot] = True, r.prompt_ids[-1], len(r.prompt_ids) - 1
            limit[slot], temperature[slot] = r.max_tokens, r.temperature
            top_p[slot], top_k[slot], keys[slot] = r.top_p, r.top_k, r.key
        new = Slots(
            last, prompt, np.zeros(B, np.int32), limit, admit,
            Sampling(temperature, top_p, top_k, keys),
        )  # fmt: skip
        # Ending a burst costs little beside its steps, an idle slot a share of every step.
        waits = bool(self._waiting or self._ready)
        enough = max(1, B // 16) if waits else B
        return Plan(alive, admit, new, own, decode_work(rows, self._shapes), np.int32(enough))

    def _extend(self, slot: int, burst: Any) -> list[tuple[int, Completion]]:
        """Adds what a slot drew to its request; frees the slot and returns it when it is done."""
        running, n = self._running[slot], int(burst.counts[slot])
        request = running.request
        running.ids += burst.tokens[slot, :n].tolist()
        running.logps += burst.logps[slot, :n].tolist()
        if request.top_logps:
            k = request.top_logps
            running.tops.append((burst.top_ids[slot, :n, :k], burst.top_logps[slot, :n, :k]))
        reason = None
        if running.ids and running.ids[-1] in self._stop_ids:
            reason = "stop"
        elif len(running.ids) >= request.max_tokens:
            reason = "length"
        end = self._stop_string_end(running, n)
        if end is not None:
            running.ids, running.logps, reason = running.ids[:end], running.logps[:end], "stop"
        if reason is None:
            return []
        self._release(self._running.pop(slot))
        done = Completion(running.ids, np.asarray(running.logps, np.float32), reason, self.version)
        if request.top_logps:
            ids, logps = zip(*running.tops, strict=True)
            done.top_ids = np.concatenate(ids)[: len(running.ids)]
            done.top_logps = np.concatenate(logps)[: len(running.ids)]
        return [(running.uid, done)]

    def _stop_string_end(self, running: _Running, new: int) -> int | None:
        """The number of tokens that complete the earliest stop string, or None."""
        strings = running.request.stop_strings
        if not strings or not any(s in self._decode_text(running.ids) for s in strings):
            return None
        for end in range(len(running.ids) - new + 1, len(running.ids) + 1):
            if any(s in self._decode_text(running.ids[:end]) for s in strings):
                return end
        return None

    def _release(self, running: _Running) -> None:
        """Frees the pages of a request that ended, was cancelled or goes back to wait."""
        self._store.release(running.nodes)
        self._store.give_back(running.own)
        running.nodes, running.own = [], []
