"""One replica's bookkeeping on the host: which requests hold its slots and pages, and what its next
burst decodes."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

import numpy as np

from srpo_jax.engine.pages import UNUSED, PageNode, PageStore
from srpo_jax.engine.plan import RowPages, Shapes, decode_work, pages_of
from srpo_jax.engine.programs import Plan, Sampling, Slots
from srpo_jax.engine.requests import Request
from srpo_jax.engine.stop_strings import StopStrings


@dataclass
class Running:
    """A request and what it holds: the pages of its prompt but for the last token, and its own."""

    uid: int
    request: Request
    stops: StopStrings | None = None
    nodes: list[PageNode] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.request.prompt_ids[:-1])


class Replica:
    """Slots, pages and stored prompts of one replica.

    Attributes:
        shapes: The sizes of the programs.
        store: The pages.
        ready: Requests that hold their pages and wait for a slot.
        running: Requests by slot.
    """

    def __init__(self, shapes: Shapes, store: PageStore, burst: int):
        self.shapes, self.store = shapes, store
        self.ready: collections.deque[Running] = collections.deque()
        self.running: dict[int, Running] = {}
        self._burst = burst

    @property
    def load(self) -> int:
        """Requests that hold pages here."""
        return len(self.ready) + len(self.running)

    @property
    def free_slots(self) -> list[int]:
        """In ascending order."""
        return [slot for slot in range(self.shapes.slots) if slot not in self.running]

    def fits(self, waiting: Running) -> bool:
        """Whether there are pages for the whole length of a request."""
        return self.store.fits(waiting.prompt, self._own_pages(waiting.request))

    def stored_pages(self, waiting: Running) -> int:
        """How many of the pages of a request's prompt are here already."""
        return len(self.store.lookup(waiting.prompt))

    def hold(self, waiting: Running) -> list[PageNode]:
        """Gets a request ready that fits; returns the pages of its prompt that must be filled."""
        waiting.nodes, stored = self.store.hold(waiting.prompt)
        waiting.own = self.store.take(self._own_pages(waiting.request))
        self.ready.append(waiting)
        return waiting.nodes[stored:]

    def release(self, running: Running) -> None:
        """Frees the pages of a request that ended, was cancelled or goes back to wait."""
        self.store.release(running.nodes)
        self.store.give_back(running.own)
        running.nodes, running.own = [], []

    def cancel(self, uid: int) -> None:
        """Drops a request, if it is here."""
        for ready in [r for r in self.ready if r.uid == uid]:
            self.ready.remove(ready)
            self.release(ready)
        for slot in [slot for slot, run in self.running.items() if run.uid == uid]:
            self.release(self.running.pop(slot))

    def admit(self) -> dict[int, Running]:
        """Gives the free slots to requests that are ready: those of the next burst, by slot."""
        admitted = {}
        for slot in self.free_slots:
            if self.ready:
                admitted[slot] = self.running[slot] = self.ready.popleft()
        return admitted

    def plan(self, admitted: dict[int, Running], enough: int) -> Plan:
        """The next burst.

        Args:
            admitted: The requests that are new in it, by slot.
            enough: It ends early when so many requests have ended.
        """
        shapes = self.shapes
        plan, rows = empty_plan(shapes), {}
        for slot, running in self.running.items():
            plan.alive[slot] = True
            plan.own[slot, : len(running.own)] = running.own
            reached = pages_of(len(running.ids) + self._burst, shapes.page)
            rows[slot] = RowPages(running.nodes, running.own[:reached])
        new, sampling = plan.new, plan.new.sampling
        for slot, running in admitted.items():
            r = running.request
            plan.admit[slot] = new.active[slot] = True
            new.last[slot], new.prompt[slot] = r.prompt_ids[-1], len(r.prompt_ids) - 1
            new.limit[slot], sampling.temperature[slot] = r.max_tokens, r.temperature
            sampling.top_p[slot], sampling.top_k[slot] = r.top_p, r.top_k
            sampling.keys[slot] = r.key
        plan.enough[:] = enough
        return plan._replace(work=decode_work(rows, shapes))

    def _own_pages(self, request: Request) -> int:
        return pages_of(request.max_tokens, self.shapes.page)


def empty_plan(shapes: Shapes) -> Plan:
    """A burst of no request."""
    B = shapes.slots
    last, prompt, drawn, limit = (np.zeros(B, np.int32) for _ in range(4))
    sampling = Sampling(
        np.ones(B, np.float32), np.ones(B, np.float32), np.zeros(B, np.int32),
        np.zeros((B, 2), np.uint32),
    )  # fmt: skip
    return Plan(
        alive=np.zeros(B, bool),
        admit=np.zeros(B, bool),
        new=Slots(last, prompt, drawn, limit, np.zeros(B, bool), sampling),
        own=np.full((B, shapes.row_pages), UNUSED, np.int32),
        work=decode_work({}, shapes),
        enough=np.ones(1, np.int32),
    )
