"""The update in three steps: score, weigh, back-propagate.

1. ``score``: one program for old and current log-probs, micro-batch by micro-batch.
2. weights w = d loss / d logp, from the objective alone, over the whole mini-batch.
3. gradient of sum(stop_gradient(w) * logp), accumulated micro-batch by micro-batch.

This is exact for every objective of the family and every split, because the loss depends on the
parameters only through the log-probs (and, for an entropy bonus, the entropies).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from models.partition import tree_shardings
from models.qwen import Qwen, split_params
from srpo_jax.batch import EventBatch
from srpo_jax.logprob import token_logps
from srpo_jax.objective import ObjectiveConfig, ObjectiveMetrics, setwise_objective
from srpo_jax.sharding import batch_sharding, replicated


class TrainState(NamedTuple):
    """What an update changes: parameters, optimiser state, and the count of applied updates."""

    params: dict
    opt_state: Any
    updates: jax.Array


class Accumulated(NamedTuple):
    """Sums over the micro-batches of one update."""

    grads: dict
    gap_sum: jax.Array  # sum of |learner - sampler| log-prob over generated tokens


class GateError(RuntimeError):
    """Two runs of the score program on the same batch disagree: a clip would act on noise."""


class Learner:
    """Holds the train state on a mesh and updates it from event batches.

    ``vocab_size`` is the tokenizer's length: ids past it are masked. ``dtype`` is that of the
    computation; parameters and moments keep their own. The model's arrays are copied to the mesh.
    """

    def __init__(
        self,
        model: Qwen,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        objective: ObjectiveConfig,
        vocab_size: int,
        temperature: float = 1.0,
        dtype: Any = jnp.float32,
        remat: bool = False,
        logprob_chunk: int = 1024,
    ):
        self.mesh = mesh
        self.objective = objective
        self._graphdef, params = split_params(model)
        shardings = tree_shardings(mesh, params)
        params = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings)(params)
        # Moments take the sharding of their parameter; counters are replicated.
        opt_shardings = optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, params),
            shardings,
            transform_non_params=lambda _: replicated(mesh),
        )
        opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
        updates = jax.device_put(jnp.zeros((), jnp.int32), replicated(mesh))
        self.state = TrainState(params, opt_state, updates)
        # A frozen reference is kept only where the KL term needs one.
        self.reference = jax.tree.map(jnp.copy, params) if objective.kl_coef else None

        rows, whole = batch_sharding(mesh), replicated(mesh)
        state_shardings = TrainState(shardings, opt_shardings, whole)
        sums = Accumulated(shardings, whole)

        def logps(params, micro):
            model = nnx.merge(self._graphdef, params)
            hidden = model(
                micro["tokens"], micro["positions"], micro["segment_ids"], dtype=dtype, remat=remat
            )
            return token_logps(
                hidden,
                micro["tokens"],
                model.head_kernel(),
                temperature=temperature,
                vocab_size=vocab_size,
                chunk=logprob_chunk,
                with_entropy=bool(objective.entropy_coef),
            )

        def accumulate(params, sums, micro, keep, w_logp, w_entropy):
            # A dropped event's rows become padding: a weight of 0 alone would give 0 * NaN.
            micro = {name: jnp.where(keep, x, 0) for name, x in micro.items()}

            def weighted(params):
                logp, entropy = logps(params, micro)
                mask = micro["loss_mask"] != 0
                gap = jnp.where(mask, jnp.abs(logp - micro["sampler_logp"]), 0.0).sum()
                total = jnp.sum(jnp.where(mask, w_logp * logp + w_entropy * entropy, 0.0))
                return total, jax.lax.stop_gradient(gap)

            grads, gap = jax.grad(weighted, has_aux=True)(params)
            return Accumulated(jax.tree.map(jnp.add, sums.grads, grads), sums.gap_sum + gap)

        def weights(current, old, reference, entropy, events):
            finite, keep = _finite_events(current, old, events)

            def loss_of(logp, entropy):
                return setwise_objective(
                    _flat(logp), _flat(old), _flat(events["loss_mask"]), events["row_event"],
                    events["event_size"], events["event_advantage"],
                    event_valid=finite, token_row=_flat(events["token_row"]),
                    reference_logp=None if reference is None else _flat(reference),
                    entropy=_flat(entropy) if objective.entropy_coef else None,
                    row_advantage=None if objective.level == "event" else events["row_advantage"],
                    config=objective,
                )  # fmt: skip

            (w_logp, w_entropy), metrics = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(
                current, entropy
            )
            dropped = jnp.sum(~finite & (events["event_size"] > 0))
            return keep, w_logp, w_entropy, metrics, dropped

        def apply(state, sums, num_events):
            norm = optax.tree.norm(sums.grads)
            # A step without events must not move parameters through momentum or decay either.
            good = jnp.isfinite(norm) & (num_events > 0)
            moves, opt_state = optimizer.update(sums.grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, moves)
            new = TrainState(params, opt_state, state.updates + 1)
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state), norm, good

        def zeros(params):
            return Accumulated(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))

        self._score = jax.jit(logps, in_shardings=(shardings, rows), out_shardings=(rows, rows))
        self._accumulate = jax.jit(
            accumulate, in_shardings=(shardings, sums, rows, rows, rows, rows), out_shardings=sums,
            donate_argnums=1,
        )  # fmt: skip
        self._weights = jax.jit(weights)
        self._apply = jax.jit(
            apply, in_shardings=(state_shardings, sums, whole),
            out_shardings=(state_shardings, whole, whole), donate_argnums=0,
        )  # fmt: skip
        self._zeros = jax.jit(zeros, out_shardings=sums)

    @property
    def params(self) -> dict:
        return self.state.params

    def model(self) -> Qwen:
        """The current model, whose arrays are the learner's until the next update donates them."""
        return nnx.merge(self._graphdef, self.state.params)

    def compile_count(self) -> int:
        """Programs compiled so far: constant after warm-up."""
        programs = (self._score, self._accumulate, self._weights, self._apply, self._zeros)
        return sum(p._cache_size() for p in programs)

    def score(self, batch: EventBatch, params: dict | None = None) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [M, S, T] float32; one program for old and current."""
        params = self.state.params if params is None else params
        scored = [self._score(params, micro) for micro in self._micros(batch)]
        return tuple(self._stack([pair[i] for pair in scored], batch) for i in (0, 1))

    def check_gate(self, batch: EventBatch) -> None:
        """Scores twice and raises GateError unless every log-prob is bit-equal: L_e = 0 exactly."""
        first, second = (np.asarray(self.score(batch)[0]) for _ in range(2))
        seen = first[batch.loss_mask], second[batch.loss_mask]
        if not np.array_equal(*seen, equal_nan=True):
            worst = np.abs(first - second)[batch.loss_mask].max()
            raise GateError(
                f"scoring one batch twice differs by up to {worst:g} per token, so the clip would "
                "act on noise; set learner.mesh or XLA flags to a deterministic configuration"
            )

    def update(
        self, batches: Sequence[EventBatch], on_step: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """One optimiser step for each of ``batches``, which were all sampled by the current policy.

        With a single batch the current log-probs are the old ones (ratio 1) and scoring is skipped.
        Returns a dict of metrics for each step; the per-event arrays are host numpy.
        """
        config = self.objective
        # Where the log-probs' own values enter the loss they are needed even on policy.
        own_values = config.kl_coef or config.entropy_coef or config.ratio_unit == "none"
        needs_scores = len(batches) > 1 or bool(own_values)
        old = [self.score(b) for b in batches] if needs_scores else [None] * len(batches)
        reports = []
        for i, batch in enumerate(batches):
            current = old[i] if i == 0 or old[i] is None else self.score(batch)
            reports.append(self._step(batch, current, old[i]))
            on_step()
        return [self._fetch(report) for report in reports]

    def gradient(
        self, batch: EventBatch, current=None, old=None
    ) -> tuple[Accumulated, ObjectiveMetrics, jax.Array]:
        """The gradient of the loss over a whole batch, the objective's metrics, and the number of
        events that were dropped because a log-prob of theirs is not finite.

        ``current``, ``old``: pairs from ``score``; None means the policy that sampled the batch.
        """
        micros = self._micros(batch)
        zeros = jnp.zeros(batch.tokens.shape, jnp.float32)
        current_logp, entropy = current if current is not None else (zeros, zeros)
        old_logp = old[0] if old is not None else current_logp
        reference = None
        if self.reference is not None:
            reference = self.score(batch, self.reference)[0]
        names = (
            "loss_mask", "token_row", "row_event", "row_advantage", "event_size", "event_advantage",
        )  # fmt: skip
        events = {name: getattr(batch, name) for name in names}
        *by_token, metrics, dropped = self._weights(
            current_logp, old_logp, reference, entropy, events
        )
        sums = self._zeros(self.state.params)
        sharding = batch_sharding(self.mesh)
        for m, micro in enumerate(micros):
            placed = jax.device_put([x[m] for x in by_token], sharding)
            sums = self._accumulate(self.state.params, sums, micro, *placed)
        return sums, metrics, dropped

    def _step(self, batch, current, old):
        sums, metrics, dropped = self.gradient(batch, current, old)
        self.state, norm, good = self._apply(self.state, sums, metrics.num_events)
        return {
            "objective": metrics,
            "grad_norm": norm,
            "applied": good,
            "sampler_gap": sums.gap_sum / max(batch.num_tokens, 1),
            "nonfinite_events": dropped,
        }

    @staticmethod
    def _fetch(report):
        report = jax.device_get(report)
        flat = {k: v for k, v in report.items() if k != "objective"}
        return flat | dict(report["objective"]._asdict())

    def _micros(self, batch: EventBatch) -> list[dict[str, jax.Array]]:
        """The micro-batches that hold rows, on the mesh; trailing empty ones are never computed."""
        names = ("tokens", "positions", "segment_ids", "loss_mask", "sampler_logp")
        sharding = batch_sharding(self.mesh)
        return [
            {name: jax.device_put(getattr(batch, name)[m], sharding) for name in names}
            for m in range(batch.used_micro_batches)
        ]

    @staticmethod
    def _stack(scored: list[jax.Array], batch: EventBatch) -> jax.Array:
        empty = batch.tokens.shape[0] - len(scored)
        return jnp.stack(scored + [jnp.zeros_like(scored[0])] * empty)


def _finite_events(current, old, events) -> tuple[jax.Array, jax.Array]:
    """[E] bool, events all of whose log-probs are finite, and [M, S, T] bool, the tokens of these
    (and padding)."""
    R, E = events["row_event"].shape[0], events["event_size"].shape[0]
    bad = events["loss_mask"] & ~(jnp.isfinite(current) & jnp.isfinite(old))
    by_row = jax.ops.segment_sum(
        bad.reshape(-1).astype(jnp.int32), events["token_row"].reshape(-1), R + 1
    )[:R]
    by_event = jax.ops.segment_sum(by_row, events["row_event"], E + 1)[:E]
    keep_event = jnp.append(by_event == 0, True)
    keep_row = jnp.append(keep_event[events["row_event"]], True)
    return keep_event[:E], keep_row[events["token_row"]]


def _flat(x: jax.Array) -> jax.Array:
    """[M, S, T] -> [M * S, T]."""
    return x.reshape(-1, x.shape[-1])
