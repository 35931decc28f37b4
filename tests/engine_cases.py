"""Small engines on the golden checkpoints, requests for them, and what they must give."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.convert import load_hf
from models.qwen import split_params
from srpo_jax.engine import Engine, Request, request_key
from srpo_jax.learner.logprob import Vocabulary, token_scores
from tests.make_golden import GOLDEN

VOCAB = 60  # of the checkpoints' 64 embedding rows
CACHE = 96
LONGEST = 64  # prompt


def text(ids) -> str:
    """One letter an id."""
    return "".join(chr(ord("A") + i) for i in ids)


class Letters:
    """Ids as letters, those of ``special`` as special tokens of two characters."""

    def __init__(self, special=()):
        self.special = {i: f"<{text([i])}" for i in special}
        self.special_tokens = frozenset(self.special.values())

    def decode(self, ids, *, special=False):
        shown = {i: name if special else "" for i, name in self.special.items()}
        return "".join(shown.get(i, text([i])) for i in ids)


def checkpoint(name):
    model, config = load_hf(GOLDEN / name, dtype=jnp.float32)
    return config, *split_params(model)


def make_engine(parts, *, stop_ids=(), vocab=VOCAB, **options):
    """Four slots, and pages so small that prompts have several."""
    options = {"slots": 4, "burst": 4, "page": 16, "tokenizer": Letters()} | options
    return Engine(*parts, vocab_size=vocab, stop_ids=stop_ids, cache_tokens=CACHE, **options)


def prompt_of(length, seed=0, vocab=VOCAB):
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()


def new_request(number=0, length=7, max_tokens=12, **options):
    return Request(prompt_of(length, number), request_key(1, 0, number), max_tokens, **options)


def bits(completion):
    return completion.ids, completion.logps.tobytes(), completion.stop_reason, completion.version


def drain(engine):
    done = {}
    while not engine.idle:
        done.update(engine.step())
    return done


@functools.partial(jax.jit, static_argnums=0, static_argnames="vocab_size")
def _score(graphdef, params, tokens, temperature, *, vocab_size):
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = model(tokens, positions, jnp.ones_like(tokens))
    everywhere = jnp.ones_like(tokens, bool)
    how = Vocabulary(vocab_size, temperature)
    return token_scores(hidden, tokens, everywhere, *model.head(), how).logp


def learner_logps(parts, prompt_ids, response_ids, temperature):
    """Teacher-forced log-probs of a response, alone in its row, by the learner's own functions."""
    ids = [*prompt_ids, *response_ids]
    tokens = np.zeros((1, CACHE), np.int32)  # what follows is seen by no earlier position
    tokens[0, : len(ids)] = ids
    logps = _score(*parts[1:], tokens, temperature, vocab_size=VOCAB)
    return np.asarray(logps[0, len(prompt_ids) : len(ids)])
