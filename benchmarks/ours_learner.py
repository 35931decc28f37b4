"""This project's update: rows packed into sequences of 640 tokens, SRPO's objective."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import learner_work as shape
from benchmarks.learner_work import RaggedRows, make_rows, measure_updates
from benchmarks.ours_engine import model_config
from benchmarks.timing import run_program
from models.qwen import Qwen
from srpo_jax.events import Event, Member
from srpo_jax.learner.batch import EventBatch, build_batch
from srpo_jax.learner.learner import Learner
from srpo_jax.learner.optimizer import make_optimizer
from srpo_jax.learner.programs import LearnerSettings
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.objective import ObjectiveConfig
from srpo_jax.recipe.recipe import OptimizerConfig

SEQUENCE_TOKENS, MICRO_BATCH_ROWS = 640, 3
EVENT_SIZES = (3, 1, 2)  # K of the events, in turn


def event_sizes(count: int) -> Iterator[int]:
    """Sizes of events that hold ``count`` rows together."""
    left, turn = count, 0
    while left:
        size = min(EVENT_SIZES[turn % len(EVENT_SIZES)], left)
        yield size
        left, turn = left - size, turn + 1


def event_batch(rows: RaggedRows) -> EventBatch:
    """The rows as complete events, each with the advantage of its first row."""
    events, advantages, start = [], [], 0
    for turn, size in enumerate(event_sizes(len(rows))):
        members = tuple(
            Member(
                role=f"solver_{i + 1}", policy="policy", version=0, index=i,
                prompt_ids=rows.prompts[start + i], response_ids=rows.responses[start + i],
                logps=np.full(len(rows.responses[start + i]), -np.log(shape.VOCAB), np.float32),
            )
            for i in range(size)
        )  # fmt: skip
        events.append(
            Event(
                id=f"event_{turn}", episode="episode", task="task", type="solve", turn=turn,
                state_id="state", expected=size, members=members, reward=0.0,
            )
        )  # fmt: skip
        advantages.append(np.full(size, rows.advantages[start]))
        start += size
    return build_batch(
        events, advantages, micro_batch_rows=MICRO_BATCH_ROWS, sequence_tokens=SEQUENCE_TOKENS,
        max_tokens=shape.MAX_PROMPT + shape.MAX_RESPONSE,
    )  # fmt: skip


def make_learner() -> Learner:
    """The learner with the benchmark's model, on one device."""
    return Learner(
        Qwen(model_config(SEQUENCE_TOKENS), rngs=nnx.Rngs(0)),
        make_optimizer(OptimizerConfig(lr=shape.LEARNING_RATE, warmup_steps=0), 1),
        mesh=make_mesh(1, 1, 1, devices=jax.devices()[:1]),
        settings=LearnerSettings(objective=ObjectiveConfig(), vocab_size=shape.VOCAB, remat="dots"),
    )


def measure_srpo_learner(rows: int, steps: int) -> dict[str, float]:
    """Figures of ``measure_updates`` over ``rows`` rows."""
    work = make_rows(rows)
    learner, batch = make_learner(), event_batch(work)

    def update() -> None:
        (report,) = learner.update([batch])
        if not report["applied"] or report["nonfinite_events"]:
            raise RuntimeError("the update was not applied whole")
        jax.block_until_ready(learner.params)

    square = jnp.ones((shape.MATMUL, shape.MATMUL), jnp.float32)
    product = jax.jit(jnp.matmul)
    return measure_updates(
        update,
        lambda: product(square, square).block_until_ready(),
        parameters=sum(x.size for x in jax.tree.leaves(learner.params)),
        tokens=work.real_tokens,
        steps=steps,
    )


if __name__ == "__main__":
    run_program(measure_srpo_learner)
