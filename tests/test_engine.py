"""The engine: same bits in any company, the learner's log-probs, greedy parity, stops and slots."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen import Qwen, split_params
from models.tiny import tiny_config
from srpo_jax.engine import PromptTooLong, request_key
from tests.engine_cases import (
    CACHE,
    LONGEST,
    VOCAB,
    Letters,
    bits,
    checkpoint,
    drain,
    learner_logps,
    make_engine,
    new_request,
    text,
)
from tests.make_golden import CASES, GOLDEN


@pytest.fixture(scope="module")
def parts():
    return checkpoint("qwen3_tied")


@pytest.fixture(scope="module")
def shared(parts):
    """One engine without stop ids, compiled once."""
    return make_engine(parts)


@pytest.fixture
def engine(shared):
    yield shared
    assert shared.idle


class TestIdentity:
    def test_request_keys_are_stable(self):
        assert request_key(1, 0, 5, 2, 3, 1, 0) == (2968696380, 1370316581)

    def test_request_keys_differ_in_every_part(self):
        base = [1, 0, 5, 2, 3, 1, 0]
        keys = {request_key(*base)}
        for i in range(len(base)):
            keys.add(request_key(*base[:i], base[i] + 1, *base[i + 1 :]))
        keys.add(request_key(*base[:-1]))
        keys.add(request_key(*reversed(base)))
        assert len(keys) == 10
        assert all(0 <= word < 2**32 for key in keys for word in key)

    def test_large_seeds_are_not_cut(self):
        assert request_key(2**40) != request_key(0)


TARGETS = (
    new_request(100, length=5, max_tokens=14),
    new_request(101, length=33, max_tokens=9, temperature=0.7),
    new_request(102, length=20, max_tokens=11, temperature=0.0),
    new_request(103, length=LONGEST, max_tokens=32, temperature=1.3),
)


@pytest.fixture(scope="module")
def alone(shared):
    """What each target gives when nothing else runs."""
    results = [bits(shared.run([target])[0]) for target in TARGETS]
    assert len({tuple(ids) for ids, *_ in results}) == len(results)
    return results


class TestSameBits:
    """At fixed slots a result depends on its request alone."""

    @pytest.mark.parametrize("slot", range(4))
    def test_in_every_slot(self, engine, alone, slot):
        for target, expected in zip(TARGETS, alone, strict=True):
            others = [new_request(i, length=3 + 9 * i, max_tokens=20) for i in range(slot)]
            assert bits(engine.run([*others, target])[-1]) == expected

    @pytest.mark.parametrize("seed", range(6))
    def test_among_others_in_any_order(self, engine, alone, seed):
        rng = np.random.default_rng(seed)
        others = [
            new_request(i, int(rng.integers(1, LONGEST)), int(rng.integers(1, 30)),
                    temperature=float(rng.choice([0.0, 0.5, 1.0])))
            for i in range(15)
        ]  # fmt: skip
        batch = [*TARGETS, *others]
        order = rng.permutation(len(batch))
        results = engine.run([batch[i] for i in order])
        by_index = {int(i): result for i, result in zip(order, results, strict=True)}
        assert [bits(by_index[i]) for i in range(len(TARGETS))] == alone

    @pytest.mark.parametrize("steps", range(1, 4))
    def test_admitted_while_others_run(self, engine, alone, steps):
        for i in range(3):
            engine.submit(new_request(i, length=11 * (i + 1), max_tokens=32))
        for _ in range(steps):
            engine.step()
        uids = [engine.submit(target) for target in TARGETS]
        gone = engine.submit(new_request(7, max_tokens=30))
        engine.step()
        engine.cancel(gone)
        done = drain(engine)
        assert [bits(done[uid]) for uid in uids] == alone

    def test_the_same_request_twice_at_once(self, engine, alone):
        results = engine.run([TARGETS[0]] * 4)
        assert [bits(result) for result in results] == [alone[0]] * 4

    def test_beside_truncated_requests(self, engine, alone):
        others = [new_request(i, max_tokens=20, top_p=0.8, top_k=5) for i in range(3)]
        for target, expected in zip(TARGETS, alone, strict=True):
            assert bits(engine.run([*others, target])[-1]) == expected

    @pytest.mark.parametrize("slots, page", [(1, 64), (3, 32), (5, 8), (8, 16)])
    def test_at_other_shapes(self, slots, page):
        """A wider model and odd slot counts, where kernels treat some rows apart."""
        model = Qwen(replace(tiny_config(200), num_layers=2), rngs=nnx.Rngs(0))
        engine = make_engine(
            (model.config, *split_params(model)), slots=slots, vocab=200, page=page
        )
        batch = [new_request(i, 1 + (13 * i) % 64, 1 + (5 * i) % 17) for i in range(12)]
        alone = [bits(engine.run([r])[0]) for r in batch]
        together = engine.run(batch)
        backwards = engine.run(batch[::-1])[::-1]
        assert [bits(r) for r in together] == alone
        assert [bits(r) for r in backwards] == alone

    def test_keys_make_the_difference(self, engine):
        first = new_request(0)
        results = engine.run([replace(first, key=request_key(9, i)) for i in range(8)])
        assert len({tuple(result.ids) for result in results}) == 8


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_the_learners(parts, engine, temperature):
    """Prompts of several lengths share a prefill: each row keeps its own positions (case S19)."""
    lengths = (1, 3, 5, 31, 32, 33, 48, LONGEST)
    requests = [
        new_request(i, length, max_tokens=8 + 3 * (i % 3), temperature=temperature)
        for i, length in enumerate(lengths)
    ]
    gaps, wrong = [], []
    for r, done in zip(requests, engine.run(requests), strict=True):
        assert done.logps.dtype == np.float32 and done.logps.shape == (r.max_tokens,)
        expected = learner_logps(parts, r.prompt_ids, done.ids, temperature)
        gaps.append(np.abs(done.logps - expected))
        wrong.append(np.abs(done.logps - learner_logps(parts, r.prompt_ids, done.ids, 1.2)))
    assert np.concatenate(gaps).mean() < 1e-5
    assert max(gap.max() for gap in gaps) < 1e-4
    assert np.concatenate(wrong).mean() > 1e-2  # another temperature is seen


def test_sampled_ids_lie_below_the_vocabulary(parts):
    """Case S18: the largest logits belong to rows that no tokenizer knows."""
    config, graphdef, params = parts
    embedding = params["embed"]["embedding"]
    spoilt = {**params, "embed": {"embedding": embedding.at[VOCAB:].multiply(30.0)}}
    engine = make_engine((config, graphdef, spoilt))
    requests = [new_request(i, max_tokens=16, temperature=t) for i in range(6) for t in (0.0, 1.0)]
    done = engine.run(requests)
    assert max(max(d.ids) for d in done) < VOCAB
    expected = learner_logps((config, graphdef, spoilt), requests[1].prompt_ids, done[1].ids, 1.0)
    np.testing.assert_allclose(done[1].logps, expected, atol=1e-4)
    blind = make_engine((config, graphdef, spoilt), vocab=64).run(requests[:2])
    assert max(max(d.ids) for d in blind) >= VOCAB


@functools.partial(jax.jit, static_argnums=0)
def _next_token(graphdef, params, tokens, at):
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = model(tokens, positions, (positions <= at).astype(jnp.int32))
    return jnp.argmax(model.logits(hidden[0, at]))


def greedy_reference(parts, prompt_ids, steps, stop_ids):
    """No cache, and the whole sequence anew for every token."""
    tokens = np.zeros((1, CACHE), np.int32)
    tokens[0, : len(prompt_ids)] = prompt_ids
    ids = []
    while len(ids) < steps and not (ids and ids[-1] in stop_ids):
        at = len(prompt_ids) + len(ids)
        ids.append(int(_next_token(*parts[1:], tokens, at - 1)))
        tokens[0, at] = ids[-1]
    return ids


GREEDY_STOPS = (3, 17, 29)


@pytest.fixture(params=CASES, scope="module")
def greedy(request):
    """(name, parts, requests, completions) of one checkpoint."""
    parts = checkpoint(request.param)
    engine = make_engine(parts, vocab=64, stop_ids=GREEDY_STOPS)
    requests = [new_request(i, n, 30, temperature=0.0) for i, n in enumerate((2, 19, 40, 63, 64))]
    return request.param, parts, requests, engine.run(requests)


def test_greedy_equals_a_loop_without_a_cache(greedy):
    _, parts, requests, completions = greedy
    assert max(len(done.ids) for done in completions) > 5
    for r, done in zip(requests, completions, strict=True):
        assert done.ids == greedy_reference(parts, r.prompt_ids, r.max_tokens, GREEDY_STOPS)


def test_greedy_equals_transformers_generate(greedy):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    name, _, requests, completions = greedy
    reference = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    for r, done in zip(requests, completions, strict=True):
        tokens = torch.tensor([r.prompt_ids])
        output = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=r.max_tokens, eos_token_id=list(GREEDY_STOPS), pad_token_id=0,
        )  # fmt: skip
        assert done.ids == output[0, len(r.prompt_ids) :].tolist()


REQUESTS = tuple(new_request(i, length=1 + 5 * i, max_tokens=1 + 2 * i) for i in range(12))


@pytest.fixture(scope="module")
def free(shared):
    """What the requests give without stop ids."""
    return shared.run(REQUESTS)


class TestStops:
    def test_length_limit(self, free):
        assert [len(done.ids) for done in free] == [r.max_tokens for r in REQUESTS]
        assert {done.stop_reason for done in free} == {"length"}

    def test_union_of_stop_ids(self, parts, free):
        """The first stop token is kept and nothing after it, whichever stop id it is (case S08)."""
        stops = (free[3].ids[0], free[5].ids[4], free[8].ids[-1])
        engine = make_engine(parts, stop_ids=stops)
        reasons = []
        for r, whole, done in zip(REQUESTS, free, engine.run(REQUESTS), strict=True):
            ends = [i for i, token in enumerate(whole.ids) if token in stops]
            n = ends[0] + 1 if ends else r.max_tokens
            assert done.ids == whole.ids[:n]
            assert done.logps.tobytes() == whole.logps[:n].tobytes()
            assert done.stop_reason == ("stop" if ends else "length")
            reasons.append(done.stop_reason)
        assert reasons[3] == reasons[5] == reasons[8] == "stop" and "length" in reasons

    def test_stop_ids_inside_the_prompt_are_no_stop(self, parts, free):
        """Also where padding has the same id (case S09): lengths count, not values."""
        whole = free[4]
        stop = next(i for i in range(VOCAB) if i not in whole.ids)
        r = replace(REQUESTS[4], prompt_ids=[stop, 4, stop, 5, stop, stop])
        bare = make_engine(parts).run([r])[0]
        end = bare.ids.index(stop) + 1 if stop in bare.ids else len(bare.ids)
        done = make_engine(parts, stop_ids=[stop]).run([r])[0]
        assert done.ids == bare.ids[:end] and done.ids
        expected = learner_logps(parts, r.prompt_ids, done.ids, 1.0)
        np.testing.assert_allclose(done.logps, expected, atol=1e-4)

    @pytest.mark.parametrize("start, width", [(0, 1), (0, 3), (3, 2), (2, 5), (9, 1), (10, 1)])
    def test_stop_strings_end_with_the_completing_token(self, engine, free, start, width):
        whole, r = free[5], REQUESTS[5]
        string = text(whole.ids[start : start + width])
        end = text(whole.ids).index(string) + width
        done = engine.run([replace(r, stop_strings=("never there", string))])[0]
        assert done.ids == whole.ids[:end]
        assert done.logps.tobytes() == whole.logps[:end].tobytes()
        assert done.stop_reason == "stop"

    def test_the_earliest_of_several_stop_strings(self, engine, free):
        whole = free[6]
        late, early = text(whole.ids[7:9]), text(whole.ids[2:4])
        done = engine.run([replace(REQUESTS[6], stop_strings=(late, early))])[0]
        assert text(done.ids).endswith(early) and len(done.ids) == 4

    def test_a_string_of_the_prompt_is_no_stop(self, engine, free):
        r = REQUESTS[6]
        string = text(r.prompt_ids[3:6])
        assert string not in text(free[6].ids)
        assert engine.run([replace(r, stop_strings=(string,))])[0].ids == free[6].ids

    def test_a_special_token_is_a_stop_string(self, parts, free):
        """Its text is not in the response's, which leaves special tokens out."""
        whole = free[6].ids
        at = next(i for i in range(2, len(whole)) if whole[i] not in whole[:i])
        tokenizer = Letters(special=[whole[at]])
        engine = make_engine(parts, tokenizer=tokenizer)
        (name,) = tokenizer.special_tokens
        for string in (name, text(whole[at - 1 : at]) + name):
            done = engine.run([replace(REQUESTS[6], stop_strings=("never there", string))])[0]
            assert (done.ids, done.stop_reason) == (whole[: at + 1], "stop")

    def test_a_stop_id_and_a_stop_string_in_one_burst(self, parts, free):
        whole = free[7]
        end = next(i for i in range(4, 14) if whole.ids[i] not in whole.ids[:i])
        engine = make_engine(parts, stop_ids=[whole.ids[end]], burst=16)
        before, after = text(whole.ids[1:3]), text(whole.ids[end + 1 : end + 3])
        for string, length in ((before, 3), (after, end + 1)):
            done = engine.run([replace(REQUESTS[7], stop_strings=(string,))])[0]
            assert (done.ids, done.stop_reason) == (whole.ids[:length], "stop")

    def test_a_burst_ends_when_its_last_request_does(self, parts):
        engine = make_engine(parts, burst=32)
        engine.run([new_request(0, max_tokens=6), new_request(1, max_tokens=3)])
        assert engine.stats["decode_steps"] == 6
        assert engine.stats["decode_tokens"] == 6 + 3


def decode_steps_of(engine, r):
    before = engine.stats["decode_steps"]
    engine.run([r])
    return engine.stats["decode_steps"] - before


class TestSlots:
    def test_a_prompt_too_long(self, engine):
        with pytest.raises(PromptTooLong, match=r"prompt has 85 tokens; the limit is 84\b"):
            engine.submit(new_request(length=85, max_tokens=12))
        with pytest.raises(PromptTooLong, match="0 tokens"):
            engine.submit(replace(new_request(), prompt_ids=[]))
        assert engine.idle

    def test_a_request_that_just_fits(self, parts, engine):
        """All cache positions are used, and those of a bucket's padding too."""
        r = new_request(0, length=CACHE - 12, max_tokens=12)
        done = engine.run([r])[0]
        expected = learner_logps(parts, r.prompt_ids, done.ids, 1.0)
        np.testing.assert_allclose(done.logps, expected, atol=1e-4)

    def test_a_stop_string_frees_its_slot(self, engine):
        r = new_request(0, max_tokens=60)
        whole = engine.run([r])[0]
        stopped = replace(r, stop_strings=(text(whole.ids[:3]),))
        engine.run([new_request(1, max_tokens=2), stopped])  # the second slot's
        assert decode_steps_of(engine, new_request(1, max_tokens=2)) == 2

    def test_cancel_frees_slots(self, engine):
        expected = bits(engine.run([new_request(9)])[0])
        uids = [engine.submit(new_request(i, max_tokens=60)) for i in range(6)]
        engine.step()
        for uid in uids:  # four run, two wait
            engine.cancel(uid)
        assert engine.idle and engine.step() == []
        assert decode_steps_of(engine, new_request(1, max_tokens=2)) == 2
        assert bits(engine.run([new_request(9)])[0]) == expected

    @pytest.mark.parametrize("slots", [2, 4, 8])
    def test_a_long_response_holds_up_no_short_ones(self, parts, slots):
        engine = make_engine(parts, slots=slots)
        long = engine.submit(new_request(0, max_tokens=80))
        short = [engine.submit(new_request(i, max_tokens=2)) for i in range(1, 3 * slots)]
        order = []
        while not engine.idle:
            order += [uid for uid, _ in engine.step()]
        assert order[-1] == long and sorted(order[:-1]) == short
        assert engine.stats["decode_steps"] == 80

    def test_cancel_of_what_is_gone_does_nothing(self, engine):
        uid = engine.submit(new_request(0))
        drain(engine)
        engine.cancel(uid)
        engine.cancel(10**9)

    def test_many_requests_through_few_slots_compile_nothing_new(self, parts):
        engine = make_engine(parts, stop_ids=[5, 6], slots=4)
        engine.run([new_request(0, n, 3) for n in (1, 40, LONGEST)])
        uid = engine.submit(new_request(0, max_tokens=60))
        engine.step()
        engine.cancel(uid)
        drain(engine)
        engine.set_weights(parts[2], 1)
        warm = engine.compile_count()
        assert warm > 0
        rng = np.random.default_rng(0)
        requests = [
            new_request(
                i,
                int(rng.integers(1, LONGEST + 1)),
                int(rng.integers(1, 9)),
                top_p=0.9 if i % 50 == 7 else 1.0,
                top_k=5 if i % 50 == 9 else 0,
            )
            for i in range(500)
        ]
        done = engine.run(requests)
        assert engine.compile_count() == warm
        assert engine.idle
        assert {d.stop_reason for d in done} == {"stop", "length"}
        for r, d in zip(requests, done, strict=True):
            assert len(d.ids) == len(d.logps) <= r.max_tokens
            assert (d.ids[-1] in (5, 6)) == (d.stop_reason == "stop")
            assert d.stop_reason == "stop" or len(d.ids) == r.max_tokens
        assert engine.stats["prompt_tokens"] >= sum(len(r.prompt_ids) for r in requests)


class TestWeights:
    @pytest.fixture
    def other(self, parts):
        return jax.tree.map(lambda a: a * 1.1, parts[2])

    def test_running_requests_keep_their_weights(self, parts, other):
        engine = make_engine(parts)
        engine.submit(new_request(0))
        engine.step()
        with pytest.raises(RuntimeError, match="1 requests are running"):
            engine.set_weights(other, 1)
        assert engine.version == 0
        (done,) = drain(engine).values()
        assert done.version == 0

    def test_dropped_memory_comes_back_with_the_weights(self, parts):
        engine, request = make_engine(parts), new_request(0)
        before = engine.run([request])[0]
        held = jax.tree.leaves((engine._weights, engine._state))
        size, count = sum(x.nbytes for x in held), len(held)
        del held
        live = sum(x.nbytes for x in jax.live_arrays())
        engine.drop()
        assert live - sum(x.nbytes for x in jax.live_arrays()) >= 0.99 * size and count > 20
        engine.submit(request)
        engine.set_weights(parts[2], 1)
        (after,) = drain(engine).values()
        assert bits(after)[:3] == bits(before)[:3] and (before.version, after.version) == (0, 1)

    def test_versions(self, parts, other):
        engine = make_engine(parts, version=3)
        r = new_request(0)
        before = engine.run([r])[0]
        engine.set_weights(other, 7)
        after = engine.run([r])[0]
        assert (before.version, after.version) == (3, 7)
        fresh = make_engine((*parts[:2], other), version=7).run([r])[0]
        assert bits(after) == bits(fresh)
        assert not np.array_equal(before.logps, after.logps)
        engine.set_weights(parts[2], 3)
        assert bits(engine.run([r])[0]) == bits(before)
