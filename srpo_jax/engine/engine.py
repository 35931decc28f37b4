"""Continuous batching over fixed slots: one plain, deterministic scheduler.

``submit`` queues a request, ``step`` admits waiting requests to free slots, runs one decode burst
and returns what finished. A result depends on the request and on shapes fixed for the run, never on
slot, neighbours or order of admission: prompts are prefilled in buckets chosen by their own length,
``prefill_rows`` at a time, and every draw is keyed by the request's own key and position.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from srpo_jax.buckets import bucket
from srpo_jax.engine.programs import Sampling, compiled_programs, new_state, prepare_weights


class PromptTooLong(ValueError):
    """A prompt that does not fit; says its length and the limit."""


def request_key(*ids: int) -> tuple[int, int]:
    """Key data of a request from the integers that identify it, equal on every process.

    The ids are (run seed, 0 train or 1 evaluation, step, task slot, rollout, call, member).
    """
    digest = hashlib.blake2b(np.asarray(ids, "<i8").tobytes(), digest_size=8).digest()
    a, b = np.frombuffer(digest, "<u4")
    return int(a), int(b)


@dataclass(frozen=True)
class Request:
    """One generation. Temperature 0 is greedy; top_p and top_k are for evaluation only.

    ``stop_strings`` end the response with the token that completes one of them.
    """

    prompt_ids: Sequence[int]
    key: tuple[int, int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_strings: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


@dataclass
class Completion:
    """The sampled ids (stop id included), their log-probs under the learner's distribution,
    "stop" or "length", and the version of the weights that sampled them."""

    ids: list[int]
    logps: np.ndarray
    stop_reason: str
    version: int


@dataclass
class _Running:
    uid: int
    request: Request
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class Engine:
    """A batch of ``slots`` requests on one device, each with ``cache_tokens`` positions.

    ``vocab_size`` is the tokenizer's length; ``stop_ids`` the union of every declared end id;
    ``decode_text`` (ids -> str) is needed for stop strings only.
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
        prefill_rows: int | None = None,
        dtype: Any = jnp.float32,
        decode_text: Callable[[list[int]], str] | None = None,
        device: jax.Device | None = None,
        version: int = 0,
    ):
        self.slots = slots
        self.cache_tokens = cache_tokens
        # Admission waits for this many free slots: few, so that a long response idles few of them.
        self.prefill_rows = prefill_rows or max(1, min(slots // 4, 8))
        self.stats: collections.Counter[str] = collections.Counter()
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._decode_text = decode_text
        self._embedded = config.vocab_size
        self._device = device or jax.local_devices()[0]
        self._prepare = jax.jit(lambda p: prepare_weights(graphdef, p, dtype))
        self._prefill, self._decode, self._release = compiled_programs(
            config=config,
            vocab_size=vocab_size,
            stop_ids=tuple(sorted(self._stop_ids)),
            steps=burst,
        )
        self._state = jax.device_put(new_state(config, slots, cache_tokens, dtype), self._device)
        self._waiting: collections.deque[_Running] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._uids = 0
        self.set_weights(params, version)

    def set_weights(self, params: dict, version: int) -> None:
        """Replaces the weights between calls; running requests would mix policies, so none may run.

        Raises RuntimeError if any does.
        """
        if self._running:
            raise RuntimeError(
                f"{len(self._running)} requests are running: weights change between batches"
            )
        self._weights = self._prepare(jax.device_put(params, self._device))
        self.version = version

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
        top = max(request.prompt_ids)
        if top >= self._embedded or min(request.prompt_ids) < 0:
            raise ValueError(f"prompt id {top} is not among the {self._embedded} embedded ids")
        uid = self._uids
        self._uids += 1
        self._waiting.append(_Running(uid, request))
        return uid

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def cancel(self, uid: int) -> None:
        """Drops a request, waiting or running; its slot is free at once."""
        self._waiting = collections.deque(w for w in self._waiting if w.uid != uid)
        slots = [slot for slot, run in self._running.items() if run.uid == uid]
        self._free(slots)

    def compile_count(self) -> int:
        """Programs compiled so far: constant after warm-up."""
        programs = (self._prefill, self._decode, self._release, self._prepare)
        return sum(p._cache_size() for p in programs)

    def step(self) -> list[tuple[int, Completion]]:
        """Admits, decodes one burst and returns (uid, completion) of what finished."""
        finished = self._admit()
        if self._running:
            truncated = any(r.request.truncated for r in self._running.values())
            self._state, burst = self._decode(self._weights, self._state, truncated=truncated)
            tokens, logps, counts = jax.device_get(burst)
            self.stats["decode_steps"] += int(counts.max(initial=0))
            self.stats["decode_tokens"] += int(counts.sum())
            for slot in list(self._running):
                n = int(counts[slot])
                finished += self._extend(slot, tokens[slot, :n], logps[slot, :n])
        return finished

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits all, steps until all are done, and returns the completions in their order."""
        order = {self.submit(r): i for i, r in enumerate(requests)}
        results: list[Completion | None] = [None] * len(requests)
        while not self.idle:
            for uid, completion in self.step():
                results[order[uid]] = completion
        return results

    def _admit(self) -> list[tuple[int, Completion]]:
        free = [s for s in range(self.slots) if s not in self._running]
        # A prefill costs the same for one prompt as for prefill_rows: wait until it can be filled.
        worthwhile = min(self.prefill_rows, len(self._waiting))
        if not self._waiting or (self._running and len(free) < worthwhile):
            return []
        groups: dict[int, list[_Running]] = collections.defaultdict(list)
        for _ in range(min(len(free), len(self._waiting))):
            waiting = self._waiting.popleft()
            size = min(bucket(len(waiting.request.prompt_ids), 32), self.cache_tokens)
            groups[size].append(waiting)
        finished = []
        for size, group in sorted(groups.items()):
            for i in range(0, len(group), self.prefill_rows):
                chunk = group[i : i + self.prefill_rows]
                taken, free = free[: len(chunk)], free[len(chunk) :]
                finished += self._prefill_chunk(size, chunk, taken)
        return finished

    def _prefill_chunk(self, size, chunk, slots):
        P = self.prefill_rows
        tokens = np.zeros((P, size), np.int32)
        lengths, limits = np.ones(P, np.int32), np.ones(P, np.int32)
        rows = np.full(P, self.slots, np.int32)
        temperature, top_p = np.ones(P, np.float32), np.ones(P, np.float32)
        top_k, keys = np.zeros(P, np.int32), np.zeros((P, 2), np.uint32)
        for i, (running, slot) in enumerate(zip(chunk, slots, strict=True)):
            r = running.request
            lengths[i], limits[i], rows[i] = len(r.prompt_ids), r.max_tokens, slot
            tokens[i, : lengths[i]] = r.prompt_ids
            temperature[i], top_p[i], top_k[i], keys[i] = r.temperature, r.top_p, r.top_k, r.key
            self._running[slot] = running
        truncated = any(running.request.truncated for running in chunk)
        self._state, drawn, logps = self._prefill(
            self._weights, self._state, tokens, lengths, rows, limits,
            Sampling(temperature, top_p, top_k, keys), truncated=truncated,
        )  # fmt: skip
        drawn, logps = jax.device_get((drawn, logps))
        self.stats["prefill_tokens"] += int(sum(len(r.request.prompt_ids) for r in chunk))
        self.stats["prefill_padded_tokens"] += P * size
        finished = []
        for i, slot in enumerate(slots):
            finished += self._extend(slot, drawn[i : i + 1], logps[i : i + 1])
        return finished

    def _extend(self, slot, tokens, logps) -> list[tuple[int, Completion]]:
        """Adds drawn tokens to a slot's request; frees the slot and returns it when it is done."""
        running = self._running[slot]
        running.ids += tokens.tolist()
        running.logps += logps.tolist()
        request = running.request
        reason = None
        if running.ids and running.ids[-1] in self._stop_ids:
            reason = "stop"
        elif len(running.ids) >= request.max_tokens:
            reason = "length"
        on_device = reason is None
        end = self._stop_string_end(running, len(tokens))
        if end is not None:
            running.ids, running.logps, reason = running.ids[:end], running.logps[:end], "stop"
        if reason is None:
            return []
        if on_device:
            self._free([slot])
        else:
            del self._running[slot]
        logps = np.asarray(running.logps, np.float32)
        return [(running.uid, Completion(running.ids, logps, reason, self.version))]

    def _stop_string_end(self, running, new: int) -> int | None:
        """The number of tokens that complete the earliest stop string, or None."""
        strings = running.request.stop_strings
        if not strings or not any(s in self._decode_text(running.ids) for s in strings):
            return None
        for end in range(len(running.ids) - new + 1, len(running.ids) + 1):
            if any(s in self._decode_text(running.ids[:end]) for s in strings):
                return end
        return None

    def _free(self, slots: Sequence[int]) -> None:
        """Ends slots that the device still holds active."""
        if not slots:
            return
        padded = np.full(self.slots, self.slots, np.int32)
        padded[: len(slots)] = slots
        self._state = self._release(self._state, padded)
        for slot in slots:
            del self._running[slot]
