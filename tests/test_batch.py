"""Events as padded rows: what lies where, what is refused, and that nothing gets lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_jax.events import Event, Member
from srpo_jax.learner.batch import best_fit, bucket, build_batch
from tests.learner_cases import advantages_of, events_of


def member(index, prompt, response):
    return Member(
        role=f"solver_{index + 1}", policy="policy", version=0, prompt_ids=prompt,
        response_ids=response, logps=-np.asarray(response, np.float32) / 10, index=index,
    )  # fmt: skip


def event(name, *members):
    return Event(name, "ep", "t", "solve", 0, "s", len(members), members, 1.0)


PAIR = event("pair", member(0, [11, 12], [1, 2, 3]), member(1, [11, 13, 14], [4]))
SINGLE = event("single", member(0, [15], [5, 6]))


def test_a_batch_by_hand():
    batch = build_batch(
        [PAIR, SINGLE], [np.array([2.0, 1.0]), np.array([-3.0])],
        micro_batch_rows=2, max_tokens=64, min_tokens=6,
    )  # fmt: skip
    assert batch.shape == (2, 2, 6, 8)  # 3 rows in 2 micro-batches, 5 tokens in 6, 2 events in 8
    np.testing.assert_array_equal(
        batch.tokens.reshape(4, 6),
        [[11, 12, 1, 2, 3, 0], [11, 13, 14, 4, 0, 0], [15, 5, 6, 0, 0, 0], [0] * 6],
    )
    np.testing.assert_array_equal(
        batch.loss_mask.reshape(4, 6),
        [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0] * 6],
    )
    np.testing.assert_array_equal(
        batch.segment_ids.reshape(4, 6),
        [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6],
    )
    np.testing.assert_allclose(
        batch.sampler_logp.reshape(4, 6),
        [[0, 0, -0.1, -0.2, -0.3, 0], [0, 0, 0, -0.4, 0, 0], [0, -0.5, -0.6, 0, 0, 0], [0] * 6],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(
        batch.positions.reshape(4, 6),
        [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0], [0] * 6],
    )
    np.testing.assert_array_equal(
        batch.token_row.reshape(4, 6),
        [[0, 0, 0, 0, 0, 16], [1, 1, 1, 1, 16, 16], [2, 2, 2, 16, 16, 16], [16] * 6],
    )
    np.testing.assert_array_equal(batch.row_event, [0, 0, 1] + [8] * 13)
    np.testing.assert_array_equal(batch.row_advantage, [2, 1, -3] + [0] * 13)
    np.testing.assert_array_equal(batch.event_tokens, [4, 2] + [0] * 6)
    np.testing.assert_array_equal(batch.event_size, [2, 1] + [0] * 6)
    np.testing.assert_array_equal(batch.event_advantage, [1.5, -3] + [0] * 6)
    assert (batch.num_events, batch.num_tokens) == (2, 6)
    ints = (batch.tokens, batch.positions, batch.segment_ids, batch.row_event, batch.event_size)
    assert {x.dtype for x in ints} == {np.dtype(np.int32)}
    floats = (batch.sampler_logp, batch.row_advantage, batch.event_advantage)
    assert {x.dtype for x in floats} == {np.dtype(np.float32)} and batch.loss_mask.dtype == bool


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), max_size=12), rows=st.integers(1, 9), seed=st.integers(0, 9)
)
def test_every_event_row_and_token_is_in_the_batch_once(sizes, rows, seed):
    events = events_of(tuple(sizes), seed)
    batch = build_batch(events, advantages_of(events), micro_batch_rows=rows, max_tokens=64)
    M, S, T, E = batch.shape
    assert M * S >= sum(sizes) and len(batch.row_event) >= sum(sizes) and S == rows
    members = [m for e in events for m in e.members]
    tokens, masks = batch.tokens.reshape(-1, T), batch.loss_mask.reshape(-1, T)
    for r, m in enumerate(members):
        assert tokens[r][batch.segment_ids.reshape(-1, T)[r] == 1].tolist() == [
            *m.prompt_ids, *m.response_ids,
        ]  # fmt: skip
        assert tokens[r][masks[r]].tolist() == m.response_ids
        np.testing.assert_array_equal(batch.sampler_logp.reshape(-1, T)[r][masks[r]], m.logps)
    assert not masks[len(members) :].any() and (batch.row_event[len(members) :] == E).all()
    counted = np.bincount(batch.row_event, minlength=E + 1)[:E]
    np.testing.assert_array_equal(counted, batch.event_size)
    assert batch.num_events == len(events) and batch.event_size[: len(events)].tolist() == sizes
    assert batch.num_tokens == sum(len(m.response_ids) for m in members)


def test_rows_share_a_sequence_by_hand():
    batch = build_batch(
        [PAIR, SINGLE], [np.array([2.0, 1.0]), np.array([-3.0])],
        micro_batch_rows=1, max_tokens=64, sequence_tokens=8, min_tokens=4,
    )  # fmt: skip
    # Rows of 5, 4 and 3 tokens: the longest and the shortest fill one sequence, 4 tokens are left.
    assert batch.tokens.shape == (2, 1, 8)
    np.testing.assert_array_equal(
        batch.tokens[:, 0], [[11, 12, 1, 2, 3, 15, 5, 6], [11, 13, 14, 4, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.segment_ids[:, 0], [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.positions[:, 0], [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0, 0]]
    )
    R = len(batch.row_event)
    np.testing.assert_array_equal(
        batch.token_row[:, 0], [[0, 0, 0, 0, 0, 2, 2, 2], [1, 1, 1, 1, R, R, R, R]]
    )
    assert batch.row_event[:3].tolist() == [0, 0, 1] and (batch.row_event[3:] == 8).all()
    assert (batch.used_micro_batches, batch.fill) == (2, 12 / 16)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_places_every_row_once_within_capacity(seed):
    lengths = np.random.default_rng(seed).integers(1, 65, 200).tolist()
    bins = best_fit(lengths, 64)
    assert sorted(r for rows in bins for r in rows) == list(range(200))
    assert max(sum(lengths[r] for r in rows) for rows in bins) <= 64
    assert len(bins) <= 1.25 * -(-sum(lengths) // 64)
    with pytest.raises(ValueError, match="a row has 65 tokens, a sequence 64"):
        best_fit([65], 64)


def test_an_incomplete_event_is_refused():
    shrunk = replace(PAIR, members=PAIR.members[:1])
    with pytest.raises(ValueError, match="event pair: 1 of 2 members"):
        build_batch([shrunk], [np.ones(1)], micro_batch_rows=2, max_tokens=64)


def test_a_row_beyond_the_limit_is_refused_and_one_at_it_is_not():
    arguments = {"micro_batch_rows": 2, "min_tokens": 4}
    assert build_batch([PAIR], [np.ones(2)], max_tokens=5, **arguments).tokens.shape[2] == 5
    with pytest.raises(ValueError, match="a row has 5 tokens, the limit is 4"):
        build_batch([PAIR], [np.ones(2)], max_tokens=4, **arguments)


def test_an_advantage_for_every_member_is_due():
    with pytest.raises(ValueError):
        build_batch([PAIR], [np.ones(1)], micro_batch_rows=2, max_tokens=64)


def test_buckets():
    assert [bucket(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [bucket(n, 32) for n in (0, 1, 32, 33, 48, 49, 65, 97)] == [
        32, 32, 32, 48, 48, 64, 96, 128,
    ]  # fmt: skip


@given(n=st.integers(1, 10_000), floor=st.integers(1, 64))
def test_a_bucket_holds_n_and_wastes_less_than_half(n, floor):
    size = bucket(n, floor)
    assert size >= n and bucket(size, floor) == size
    assert size == floor or size < 2 * n
