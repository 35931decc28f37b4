"""The generation engine: token ids in, token ids and float32 log-probs out."""

from srpo_jax.engine.engine import Engine
from srpo_jax.engine.requests import Completion, PromptTooLong, Request, request_key

__all__ = ["Completion", "Engine", "PromptTooLong", "Request", "request_key"]
