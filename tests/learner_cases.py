"""Tiny models, random complete events and learners, shared by the tests of the update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.config import ModelConfig
from models.qwen import Qwen, split_params
from srpo_jax.events import Event, Member
from srpo_jax.learner.batch import EventBatch, ShapeMemory, build_batch
from srpo_jax.learner.learner import Learner
from srpo_jax.learner.programs import LearnerSettings
from srpo_jax.learner.sharding import make_mesh
from srpo_jax.objective import ObjectiveConfig

VOCAB, REAL_VOCAB = 64, 61  # embedding rows, tokenizer's length
TEMPERATURE = 0.8
ADAM = optax.adam(1e-2, eps=1e-3)


def tiny_config(**changes: Any) -> ModelConfig:
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6, "tie_embeddings": True, "qkv_bias": False, "qk_norm": True,
        "max_position": 512, "model_type": "qwen3",
    }  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def tiny_model(seed: int = 0, dtype: Any = jnp.float32, **changes: Any) -> Qwen:
    """Two layers with weights large enough that no two tokens are equally likely."""
    shape = nnx.eval_shape(lambda: Qwen(tiny_config(**changes), rngs=nnx.Rngs(0), dtype=dtype))
    graphdef, params = split_params(shape)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "scale":
            return jnp.asarray(rng.uniform(0.8, 1.2, leaf.shape), dtype)
        return jnp.asarray(rng.normal(0, 0.15, leaf.shape), dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, params))


def perturbed(params: dict, scale: float, seed: int = 0) -> dict:
    """``params`` with normal noise on every leaf, on the same devices."""
    rng = np.random.default_rng(seed)

    def one(x):
        noisy = np.asarray(x) + rng.normal(0, scale, x.shape).astype(x.dtype)
        return jax.device_put(noisy, x.sharding)

    return jax.tree.map(one, params)


def events_of(
    sizes: tuple[int, ...] = (3, 1, 2, 1, 4), seed: int = 0, longest: tuple[int, int] = (9, 8)
) -> list[Event]:
    """Complete events of the given K; prompts and responses of up to ``longest`` tokens."""
    rng = np.random.default_rng(seed)

    def member(index: int) -> Member:
        prompt, response = (rng.integers(1, limit + 1) for limit in longest)
        return Member(
            role=f"solver_{index + 1}", policy="policy", version=0,
            prompt_ids=rng.integers(0, REAL_VOCAB, prompt).tolist(),
            response_ids=rng.integers(0, REAL_VOCAB, response).tolist(),
            logps=-rng.uniform(0.1, 4.0, response).astype(np.float32), index=index,
        )  # fmt: skip

    return [
        Event(
            id=f"e{i}",
            episode=f"ep{i}",
            task="t",
            type="solve",
            turn=0,
            state_id="s",
            expected=k,
            members=tuple(member(j) for j in range(k)),
            reward=0.0,
        )
        for i, k in enumerate(sizes)
    ]


def advantages_of(events: list[Event], seed: int = 0, by_row: bool = False) -> list[np.ndarray]:
    """An advantage for each member, of both signs; equal inside an event unless ``by_row``."""
    rng = np.random.default_rng(seed)
    drawn = [rng.uniform(0.5, 2.0, e.expected) * rng.choice([-1, 1]) for e in events]
    return drawn if by_row else [np.full(len(a), a[0]) for a in drawn]


def batch_of(
    events: list[Event] | None = None,
    advantages: list[np.ndarray] | None = None,
    *,
    rows: int = 4,
    by_row: bool = False,
    min_tokens: int = 24,
    sequence_tokens: int | None = None,
) -> EventBatch:
    """A batch of ``events``; up to 12 rows of 24 tokens give one shape, which is compiled once."""
    events = events_of() if events is None else events
    advantages = advantages_of(events, by_row=by_row) if advantages is None else advantages
    return build_batch(
        events, advantages, micro_batch_rows=rows, max_tokens=64, min_tokens=min_tokens,
        sequence_tokens=sequence_tokens, shapes=ShapeMemory(micro_batches=max(12 // rows, 1)),
    )  # fmt: skip


def one_device():
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


def make_learner(
    model: Qwen | None = None, objective: ObjectiveConfig | None = None, **changes: Any
) -> Learner:
    """A float32 learner on one device, of a copy of the model; ``changes``: optimizer, mesh, or of
    LearnerSettings."""
    optimizer = changes.pop("optimizer", ADAM)
    mesh = changes.pop("mesh", None) or one_device()
    settings = {"vocab_size": REAL_VOCAB, "temperature": TEMPERATURE, "logprob_chunk": 24}
    return Learner(
        tiny_model() if model is None else jax.tree.map(jnp.copy, model),
        optimizer,
        mesh=mesh,
        settings=LearnerSettings(
            objective=objective or ObjectiveConfig(), **{**settings, **changes}
        ),
    )


def set_params(learner: Learner, params: dict) -> None:
    learner.state = learner.state._replace(params=params)


def host(tree: Any) -> Any:
    """Every leaf as a numpy array of its own."""
    return jax.tree.map(lambda x: np.array(x), tree)


def norm(tree: Any) -> float:
    """The global norm of a pytree, in float64."""
    return float(
        np.sqrt(sum(np.sum(np.square(x.astype(float))) for x in jax.tree.leaves(host(tree))))
    )


def relative_error(tree: Any, other: Any) -> float:
    """Norm of the difference of two pytrees over the norm of the second."""
    other = host(other)
    return norm(jax.tree.map(lambda a, b: a.astype(float) - b, host(tree), other)) / norm(other)


def bit_equal(tree: Any, other: Any) -> bool:
    """Whether two pytrees have the same dtypes, shapes and bits."""
    pairs = zip(jax.tree.leaves(host(tree)), jax.tree.leaves(host(other)), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)
