"""The device programs of an update, as functions of abstract parameters.

They are built from shapes alone, so that they can be compiled for devices that are not there.
"""

from __future__ import annotations

import functools
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
from models.qwen import Forward
from models.remat import REMAT_POLICIES
from srpo_jax.learner.logprob import TokenScores, Vocabulary, token_gradients, token_scores
from srpo_jax.learner.optimizer import apply_by_leaf, opt_state_shardings
from srpo_jax.learner.sharding import batch_sharding, replicated
from srpo_jax.objective import ObjectiveMetrics, count_skipped, setwise_objective
from srpo_jax.objective_config import ObjectiveConfig
from srpo_jax.objective_terms import Counts


@dataclass(frozen=True)
class LearnerSettings:
    """What an update computes, and how.

    Attributes:
        objective: The switches of the loss.
        vocab_size: The tokenizer's length: ids past it are masked.
        temperature: Of the sampler, whose distribution the log-probs are of.
        dtype: Of the computation; parameters, moments and sums keep their own.
        remat: A name of ``models.remat.REMAT_POLICIES``.
        attention: A name of ``models.attention.forms.ATTENTION_FORMS``.
        logprob_chunk: Tokens at a time in the vocabulary stage; None: by ``chunk_tokens``.
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


class LearnerPrograms(NamedTuple):
    """The jitted functions of an update, one for each of its phases.

    M counts the micro-batches of a batch, ``used`` (int32) those that hold rows.

    Attributes:
        score: (params, tokens, used) -> TokenScores; see ``score_batch``.
        weigh: (scores, old_logp, reference_logp | None, tokens, events) -> (TokenWeights,
            ObjectiveMetrics, dropped events); see ``weigh_tokens``.
        accumulate: (params, tokens, weights, used) -> Accumulated; see ``accumulate_gradients``.
        apply: (state, sums, live_events) -> (state, norm, applied), ``state`` is donated; see
            ``apply_gradients``.
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
    """Where state and batches lie on ``mesh``; moments take the sharding of their parameter.

    ``params``: arrays or ShapeDtypeStructs, by path.
    """
    shardings, whole = tree_shardings(mesh, params), replicated(mesh)
    opt_shardings = opt_state_shardings(optimizer, params, shardings, whole)
    state = TrainState._make((shardings, opt_shardings, whole))
    return Shardings(state, batch_sharding(mesh), whole)


def build_learner_programs(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    settings: LearnerSettings,
    shardings: Shardings,
) -> LearnerPrograms:
    """The programs of a learner; nothing is traced before a program is called or lowered.

    Args:
        graphdef: The model's static part, from ``split_params``.
        optimizer: From ``make_optimizer``, or any whose leaves are updated on their own once
            the gradient's norm is known.
        mesh: With the axes data, fsdp and tensor.
        settings: What is computed.
        shardings: From ``state_shardings`` on the same mesh.
    """
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
    how = Passes(graphdef, forward, vocabulary, jnp.promote_types(settings.dtype, jnp.float32))
    tokens, whole, params = shardings.tokens, shardings.whole, shardings.state.params
    sums = Accumulated._make((params, whole, whole))
    return LearnerPrograms(
        score=jax.jit(
            functools.partial(score_batch, how=how),
            in_shardings=(params, tokens, whole), out_shardings=tokens,
        ),
        weigh=jax.jit(
            functools.partial(weigh_tokens, objective=objective),
            out_shardings=(tokens, whole, whole),
        ),
        accumulate=jax.jit(
            functools.partial(accumulate_gradients, how=how, shardings=params),
            in_shardings=(params, tokens, tokens, whole), out_shardings=sums,
        ),
        apply=jax.jit(
            functools.partial(apply_gradients, optimizer=optimizer),
            in_shardings=(shardings.state, sums, whole),
            out_shardings=(shardings.state, whole, whole), donate_argnums=0,
        ),
    )  # fmt: skip


class Passes(NamedTuple):
    """How a micro-batch goes through the model, forward and backward."""

    graphdef: Any
    forward: Forward
    vocabulary: Vocabulary
    dtype: Any  # of log-probs and of the sums over tokens: at least float32


def score_batch(params: dict, tokens: TokenArrays, used: jax.Array, *, how: Passes) -> TokenScores:
    """Log-probs and entropies [M, S, T] of the first ``used`` micro-batches, 0 for the others."""
    model = nnx.merge(how.graphdef, params)

    def one(m, scores):
        micro = jax.tree.map(lambda x: x[m], tokens)
        hidden = model(micro.tokens, micro.positions, micro.segment_ids, forward=how.forward)
        head, axis = model.head()
        new = token_scores(hidden, micro.tokens, micro.loss_mask, head, axis, how.vocabulary)
        return jax.tree.map(lambda all, x: all.at[m].set(x), scores, new)

    zeros = jnp.zeros(tokens.tokens.shape, how.dtype)
    return jax.lax.fori_loop(0, used, one, TokenScores(zeros, zeros))


def weigh_tokens(
    scores: TokenScores,
    old_logp: jax.Array,
    reference_logp: jax.Array | None,
    tokens: TokenArrays,
    events: EventArrays,
    *,
    objective: ObjectiveConfig,
) -> tuple[TokenWeights, ObjectiveMetrics, jax.Array]:
    """The gradient of the loss with respect to the scores, over the whole mini-batch.

    Args:
        scores: Current log-probs and entropies, [M, S, T].
        old_logp: [M, S, T], of the policy that sampled the batch.
        reference_logp: [M, S, T], of the KL term's reference; None without that term.
        tokens: The batch's tokens.
        events: Its rows and events.
        objective: The switches of the loss.

    Returns:
        (weights, metrics of the mini-batch, number of events dropped for a non-finite log-prob).
    """
    finite, keep = _finite_events(scores.logp, old_logp, tokens, events)
    skipped = Counts(*events.skipped)
    size = jnp.where(finite, events.event_size, 0)
    kept_tokens = jnp.sum(tokens.loss_mask & keep)

    def loss_of(logp, entropy):
        return setwise_objective(
            _flat(logp), _flat(old_logp), _flat(tokens.loss_mask), events.row_event,
            events.event_size, events.event_advantage, event_valid=finite,
            token_row=_flat(tokens.token_row),
            reference_logp=None if reference_logp is None else _flat(reference_logp),
            entropy=_flat(entropy) if objective.entropy_coef else None,
            sampler_logp=_flat(tokens.sampler_logp) if objective.sampler_cap else None,
            row_advantage=None if objective.unit.name == "event" else events.row_advantage,
            num_events=jnp.sum(size > 0) + skipped.events,
            num_members=jnp.sum(size) + skipped.members,
            num_tokens=kept_tokens + skipped.tokens,
            config=objective,
        )  # fmt: skip

    (w_logp, w_entropy), metrics = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(*scores)
    metrics = count_skipped(metrics, skipped, objective)
    dropped = jnp.sum(~finite & (events.event_size > 0))
    return TokenWeights(w_logp, w_entropy, keep), metrics, dropped


def accumulate_gradients(
    params: dict,
    tokens: TokenArrays,
    weights: TokenWeights,
    used: jax.Array,
    *,
    how: Passes,
    shardings: dict,
) -> Accumulated:
    """The gradient of ``sum(weights * scores)``, summed over the first ``used`` micro-batches.

    ``shardings`` are those of ``params``; the sums have them too, in at least float32.
    """

    def one(m, sums):
        # A dropped event's rows become padding: a weight of 0 alone would give 0 * NaN.
        micro, w = jax.tree.map(lambda x: x[m], (tokens, weights))
        micro = jax.tree.map(lambda x: jnp.where(w.keep, x, 0), micro)

        def vocabulary_stage(hidden, head, vocab_axis):
            scores, d_hidden, d_head = token_gradients(
                hidden, micro.tokens, micro.loss_mask, w.logp, w.entropy, head, vocab_axis,
                how.vocabulary,
            )  # fmt: skip
            gap = jnp.abs(scores.logp - micro.sampler_logp)
            gap = jnp.where(micro.loss_mask, gap, 0.0).sum()
            return d_hidden, d_head, (gap, (w.logp * scores.logp).sum())

        grads, (gap, weighted) = add_gradients(
            how.graphdef, params, sums.grads, micro.tokens, micro.positions, micro.segment_ids,
            vocabulary_stage, how.forward,
        )  # fmt: skip
        return Accumulated(grads, sums.gap_sum + gap, sums.weighted_logp + weighted)

    zeros = jax.tree.map(
        lambda p, s: jax.lax.with_sharding_constraint(_zeros_at_least_float32(p), s),
        params, shardings,
    )  # fmt: skip
    none = Accumulated(zeros, jnp.zeros((), how.dtype), jnp.zeros((), how.dtype))
    return jax.lax.fori_loop(0, used, one, none)


def apply_gradients(
    state: TrainState,
    sums: Accumulated,
    live_events: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, jax.Array, jax.Array]:
    """(state after one update, global norm of the gradient, whether it was applied).

    It is not where the norm is not finite or no event is live: without any, momentum and decay
    alone would move the parameters.
    """
    norm = optax.tree.norm(sums.grads)
    applied = jnp.isfinite(norm) & (live_events > 0)
    params, opt_state = apply_by_leaf(
        optimizer, sums.grads, norm, state.opt_state, state.params,
        step=state.updates, applied=applied,
    )  # fmt: skip
    return TrainState(params, opt_state, state.updates + applied), norm, applied


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
