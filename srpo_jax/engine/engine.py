"""Continuous batching over fixed slots and a paged KV cache: one plain, deterministic scheduler.

``submit`` queues a request. ``step`` gives free slots to requests whose prompts are in the cache,
runs one burst (up to ``burst`` decode steps in one dispatch), and prefills the next requests while
the device is busy. A request is prefilled, in order of submission, once there are pages for its
whole length, so what runs always ends and frees its pages: there is no deadlock and no preemption.

A result depends on the request and on shapes fixed for the run, never on slot, neighbours or order
of admission, nor on the replica. A page of a prompt is a function of the ids up to its end, so it
does not matter which request computed it, and every draw is keyed by the request's own key and
position.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.attention.select import cache_attention_on
from models.config import ModelConfig
from srpo_jax.engine.build import engine_programs, joined, prefill_size
from srpo_jax.engine.layout import REPLICA, TENSOR, Weights, check_tensor, engine_mesh
from srpo_jax.engine.pages import PageNode, PageStore
from srpo_jax.engine.plan import Shapes, plan_prefill
from srpo_jax.engine.programs import EngineState
from srpo_jax.engine.replica import Replica, Running
from srpo_jax.engine.requests import (
    LEAST_TEMPERATURE,
    TOP_LOGPS,
    Completion,
    PromptTooLong,
    Request,
)
from srpo_jax.engine.stop_strings import StopStrings, TextDecoder
from srpo_jax.engine.weight_sync import sync_weights


class Engine:
    """A synchronous engine: coroutines reach it through ``EngineThread``.

    Args:
        config: The model's.
        graphdef: The model without its parameters (``models.qwen.split_params``).
        params: Its parameters, of which the engine makes a copy in its own layout.
        vocab_size: The tokenizer's length; higher ids are never drawn.
        stop_ids: The union of every declared end id.
        slots: Requests decoded at once on each replica.
        cache_tokens: The most tokens of a request, prompt and response together.
        burst: Decode steps of one dispatch.
        budget_tokens: Tokens of a replica's KV cache (None: the full length in every slot).
        store_tokens: Those of them that may keep prompts which no request reads any more (None:
            whatever is free).
        sharing: Prefix sharing. Without, equal prompts are computed, stored and read once for every
            request: the same bits, slower.
        page: Tokens of a page (None: what suits the device's attention).
        dtype: Of weights and cache.
        tokenizer: Needed for stop strings only.
        mesh: (replica, tensor), see ``engine_mesh`` (None: one device).
        version: Of the weights; completions name it.

    Attributes:
        stats: Counts of decode_steps, decode_tokens, prompt_tokens, prefill_tokens (those of
            prompts that were not stored) and prefill_padded_tokens.

    Raises:
        ValueError: For a budget below one request, heads that the mesh does not divide, and what
            the devices' attention does not take.
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
        tokenizer: TextDecoder | None = None,
        mesh: Mesh | None = None,
        version: int = 0,
    ):
        mesh = engine_mesh() if mesh is None else mesh
        replicas, tensor = mesh.shape[REPLICA], mesh.shape[TENSOR]
        check_tensor(config, tensor)
        self.slots = slots * replicas
        self.cache_tokens = cache_tokens
        self.dtype = jnp.dtype(dtype)
        self.stats: collections.Counter[str] = collections.Counter()
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._tokenizer = tokenizer
        self._embedded = config.vocab_size
        self._mesh = mesh
        attention = cache_attention_on(mesh.devices.flat[0].platform)
        self._shapes = shapes = Shapes(slots, page or attention.page, attention.lanes, cache_tokens)
        self._prefill_pages = prefill_size(mesh, shapes)
        one = shapes.request_pages
        count = slots * one if budget_tokens is None else budget_tokens // shapes.page
        if count < one:
            raise ValueError(
                f"a cache of {budget_tokens} tokens is too small: one request of {cache_tokens} "
                f"needs {one * shapes.page}"
            )
        kept = None if store_tokens is None else store_tokens // shapes.page
        self._replicas = [
            Replica(shapes, PageStore(count + 1, shapes.page, kept, sharing), burst)
            for _ in range(replicas)
        ]
        programs = engine_programs(
            config, graphdef, params, mesh, attention, shapes, pages=count + 1,
            vocab_size=vocab_size, stop_ids=self._stop_ids, burst=burst, dtype=dtype,
        )  # fmt: skip
        self._sync, self._new_state = programs.sync, programs.new_state
        self._prefill, self._decode = programs.prefill, programs.decode
        self._state: EngineState | None = None
        self._weights: Weights | None = None
        self._waiting: dict[int, Running] = {}  # by uid, in order of submission
        self._uids = 0
        self.set_weights(params, version)

    def set_weights(self, params: dict, version: int) -> None:
        """Replaces the weights and forgets the stored prompts. The next step makes the cache: the
        caller may drop the parameters before.

        Args:
            params: On any devices; see ``sync_weights``.
            version: Of these weights.

        Raises:
            RuntimeError: If any request runs: its response would mix two policies.
        """
        self.drop()
        self._weights = sync_weights(self._sync, params, self._mesh, self.dtype)
        self.version = version

    def drop(self) -> None:
        """Frees the memory of weights and cache until ``set_weights``: while a learner updates on
        the same device, it is the learner's. Requests may be submitted but no step be taken.

        Raises:
            RuntimeError: If any request runs.
        """
        running = sum(len(replica.running) for replica in self._replicas)
        if running:
            raise RuntimeError(f"{running} requests are running: weights change between batches")
        back = {}
        for replica in self._replicas:
            for ready in replica.ready:
                replica.release(ready)
                back[ready.uid] = ready
            replica.ready.clear()
            replica.store.clear()
        self._waiting = dict(sorted(back.items())) | self._waiting
        self._state = self._weights = None

    def submit(self, request: Request) -> int:
        """Queues a request and returns its uid.

        Raises:
            PromptTooLong: Says the prompt's length and the limit.
            ValueError: For an id that the model does not embed and a setting out of its range.
        """
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        length, limit = len(request.prompt_ids), self.cache_tokens - request.max_tokens
        if not 0 < length <= limit:
            raise PromptTooLong(
                f"prompt has {length} tokens; the limit is {limit} "
                f"({self.cache_tokens} cache tokens less {request.max_tokens} for the response)"
            )
        stops = None
        if request.stop_strings:
            if self._tokenizer is None:
                raise ValueError("stop_strings need an engine with a tokenizer")
            stops = StopStrings(request.stop_strings, self._tokenizer)
        if not 0 <= request.top_logps <= min(TOP_LOGPS, self._embedded):
            raise ValueError(f"top_logps must be from 0 to {TOP_LOGPS}, got {request.top_logps}")
        low, top = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or top >= self._embedded:
            wrong = low if low < 0 else top
            raise ValueError(f"prompt id {wrong} is not among the {self._embedded} embedded ids")
        if request.temperature and not LEAST_TEMPERATURE <= request.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}, got "
                f"{request.temperature:g}"
            )
        if not (0 <= request.top_p <= 1 and request.top_k >= 0):
            raise ValueError(
                f"top_p must be from 0 to 1 and top_k at least 0, got {request.top_p} and "
                f"{request.top_k}"
            )
        uid = self._uids
        self._uids += 1
        self._waiting[uid] = Running(uid, request, stops)
        return uid

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not any(replica.load for replica in self._replicas)

    @property
    def queued(self) -> set[int]:
        """The uids of requests that have had no slot yet."""
        return set(self._waiting).union(*({r.uid for r in p.ready} for p in self._replicas))

    def cancel(self, uid: int) -> None:
        """Drops a request, waiting or running; its slot and its pages are free for the next step.
        A uid that is not there is ignored."""
        self._waiting.pop(uid, None)
        for replica in self._replicas:
            replica.cancel(uid)

    def compile_count(self) -> int:
        """How many programs are compiled so far: constant after warm-up."""
        programs = (
            self._prefill, self._decode, self._new_state, self._sync.layer, self._sync.vocabulary,
        )  # fmt: skip
        return sum(p._cache_size() for p in programs)

    def step(self) -> list[tuple[int, Completion]]:
        """Admits requests and decodes one burst.

        Returns:
            (uid, completion) of every request that finished.
        """
        if self._state is None:
            self._state = self._new_state()
        self._prepare_requests([len(replica.free_slots) for replica in self._replicas])
        admitted = [replica.admit() for replica in self._replicas]
        running = [r for replica in self._replicas for r in replica.running.values()]
        if not running:
            return []
        B = self._shapes.slots
        waits = bool(self._waiting) or any(replica.ready for replica in self._replicas)
        # Ending a burst costs little beside its steps, an idle slot a share of every step.
        enough = max(1, B // 16) if waits else B
        plans = [
            replica.plan(new, enough) for replica, new in zip(self._replicas, admitted, strict=True)
        ]
        self._state, burst = self._decode(
            self._weights, self._state, joined(plans),
            top=any(r.request.top_logps for r in running),
        )  # fmt: skip
        # The device is busy: what comes next is looked up and queued behind the burst.
        self._prepare_requests([max(1, B // 4)] * len(self._replicas))
        burst = jax.device_get(burst)
        self.stats["decode_steps"] += int(burst.counts.max(initial=0))
        self.stats["decode_tokens"] += int(burst.counts.sum())
        finished = []
        for first, replica in enumerate(self._replicas):
            for slot, request in list(replica.running.items()):
                completion = self._extend(request, burst, first * B + slot)
                if completion is not None:
                    replica.release(replica.running.pop(slot))
                    finished.append((request.uid, completion))
        return finished

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits all, steps until all are done, and returns the completions in their order.

        Raises:
            ValueError: As ``submit``.
        """
        order = {self.submit(r): i for i, r in enumerate(requests)}
        results: dict[int, Completion] = {}
        while not self.idle:
            for uid, completion in self.step():
                results[order[uid]] = completion
        return [results[i] for i in range(len(requests))]

    def _prepare_requests(self, counts: Sequence[int]) -> None:
        """Gets up to ``counts`` requests of each replica ready: allocates their pages and
        dispatches their prefill."""
        new: list[list[PageNode]] = [[] for _ in self._replicas]
        while self._waiting:
            waiting = next(iter(self._waiting.values()))
            at = self._place(waiting, counts)
            if at is None:
                break
            del self._waiting[waiting.uid]
            new[at] += self._replicas[at].hold(waiting)
            self.stats["prompt_tokens"] += len(waiting.request.prompt_ids)
        size = self._prefill_pages
        while any(new):
            part, new = [nodes[:size] for nodes in new], [nodes[size:] for nodes in new]
            pages = [plan_prefill(nodes, size, self._shapes) for nodes in part]
            self._state = self._prefill(self._weights, self._state, joined(pages))
            self.stats["prefill_tokens"] += sum(len(n.ids) for nodes in part for n in nodes)
            self.stats["prefill_padded_tokens"] += size * self._shapes.page * len(part)

    def _place(self, waiting: Running, counts: Sequence[int]) -> int | None:
        """The replica for a request: of those that have pages for it and are not much busier than
        the least busy one, where most of its prompt is stored. None: it must wait."""
        fitting = [
            at
            for at, replica in enumerate(self._replicas)
            if len(replica.ready) < counts[at] and replica.fits(waiting)
        ]
        if not fitting:
            return None
        loads = {at: self._replicas[at].load for at in fitting}
        most = min(loads.values()) + self._shapes.slots // 4
        return min(
            (at for at in fitting if loads[at] <= most),
            key=lambda at: (-self._replicas[at].stored_pages(waiting), loads[at]),
        )

    def _extend(self, running: Running, burst: Any, row: int) -> Completion | None:
        """Adds what a row of the burst drew to its request; the completion if it is done."""
        n, request = int(burst.counts[row]), running.request
        running.ids += burst.tokens[row, :n].tolist()
        running.logps += burst.logps[row, :n].tolist()
        if request.top_logps:
            k = request.top_logps
            running.tops.append((burst.top_ids[row, :n, :k], burst.top_logps[row, :n, :k]))
        reason: Literal["stop", "length"] | None = None
        if running.ids and running.ids[-1] in self._stop_ids:
            reason = "stop"
        elif len(running.ids) >= request.max_tokens:
            reason = "length"
        end = running.stops.end(running.ids) if running.stops else None
        if end is not None:
            running.ids, running.logps, reason = running.ids[:end], running.logps[:end], "stop"
        if reason is None:
            return None
        done = Completion(running.ids, np.asarray(running.logps, np.float32), reason, self.version)
        if request.top_logps:
            ids, logps = zip(*running.tops, strict=True)
            done.top_ids = np.concatenate(ids)[: len(running.ids)]
            done.top_logps = np.concatenate(logps)[: len(running.ids)]
        return done
