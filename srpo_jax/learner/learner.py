"""The update in three steps: score, weigh, back-propagate.

1. ``score``: one program for old and current log-probs, micro-batch by micro-batch.
2. weights w = d loss / d logp, from the objective alone, over the whole mini-batch.
3. gradient of sum(stop_gradient(w) * logp), accumulated micro-batch by micro-batch.

This is exact for every objective of the family and every split, because the loss depends on the
parameters only through the log-probs (and, for an entropy bonus, the entropies).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from models.qwen import Qwen, split_params
from srpo_jax.learner.batch import EventBatch
from srpo_jax.learner.logprob import TokenScores
from srpo_jax.learner.programs import (
    Accumulated,
    EventArrays,
    LearnerSettings,
    TokenArrays,
    TrainState,
    build_learner_programs,
    state_shardings,
)
from srpo_jax.learner.sharding import on_devices
from srpo_jax.objective import ObjectiveMetrics
from srpo_jax.objective_config import NO_RATIO
from srpo_jax.objective_terms import Counts


class GateError(RuntimeError):
    """Two runs of the score program on the same batch disagree: a clip would act on noise."""


class Learner:
    """Holds the train state on a mesh and updates it from event batches.

    Args:
        model: Its arrays become the learner's, without a copy if they lie on the mesh already:
            the first update donates them. Where the KL term needs a frozen reference, they are
            that reference, and the learner trains a copy.
        optimizer: From ``make_optimizer``.
        mesh: With the axes data, fsdp and tensor.
        settings: What an update computes, and how.
    """

    def __init__(
        self,
        model: Qwen,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        settings: LearnerSettings,
    ):
        self.mesh = mesh
        self.objective = settings.objective
        self._graphdef, params = split_params(model)
        shardings = state_shardings(mesh, params, optimizer)
        self._shardings = shardings
        self._programs = build_learner_programs(
            self._graphdef, optimizer, mesh, settings, shardings
        )
        params = jax.device_put(params, shardings.state.params)
        self.reference = params if self.objective.kl_coef else None
        if self.reference is not None:
            copied = jax.jit(
                lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings.state.params
            )
            params = copied(params)
        opt_state = jax.jit(optimizer.init, out_shardings=shardings.state.opt_state)(params)
        updates = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=shardings.whole)()
        self.state = TrainState(params, opt_state, updates)
        self._dtype = jnp.promote_types(settings.dtype, jnp.float32)
        # Virtual CPU devices deadlock when two programs with collectives run at once.
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def _run(self, program: Any, *args: Any) -> Any:
        out = program(*args)
        return jax.block_until_ready(out) if self._one_at_a_time else out

    @property
    def params(self) -> dict:
        return self.state.params

    def release(self) -> TrainState:
        """Frees the train state; another must be put in its place before the next use.

        Returns:
            Its shapes, dtypes and shardings, as ShapeDtypeStructs.
        """
        freed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )
        del self.state
        return freed

    def model(self) -> Qwen:
        """The current model, whose arrays are the learner's until the next update donates them."""
        return nnx.merge(self._graphdef, self.state.params)

    def compile_count(self) -> int:
        """Programs compiled so far: constant after warm-up."""
        return sum(program._cache_size() for program in self._programs)

    def score(self, batch: EventBatch, params: dict | None = None) -> TokenScores:
        """Log-probs and entropies [M, S, T], at least float32; one program for old and current.

        ``params``: those to score with, on the mesh; None: the current ones.
        """
        params = self.state.params if params is None else params
        tokens, _ = self._place(batch)
        return self._run(self._programs.score, params, tokens, np.int32(batch.used_micro_batches))

    def check_gate(self, batch: EventBatch) -> None:
        """Scores twice: every log-prob must be bit-equal, so that L_e = 0 exactly.

        Raises:
            GateError: Where one is not.
        """
        first, second = (self.score(batch).logp for _ in range(2))
        gaps = []
        # Each process looks at the parts that it has.
        for a, b in zip(first.addressable_shards, second.addressable_shards, strict=True):
            mask = batch.loss_mask[a.index]
            one, other = np.asarray(a.data)[mask], np.asarray(b.data)[mask]
            if not np.array_equal(one, other, equal_nan=True):
                gaps.append(np.abs(one - other).max())
        if gaps:
            raise GateError(
                f"scoring one batch twice differs by up to {np.max(gaps):g} per token, so the clip "
                "would act on noise; set learner.mesh or XLA flags to a deterministic configuration"
            )

    def update(
        self,
        batches: Sequence[EventBatch],
        *,
        orders: Sequence[Sequence[int]] | None = None,
        on_step: Callable[[], None] = lambda: None,
        by_role: bool = False,
    ) -> list[dict[str, Any]]:
        """One optimiser step for each of ``batches``, which were all sampled by the current policy.

        With a single step the current log-probs are the old ones (ratio 1) and scoring is skipped,
        unless its gradient is not finite: then the step is taken again without the events whose
        log-probs are not. A step whose gradient is not finite, or in which no event has an
        advantage (nor a KL or entropy term acts), changes nothing, the schedule included.

        Args:
            batches: The mini-batches.
            orders: One order of the batches for each epoch; None: one epoch, as given.
            on_step: Called after each step.
            by_role: Adds the gradient norm of each role to the first step's metrics, one backward
                pass for each.

        Returns:
            A dict of metrics for each step; the per-event arrays are host numpy.
        """
        steps = [i for order in orders or [range(len(batches))] for i in order]
        config = self.objective
        # Where the log-probs' own values enter the loss they are needed even on policy.
        own_values = config.kl_coef or config.entropy_coef or config.sampler_cap
        old: list[TokenScores | None] = [None] * len(batches)
        if len(steps) > 1 or own_values:
            old = [self.score(batch) for batch in batches]
        references = [self._reference_logp(batch) for batch in batches]
        reports = []
        for n, i in enumerate(steps):
            batch, roles = batches[i], by_role and n == 0
            current = old[i] if n == 0 or old[i] is None else self.score(batch)
            report = self._step(batch, current, old[i], references[i], roles)
            if current is None and not np.isfinite(report["grad_norm"]):
                # Nothing was changed. Scores say which events are to blame: the others are trained.
                scores = self.score(batch)
                report = self._step(batch, scores, scores, references[i], roles)
            reports.append(report)
            on_step()
        return [self._fetch(report) for report in reports]

    def gradient(
        self,
        batch: EventBatch,
        current: TokenScores | None = None,
        old: TokenScores | None = None,
        reference: jax.Array | None = None,
    ) -> tuple[Accumulated, ObjectiveMetrics, jax.Array]:
        """The gradient of the loss over a whole batch, by gradient accumulation.

        Args:
            batch: A mini-batch.
            current: From ``score``; None: those of the policy that sampled the batch.
            old: From ``score``; None: the current ones.
            reference: Log-probs of the KL term's reference; None: scored here, where needed.

        Returns:
            (sums over the micro-batches, the objective's metrics, the number of events that were
            dropped because a log-prob of theirs is not finite).
        """
        tokens, events = self._place(batch)
        weights, metrics, dropped = self._weigh(batch, tokens, events, current, old, reference)
        sums = self._run(
            self._programs.accumulate,
            self.state.params,
            tokens,
            weights,
            np.int32(batch.used_micro_batches),
        )
        return sums, metrics, dropped

    def role_norms(
        self,
        batch: EventBatch,
        current: TokenScores | None = None,
        old: TokenScores | None = None,
        reference: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """The norm of each role's own part of the gradient; the parts add up to the gradient.

        Arguments as in ``gradient``.
        """
        tokens, events = self._place(batch)
        weights, _, _ = self._weigh(batch, tokens, events, current, old, reference)
        role_of_token = np.append(batch.row_role, len(batch.roles))[batch.token_row]
        norms = {}
        for index, role in enumerate(batch.roles):
            own = on_devices(role_of_token == index, self._shardings.tokens)
            masked = weights._replace(logp=weights.logp * own, entropy=weights.entropy * own)
            sums = self._run(
                self._programs.accumulate,
                self.state.params,
                tokens,
                masked,
                np.int32(batch.used_micro_batches),
            )
            norms[role] = optax.tree.norm(sums.grads)
        return norms

    def _reference_logp(self, batch):
        return None if self.reference is None else self.score(batch, self.reference).logp

    def _weigh(self, batch, tokens, events, current, old, reference):
        if current is None:
            zeros = on_devices(np.zeros(batch.tokens.shape, self._dtype), self._shardings.tokens)
            current = TokenScores(zeros, zeros)
        if reference is None:
            reference = self._reference_logp(batch)
        old_logp = current.logp if old is None else old.logp
        return self._run(self._programs.weigh, current, old_logp, reference, tokens, events)

    def _step(self, batch, current, old, reference, by_role):
        norms = self.role_norms(batch, current, old, reference) if by_role else {}
        sums, metrics, dropped = self.gradient(batch, current, old, reference)
        config = self.objective
        # A KL or entropy term acts on events without an advantage too.
        terms = config.kl_coef or config.entropy_coef
        live = metrics.num_events if terms else metrics.live_events
        self.state, norm, applied = self._run(self._programs.apply, self.state, sums, live)
        return {
            "objective": metrics,
            "grad_norm": norm,
            "role_norms": norms,
            "applied": applied,
            "nonfinite_events": dropped,
            "event_size": batch.event_size,
            "event_tokens": batch.event_tokens,
            "row_event": batch.row_event,
            "skipped": batch.skipped,
            "gap_sum": sums.gap_sum,
            # Without scores a loss that is linear in the log-probs is known only now.
            "linear_loss": (
                sums.weighted_logp if current is None and config.ratio_unit == NO_RATIO
                else None
            ),
        }  # fmt: skip

    def _fetch(self, report):
        """The report on the host, flat."""
        report = jax.device_get(report)
        config, metrics = self.objective, report.pop("objective")
        skipped = Counts(*report.pop("skipped"))
        scored_tokens = int(metrics.num_tokens) - skipped.tokens
        linear_loss, gap_sum = report.pop("linear_loss"), report.pop("gap_sum")
        if linear_loss is not None:
            metrics = metrics._replace(loss=linear_loss, surrogate=-linear_loss)
        figures = metrics._asdict()
        for name, is_on in (
            ("kl", config.kl_coef),
            ("entropy", config.entropy_coef),
            ("sampler_weight_mean", config.sampler_cap),
            ("sampler_truncated", config.sampler_cap),
        ):
            if not is_on:
                del figures[name]
        return (
            report
            | figures
            | {
                "scored_units": int(metrics.num_units) - getattr(skipped, config.unit.counts),
                "scored_tokens": scored_tokens,
                "sampler_gap": gap_sum / scored_tokens if scored_tokens else np.nan,
            }
        )

    def _place(self, batch: EventBatch) -> tuple[TokenArrays, EventArrays]:
        """The batch's arrays on the mesh."""
        tokens = TokenArrays(*(getattr(batch, name) for name in TokenArrays._fields))
        rows_and_events = [getattr(batch, name) for name in EventArrays._fields[:-1]]
        events = EventArrays._make([*rows_and_events, np.asarray(batch.skipped, np.int32)])
        return (
            jax.tree.map(lambda x: on_devices(x, self._shardings.tokens), tokens),
            jax.tree.map(lambda x: on_devices(x, self._shardings.whole), events),
        )
