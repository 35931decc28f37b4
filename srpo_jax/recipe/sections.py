"""What the sections of a recipe are made of, and those that say how episodes are sampled and what
their tools ask."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from envs.workflow import QUEUE_SECONDS
from srpo_jax.recipe.servers import server_url

Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _local(path: str) -> str:
    """Refuses ``gs://bucket/x``: as a path it would silently be a local folder called ``gs:``."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path):
        raise ValueError(f"must be a local path (copy or mount it), got {path!r}")
    return path


LocalPath = Annotated[str, AfterValidator(_local)]
ServerUrl = Annotated[str, AfterValidator(server_url)]


class Section(BaseModel):
    """A part of a recipe: immutable, strict on types, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RetrieverConfig(Section):
    """What the search tool asks: ``bm25`` over a corpus in this process, or HTTP servers.

    ``api_key_env``: the environment variable with the token that the servers ask for.
    """

    kind: Literal["bm25", "http"] = "bm25"
    corpus: LocalPath | None = None
    urls: list[ServerUrl] = []
    timeout: Positive = 10.0
    retries: NonNegativeInt = 3
    api_key_env: str | None = None

    @model_validator(mode="after")
    def _source(self) -> RetrieverConfig:
        if self.kind == "bm25" and self.api_key_env is not None:
            raise ValueError("`kind: bm25` asks no server, `api_key_env` is for `kind: http`")
        if self.kind == "bm25" and (self.corpus is None or self.urls):
            raise ValueError("`kind: bm25` needs `corpus` (factbook or a .jsonl file), no `urls`")
        if self.kind == "http" and (not self.urls or self.corpus is not None):
            raise ValueError("`kind: http` needs `urls` (a list of addresses), no `corpus`")
        return self


class EngineMeshConfig(Section):
    """The engine's devices: ``replicas`` (-1: as many as there are devices for), each with its own
    slots and cache, of ``tensor`` devices that share the weights."""

    replicas: int = -1
    tensor: Count = 1

    @model_validator(mode="after")
    def _sizes(self) -> EngineMeshConfig:
        if self.replicas < 1 and self.replicas != -1:
            raise ValueError(
                f"replicas must be at least 1, or -1 for the rest, got {self.replicas}"
            )
        return self


class RemoteConfig(Section):
    """A server of the OpenAI completions protocol to evaluate with: ours (launch.serve), vLLM or
    SGLang, that knows the weights as ``model``.

    ``version``: the policy version that every answer must name (None: any). ``timeout`` seconds
    bound one try, ``retries`` more follow a failed connection. ``api_key_env``: the environment
    variable that holds the server's key.
    """

    url: ServerUrl
    model: str
    version: NonNegativeInt | None = None
    timeout: Positive = 600.0
    retries: NonNegativeInt = 3
    max_concurrent: Count = 64
    api_key_env: str | None = None


class RolloutConfig(Section):
    """How episodes are sampled. Tokens are per call; a response ends after one of ``stop_strings``,
    which may be or contain special tokens.

    ``slots`` is the engine's batch on each replica of ``mesh`` (None: as many devices a replica as
    the weights need); ``cache_tokens`` the size of a replica's cache (None: the longest call in
    every slot, as far as there is memory), of which ``stored_tokens`` may keep prompts that no call
    reads now (None: whatever is free). ``dtype`` is that of decoding (None: the model's); where it
    is not the learner's, ``policy/sampler_gap`` tells what that costs and ``objective.sampler_cap``
    corrects for it. With ``remote`` an evaluation samples from a server, and loads no weights.

    ``episode_seconds`` and ``tool_seconds`` (of each tool call and reward) count from the start of
    the service: waiting for a slot of the engine or for a thread is no part of them, and one such
    wait may take ``queue_seconds``. What is over a limit is dropped and counted as
    ``episodes/failed_`` episode_timeout, tool_timeout, queue_timeout or tool_queue.
    """

    tasks_per_step: Count
    group_size: Count
    prompt_tokens: Count
    response_tokens: Count
    temperature: Positive = 1.0
    slots: Count
    burst: Count = 16
    cache_tokens: Count | None = None
    stored_tokens: NonNegativeInt | None = None
    dtype: Dtype | None = None
    mesh: EngineMeshConfig | None = None
    remote: RemoteConfig | None = None
    episode_seconds: Positive = 600.0
    tool_seconds: Positive = 30.0
    queue_seconds: Positive = QUEUE_SECONDS
    truncated: Literal["keep", "penalise", "drop_event"] = "keep"
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    thinking: bool = False
    max_failed_fraction: Fraction = 0.5

    @model_validator(mode="after")
    def _engine_or_remote(self) -> RolloutConfig:
        local = ("cache_tokens", "stored_tokens", "dtype", "mesh")
        given = [name for name in local if getattr(self, name) is not None]
        if self.remote is not None and given:
            raise ValueError(f"`{given[0]}` is of an engine in this process: not with `remote`")
        return self
