"""Supervised start of a small model on role transcripts, so that every role speaks its format.

Transcripts come from the workflows themselves with a teacher in place of the model, so their
prompts are those of training. The teacher errs in a stated share of its outputs: what it does wrong
is left for the team's reward to unlearn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from envs.workflow import Prompt, ScriptedTeam, Task, Workflow
from models.backward import add_gradients
from models.qwen import PLAIN, Qwen, split_params
from srpo_jax.learner.logprob import Vocabulary, token_gradients
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.rollout.prompting import Tokenizer, fit_prompt

Rewrite = Callable[[list[str], random.Random], list[str]]
Teacher = Callable[[str, Any, Task, random.Random, float], str]


@dataclass(frozen=True)
class Example:
    """One call of a role: its prompt and the teacher's response."""

    prompt: Prompt
    response: str


def transcripts(
    workflow: Workflow,
    tasks: Sequence[Task],
    teacher: Teacher,
    *,
    poor: float,
    seed: int,
    rewrite: Rewrite | None = None,
    on_episode: Callable[[], None] = lambda: None,
) -> Iterator[Example]:
    """One scripted episode for each task: an example of every distinct prompt of every call.

    Args:
        workflow: Its prompts are those of training.
        tasks: One episode each.
        teacher: Answers ``(role, state, task, rng, poor)`` in place of the model.
        poor: Share of the teacher's outputs that are wrong.
        seed: Of every episode, with the index of its task.
        rewrite: Changes the texts of three episodes in four, all texts of an episode together
            (names, say).
        on_episode: Called after every episode.
    """

    async def episodes(chunk: Sequence[tuple[int, Task]]) -> list[Example]:
        examples = []
        for index, task in chunk:
            rng = random.Random(f"{seed}/{index}")

            def reply(role, state, _, task=task, rng=rng):
                return teacher(role, state, task, rng, poor)

            team = ScriptedTeam(reply)
            await workflow.run(task, team)
            found = []
            for call in team.calls:
                pairs = zip(call.prompts, call.outputs, strict=True)
                distinct = {prompt: output.text for prompt, output in pairs}
                found += [Example(prompt, text) for prompt, text in distinct.items()]
            if rewrite is not None and index % 4:
                found = _rewritten(found, rewrite, rng)
            examples += found
            on_episode()
        return examples

    numbered = list(enumerate(tasks))
    for start in range(0, len(numbered), 256):
        yield from asyncio.run(episodes(numbered[start : start + 256]))


def _rewritten(examples: Sequence[Example], rewrite: Rewrite, rng: random.Random) -> list[Example]:
    texts = [
        part if isinstance(part, str) else part.text
        for example in examples
        for part in (*example.prompt.user, example.response)
    ]
    new = iter(rewrite(texts, rng))
    return [
        Example(
            Prompt(
                example.prompt.system,
                tuple(
                    next(new) if isinstance(part, str) else replace(part, text=next(new))
                    for part in example.prompt.user
                ),
            ),
            next(new),
        )
        for example in examples
    ]


@dataclass(frozen=True)
class Packed:
    """Sequences [S, T]: tokens, positions, segment ids int32 and loss weights float32."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    weights: np.ndarray


def pack_examples(
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    length: int,
    prompt_weight: float,
    rng: np.random.Generator,
) -> Packed:
    """Packs complete (prompt ids, response ids) pairs into sequences, in random order.

    Args:
        examples: The pairs.
        length: Tokens of a sequence, T.
        prompt_weight: Loss weight of a prompt token; that of a response token is 1.
        rng: Draws the order.

    Raises:
        RecipeError: A pair is longer than ``length``.
    """
    rows: list[list[tuple[Sequence[int], Sequence[int]]]] = []
    free = 0
    for i in rng.permutation(len(examples)):
        prompt, response = examples[i]
        size = len(prompt) + len(response)
        if size > length:
            raise RecipeError(f"an example must have at most {length} tokens, got {size}")
        if size > free:
            rows.append([])
            free = length
        rows[-1].append((prompt, response))
        free -= size
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        start = 0
        for s, (prompt, response) in enumerate(row, 1):
            middle, end = start + len(prompt), start + len(prompt) + len(response)
            tokens[r, start:middle], tokens[r, middle:end] = prompt, response
            positions[r, start:end] = np.arange(end - start)
            segments[r, start:end] = s
            weights[r, start + 1 : middle] = prompt_weight
            weights[r, middle:end] = 1.0
            start = end
    return Packed(tokens, positions, segments, weights)


def encode_examples(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    stop_id: int,
    *,
    prompt_tokens: int,
    response_tokens: int,
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Encodes every example as a call of the workflow would be.

    Args:
        tokenizer: The model's.
        examples: Prompts and responses.
        stop_id: Ends every response.
        prompt_tokens: Longest prompt; it is cut as in training.
        response_tokens: Longest response, the stop id included.

    Returns:
        Prompt ids and response ids of each.

    Raises:
        RecipeError: A response is longer than ``response_tokens``.
    """
    encoded = []
    for example in examples:
        prompt = fit_prompt(tokenizer, example.prompt, prompt_tokens).ids
        response = [*tokenizer.encode_text(example.response), stop_id]
        if len(response) > response_tokens:
            raise RecipeError(
                f"a response must have at most {response_tokens} tokens, got {len(response)}: "
                f"{example.response!r}"
            )
        encoded.append((prompt, response))
    return encoded


def train_supervised(
    model: Qwen,
    data: Packed,
    *,
    steps: int,
    batch_rows: int,
    lr: float,
    seed: int,
    vocab_size: int,
    on_step: Callable[[int, float], None] | None = None,
) -> Qwen:
    """Next-token training by AdamW under a warm-up and cosine schedule.

    Args:
        model: Where it starts.
        data: Packed sequences [S, T].
        steps: Optimiser steps.
        batch_rows: Sequences of a step.
        lr: Largest learning rate.
        seed: Of the order of the sequences.
        vocab_size: Ids that can be sampled, V.
        on_step: Called with every tenth step and its weighted mean loss.

    Returns:
        The trained model.
    """
    graphdef, params = split_params(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(steps // 20, 1), steps, lr / 50)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
    )

    vocabulary = Vocabulary(vocab_size)

    @jax.jit
    def step_fn(params, opt_state, tokens, positions, segments, weights):
        weights = weights / jnp.sum(weights)

        def vocabulary_stage(hidden, head, vocab_axis):
            scores, d_hidden, d_head = token_gradients(
                hidden, tokens, weights > 0, -weights, jnp.zeros_like(weights), head, vocab_axis,
                vocabulary,
            )  # fmt: skip
            return d_hidden, d_head, -jnp.sum(weights * scores.logp)

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, loss = add_gradients(
            graphdef, params, zeros, tokens, positions, segments, vocabulary_stage, PLAIN
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for step in range(steps):
        while len(order) < batch_rows:
            order += rng.permutation(len(data.tokens)).tolist()
        chosen, order = order[:batch_rows], order[batch_rows:]
        batch = tuple(
            a[chosen] for a in (data.tokens, data.positions, data.segment_ids, data.weights)
        )
        params, opt_state, loss = step_fn(params, opt_state, *batch)
        if on_step is not None and step % 10 == 9:
            on_step(step + 1, float(loss))
    return nnx.merge(graphdef, params)
