"""The device programs of an update, as functions of abstract parameters.

They are built from shapes alone, so that they can be compiled for devices that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from models.attention.select import attention_on
from models.backward import add_gradients
from models.partition import Placement, tree_shardings
from models.qwen import REMAT_POLICIES, Forward
from srpo_jax.learner.logprob import TokenScores, Vocabulary, token_gradients, token_scores
from srpo_jax.learner.optimizer import apply_by_leaf, opt_state_shardings
from srpo_jax.learner.sharding import batch_sharding, replicated
from srpo_jax.objective import ObjectiveMetrics, setwise_objective
from srpo_jax.objective_config import ObjectiveConfig


@dataclass(frozen=True)
class LearnerSettings:
    """What an update computes, and how.

    vocab_size     the tokenizer's length: ids past it are masked
    temperature    of the sampler, whose distribution the log-probs are of
    dtype          of the computation; parameters, moments and sums keep their own
    remat          a name of ``models.qwen.REMAT_POLICIES``
    attention      a name of ``models.attention.select.ATTENTION_FORMS``
    logprob_chunk  tokens at a time in the vocabulary stage; None: chosen by ``chunk_tokens``
    """

    objective: ObjectiveConfig
    vocab_size: int
    temperature: float = 1.0
    dtype: Any = jnp.float32
    remat: str = "none"
    attention: str = "auto"
    logprob_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"remat {self.remat!r} is not one of {', '.join(REMAT_POLICIES)}")


class TrainState(NamedTuple):
    """What an update changes: parameters, optimiser state, and the count of applied updates."""

    params: dict
    opt_state: Any
    updates: jax.Array


class TokenArrays(NamedTuple):
    """The tokens of a batch on the mesh, [M, S, T] each; S is sharded over (data, fsdp)."""

    tokens: jax.Array  # int32
    positions: jax.Array  # int32
    segment_ids: jax.Array  # int32
    loss_mask: jax.Array  # bool
    sampler_logp: jax.Array  # float32
    token_row: jax.Array  # int32


class EventArrays(NamedTuple):
    """The rows [R] and events [E] of a batch, on every device whole."""

    row_event: jax.Array
    row_advantage: jax.Array
    row_role: jax.Array
    event_size: jax.Array
    event_advantage: jax.Array
    skipped: jax.Array  # [3] int32: events, members and tokens that only the divisors count


class TokenWeights(NamedTuple):
    """d loss / d log-prob and d loss / d entropy, [M, S, T], and the tokens that take part."""

    logp: jax.Array
    entropy: jax.Array
    keep: jax.Array  # bool: False for tokens of events with a non-finite log-prob


class Accumulated(NamedTuple):
    """Sums over the micro-batches of one update."""

    grads: dict
    gap_sum: jax.Array  # sum of |learner - sampler| log-prob over generated tokens
    weighted_logp: jax.Array  # sum of (d loss / d log-prob) * log-prob over them


class Programs(NamedTuple):
    """Jitted functions; M counts the micro-batches of a batch, ``used`` those that hold rows.

    score(params, tokens, used) -> TokenScores [M, S, T]
    weigh(scores, old_logp, reference_logp | None, tokens, events)
        -> (TokenWeights, ObjectiveMetrics, number of events dropped as not finite)
    accumulate(params, tokens, weights, used) -> Accumulated
    apply(state, sums, live_events) -> (state, gradient norm, applied); ``state`` is donated
    """

    score: Any
    weigh: Any
    accumulate: Any
    apply: Any


class Shardings(NamedTuple):
    """Where everything lies on the mesh."""

    state: TrainState
    tokens: jax.sharding.NamedSharding
    whole: jax.sharding.NamedSharding


def state_shardings(mesh: Mesh, params: dict, optimizer: optax.GradientTransformation) -> Shardings:
    """``params``: arrays or ShapeDtypeStructs. Moments take the sharding of their parameter."""
    shardings, whole = tree_shardings(mesh, params), replicated(mesh)
    opt_shardings = opt_state_shardings(optimizer, params, shardings, whole)
    state = TrainState._make((shardings, opt_shardings, whole))
    return Shardings(state, batch_sharding(mesh), whole)


def build_programs(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    settings: LearnerSettings,
    shardings: Shardings,
) -> Programs:
    """The programs of a learner; nothing is traced before a program is called or lowered."""
    objective = settings.objective
    forward = Forward(
        dtype=settings.dtype,
        remat=settings.remat,
        attention=attention_on(mesh, settings.attention),
        placement=Placement(mesh) if mesh.size > 1 else None,
    )
    vocabulary = Vocabulary(
        vocab_size=settings.vocab_size,
        temperature=settings.temperature,
        chunk=settings.logprob_chunk,
        with_entropy=bool(objective.entropy_coef),
        mesh=mesh,
    )

    def score(params, tokens: TokenArrays, used):
        model = nnx.merge(graphdef, params)

        def one(m, scores):
            micro = jax.tree.map(lambda x: x[m], tokens)
            hidden = model(micro.tokens, micro.positions, micro.segment_ids, forward=forward)
            head, axis = model.head()
            new = token_scores(hidden, micro.tokens, micro.loss_mask, head, axis, vocabulary)
            return jax.tree.map(lambda all, x: all.at[m].set(x), scores, new)

        return jax.lax.fori_loop(0, used, one, _no_scores(tokens, settings.dtype))

    def accumulate(params, tokens: TokenArrays, weights: TokenWeights, used):
        def one(m, sums):
            # A dropped event's rows become padding: a weight of 0 alone would give 0 * NaN.
            micro, w = jax.tree.map(lambda x: x[m], (tokens, weights))
            micro = jax.tree.map(lambda x: jnp.where(w.keep, x, 0), micro)

            def vocabulary_stage(hidden, head, vocab_axis):
                scores, d_hidden, d_head = token_gradients(
                    hidden, micro.tokens, micro.loss_mask, w.logp, w.entropy, head, vocab_axis,
                    vocabulary,
                )  # fmt: skip
                gap = jnp.abs(scores.logp - micro.sampler_logp)
                gap = jnp.where(micro.loss_mask, gap, 0.0).sum()
                return d_hidden, d_head, (gap, (w.logp * scores.logp).sum())

            grads, (gap, weighted) = add_gradients(
                graphdef, params, sums.grads, micro.tokens, micro.positions, micro.segment_ids,
                vocabulary_stage, forward,
            )  # fmt: skip
            return Accumulated(grads, sums.gap_sum + gap, sums.weighted_logp + weighted)

        wide = jnp.promote_types(settings.dtype, jnp.float32)
        zeros = Accumulated(
            jax.tree.map(
                lambda p, s: jax.lax.with_sharding_constraint(_zeros_at_least_float32(p), s),
                params, shardings.state.params,
            ),
            jnp.zeros((), wide), jnp.zeros((), wide),
        )  # fmt: skip
        return jax.lax.fori_loop(0, used, one, zeros)

    def weigh(scores: TokenScores, old, reference, tokens: TokenArrays, events: EventArrays):
        finite, keep = _finite_events(scores.logp, old, tokens, events)
        skipped_events, skipped_members, skipped_tokens = events.skipped
        size = jnp.where(finite, events.event_size, 0)
        kept_tokens = jnp.sum(tokens.loss_mask & keep)

        def loss_of(logp, entropy):
            return setwise_objective(
                _flat(logp), _flat(old), _flat(tokens.loss_mask), events.row_event,
                events.event_size, events.event_advantage, event_valid=finite,
                token_row=_flat(tokens.token_row),
                reference_logp=None if reference is None else _flat(reference),
                entropy=_flat(entropy) if objective.entropy_coef else None,
                sampler_logp=_flat(tokens.sampler_logp) if objective.sampler_cap else None,
                row_advantage=None if objective.level == "event" else events.row_advantage,
                num_events=jnp.sum(size > 0) + skipped_events,
                num_members=jnp.sum(size) + skipped_members,
                num_tokens=kept_tokens + skipped_tokens,
                config=objective,
            )  # fmt: skip

        (w_logp, w_entropy), metrics = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(*scores)
        metrics = _with_skipped(metrics, objective.level, events.skipped)
        dropped = jnp.sum(~finite & (events.event_size > 0))
        return TokenWeights(w_logp, w_entropy, keep), metrics, dropped

    def apply(state: TrainState, sums: Accumulated, live_events):
        norm = optax.tree.norm(sums.grads)
        # Without any, momentum and decay alone would move the parameters.
        good = jnp.isfinite(norm) & (live_events > 0)

        params, opt_state = apply_by_leaf(
            optimizer, sums.grads, norm, state.opt_state, state.params,
            step=state.updates, good=good,
        )  # fmt: skip
        return TrainState(params, opt_state, state.updates + good), norm, good

    tokens, whole, params = shardings.tokens, shardings.whole, shardings.state.params
    sums = Accumulated._make((params, whole, whole))
    return Programs(
        score=jax.jit(score, in_shardings=(params, tokens, whole), out_shardings=tokens),
        weigh=jax.jit(weigh, out_shardings=(tokens, whole, whole)),
        accumulate=jax.jit(
            accumulate, in_shardings=(params, tokens, tokens, whole), out_shardings=sums
        ),
        apply=jax.jit(
            apply, in_shardings=(shardings.state, sums, whole),
            out_shardings=(shardings.state, whole, whole), donate_argnums=0,
        ),
    )  # fmt: skip


def _with_skipped(metrics: ObjectiveMetrics, level: str, skipped: jax.Array) -> ObjectiveMetrics:
    """The metrics of the whole mini-batch, where ``skipped`` has the events, members and tokens
    that were left out for their zero advantage. Such a unit is not clipped. Its ratio is not known:
    means of ratios, and the KL between the policies, stay those of what was computed."""
    events, members, tokens = skipped
    units = metrics.num_units + {"event": events, "member": members, "token": tokens}[level]
    num_events = metrics.num_events + events

    def over(total, count):
        return total / jnp.maximum(count, 1)

    size = metrics.mean_k * metrics.num_events + members
    return metrics._replace(
        num_events=num_events,
        num_tokens=metrics.num_tokens + tokens,
        num_units=units,
        clip_fraction=over(metrics.clip_fraction * metrics.num_units, units),
        zero_advantage_fraction=over(num_events - metrics.live_events, num_events),
        mean_k=over(size, num_events),
    )


def _no_scores(tokens: TokenArrays, dtype: Any) -> TokenScores:
    zeros = jnp.zeros(tokens.tokens.shape, jnp.promote_types(dtype, jnp.float32))
    return TokenScores(zeros, zeros)


def _zeros_at_least_float32(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _finite_events(current, old, tokens, events) -> tuple[jax.Array, jax.Array]:
    """[E] bool, events all of whose log-probs are finite, and [M, S, T] bool, the tokens of these
    (and padding)."""
    R, E = events.row_event.shape[0], events.event_size.shape[0]
    bad = tokens.loss_mask & ~(jnp.isfinite(current) & jnp.isfinite(old))
    by_row = jax.ops.segment_sum(
        bad.reshape(-1).astype(jnp.int32), tokens.token_row.reshape(-1), R + 1
    )[:R]
    by_event = jax.ops.segment_sum(by_row, events.row_event, E + 1)[:E]
    keep_event = jnp.append(by_event == 0, True)
    keep_row = jnp.append(keep_event[events.row_event], True)
    return keep_event[:E], keep_row[tokens.token_row]


def _flat(x: jax.Array) -> jax.Array:
    """[M, S, T] -> [M * S, T]."""
    return x.reshape(-1, x.shape[-1])
