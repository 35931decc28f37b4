"""Sharing and capacity in the engine: one prefill, the same bits, bounded memory, nothing stuck."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from srpo_jax.engine import Request, request_key
from tests.engine_cases import (
    CACHE,
    bits,
    checkpoint,
    drain,
    learner_logps,
    make_engine,
    new_request,
    prompt_of,
)


@pytest.fixture(scope="module")
def parts():
    return checkpoint("qwen3_tied")


@pytest.fixture(scope="module")
def unshared(parts):
    return make_engine(parts, sharing=False)


def members(prompt_ids, count, first=0, **options):
    options = {"max_tokens": 6} | options
    return [Request(prompt_ids, request_key(2, first + i), **options) for i in range(count)]


class TestSharing:
    def test_members_and_rollouts_of_one_prompt_are_prefilled_once(self, parts, unshared):
        engine = make_engine(parts)
        requests = members(prompt_of(51), 12)
        done = engine.run(requests)
        assert engine.stats["prefill_tokens"] == 50  # the last one is fed by the first decode step
        assert [bits(d) for d in done] == [bits(unshared.run([r])[0]) for r in requests]
        before = unshared.stats["prefill_tokens"]
        unshared.run(requests)
        assert unshared.stats["prefill_tokens"] == before + 12 * 50

    def test_roles_share_the_beginning_of_their_prompts(self, parts, unshared):
        engine = make_engine(parts)
        system = prompt_of(32)
        requests = [Request(system + prompt_of(9 + i, 1), request_key(3, i), 7) for i in range(5)]
        done = engine.run(requests)
        assert engine.stats["prefill_tokens"] == 32 + sum(8 + i for i in range(5))
        assert [bits(d) for d in done] == [bits(unshared.run([r])[0]) for r in requests]

    def test_a_later_call_finds_what_an_earlier_one_stored(self, parts, unshared):
        engine = make_engine(parts)
        history = prompt_of(48)
        (first,) = engine.run(members(history, 1))
        later = members([*history, *first.ids, 7, 8], 1, first=9)
        done = engine.run(later)
        assert engine.stats["prefill_tokens"] == 47 + (48 - 32) + 6 + 1  # 32 tokens are two pages
        assert bits(done[0]) == bits(unshared.run(later)[0])

    def test_new_weights_forget_the_store(self, parts):
        engine = make_engine(parts)
        (r,) = members(prompt_of(40), 1)
        engine.run([r])
        other = jax.tree.map(lambda a: a * 1.1, parts[2])
        engine.set_weights(other, 1)
        (done,) = engine.run([r])
        assert engine.stats["prefill_tokens"] == 2 * 39
        assert bits(done) == bits(make_engine((*parts[:2], other), version=1).run([r])[0])

    def test_six_requests_of_one_long_prompt_before_and_after_new_weights(self, parts):
        engine, requests = make_engine(parts), members(prompt_of(90), 6, max_tokens=6)
        before = engine.run(requests)
        other = jax.tree.map(lambda a: a * 1.1, parts[2])
        engine.set_weights(other, 1)
        after = engine.run(requests)
        assert engine.stats["prefill_tokens"] == 2 * 89
        fresh = make_engine((*parts[:2], other), version=1).run(requests)
        assert [bits(d) for d in after] == [bits(d) for d in fresh]
        assert not {d.logps.tobytes() for d in before} & {d.logps.tobytes() for d in after}

    def test_requests_that_were_made_ready_are_prepared_again(self, parts):
        """Their prompts were computed under the old weights."""
        engine = make_engine(parts, slots=1)
        uids = [engine.submit(r) for r in members(prompt_of(40), 2, max_tokens=20)]
        engine.step()
        engine.cancel(uids[0])
        other = jax.tree.map(lambda a: a * 1.1, parts[2])
        engine.set_weights(other, 1)
        done = drain(engine)
        fresh = make_engine((*parts[:2], other), slots=1, version=1)
        expected = fresh.run(members(prompt_of(40), 2, max_tokens=20)[1:])
        assert list(done) == uids[1:] and bits(done[uids[1]]) == bits(expected[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slot_counts_and_sharing_agree(parts, temperature):
    """Log-probs to 1e-5, and no token of these differs."""
    requests = [
        Request(prompt_of(20 + 9 * (i // 4)), request_key(4, i), 10, temperature) for i in range(16)
    ]
    runs = [
        make_engine(parts, slots=slots, sharing=sharing).run(requests)
        for slots, sharing in ((7, True), (7, False), (1, True), (32, True), (32, False))
    ]
    assert [bits(d) for d in runs[0]] == [bits(d) for d in runs[1]]
    assert [bits(d) for d in runs[3]] == [bits(d) for d in runs[4]]
    for run in runs[2:4]:
        for one, other in zip(runs[0], run, strict=True):
            assert one.ids == other.ids
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


class TestBudget:
    def test_requests_wait_for_memory_and_keep_their_bits(self, parts, unshared):
        """Room for two of the eight slots' requests, counted in pages of 16 tokens."""
        engine = make_engine(parts, slots=8, budget_tokens=2 * 7 * 16)
        roomy = make_engine(parts, slots=8)
        requests = [new_request(i, 60, max_tokens=36) for i in range(6)]
        for r in requests:
            engine.submit(r)
        most = 0
        done = {}
        while not engine.idle:
            done.update(engine.step())
            most = max(most, len(engine._replicas[0].running))
        assert most == 2
        assert [bits(done[uid]) for uid in sorted(done)] == [bits(d) for d in roomy.run(requests)]

    def test_short_requests_need_little(self, parts):
        engine = make_engine(parts, slots=8, budget_tokens=2 * 7 * 16)
        for i in range(8):
            engine.submit(new_request(i, 1, max_tokens=30))  # two pages: fourteen fit seven
        engine.step()
        assert len(engine._replicas[0].running) == 7
        drain(engine)

    def test_a_budget_below_one_request(self, parts):
        with pytest.raises(
            ValueError, match="a cache of 100 tokens is too small: one request of 96 needs"
        ):
            make_engine(parts, budget_tokens=100)

    def test_ten_thousand_requests(self, parts):
        engine = make_engine(parts, slots=32, burst=2, budget_tokens=24 * 16, store_tokens=48)
        shared = [prompt_of(18, i) for i in range(50)]
        uids = [
            engine.submit(Request(shared[i // 200], request_key(5, i), 1 + i % 2))
            for i in range(10_000)
        ]
        for uid in uids[::3]:
            engine.cancel(uid)
        done = drain(engine)
        assert sorted(done) == sorted(set(uids) - set(uids[::3]))
        assert engine._replicas[0].store.available == 24 and engine._replicas[0].store.stored <= 3

    def test_cancelled_requests_give_their_pages_back(self, parts):
        engine = make_engine(parts, budget_tokens=3 * 7 * 16, store_tokens=0)
        for _ in range(3):
            uids = [engine.submit(new_request(i, 40, max_tokens=40)) for i in range(9)]
            engine.step()
            for uid in uids:
                engine.cancel(uid)
            assert engine.idle and engine._replicas[0].store.available == 3 * 7


def test_top_log_probs(parts):
    """The best ids of every step, by the learner's log-probs of all ids at that place."""
    engine = make_engine(parts)
    r = new_request(0, 20, max_tokens=5, top_logps=3)
    others = [new_request(1, 9, max_tokens=7), new_request(2, 30, max_tokens=3, top_logps=1)]
    done, bare, one = engine.run([r, *others])
    assert bare.top_ids is None and bare.top_logps is None
    assert one.top_ids.shape == (3, 1) and done.top_logps.shape == (5, 3)
    for step in range(5):
        every = [
            learner_logps(parts, [*r.prompt_ids, *done.ids[:step]], [token], 1.0)[0]
            for token in range(60)
        ]
        order = np.argsort(every)[::-1][:3]
        assert done.top_ids[step].tolist() == order.tolist()
        np.testing.assert_allclose(done.top_logps[step], np.array(every)[order], atol=1e-4)
    assert bits(done)[:2] == bits(engine.run([replace(r, top_logps=0)])[0])[:2]
    with pytest.raises(ValueError, match="top_logps must be from 0 to 20, got 21"):
        engine.submit(replace(r, top_logps=21))


def test_half_precision_is_an_option(parts):
    r = new_request(0, 40, max_tokens=CACHE - 40)
    exact = make_engine(parts).run([r])[0]
    done = make_engine(parts, dtype="bfloat16").run([r])[0]
    assert done.logps.dtype == np.float32 and not np.array_equal(done.logps, exact.logps)
    expected = learner_logps(parts, r.prompt_ids, done.ids, 1.0)
    assert 1e-5 < np.abs(done.logps - expected).mean() < 0.1
