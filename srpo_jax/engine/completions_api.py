"""The OpenAI completions protocol: its requests and answers, and the engine's own for each.

Beside OpenAI's fields: ``prompt`` may be token ids, ``top_k``, ``return_token_ids`` (adds
``token_ids`` and ``prompt_token_ids``), ``include_stop_str_in_output``, ``skip_special_tokens`` and
``stop_token_ids`` as in vLLM, and ``srpo_key`` (two 32-bit numbers, the engine's own request key)
instead of ``seed``. Null is the same as a field left out. Fields that would change the sampling and
are not supported are refused unless neutral.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from envs.http_server import check_nesting
from envs.text_files import short
from models.tokenizer import ChatTokenizer
from srpo_jax.engine.requests import TOP_LOGPS, Completion, Request
from srpo_jax.engine.stop_strings import text_before
from srpo_jax.recipe.errors import nearest

MAX_BODY_BYTES = 8 << 20  # a million token ids
MAX_TOKEN_BYTES = 256  # of text in each token of a whole prompt: the longest are runs of spaces
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
MAX_MESSAGE_CHARACTERS = 500  # of an error, which may quote the request
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class RefusedRequest(HTTPException):
    """A request that is not served: one line, the HTTP status and OpenAI's error code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(status, message)
        self.code = code


def error_content(error: HTTPException) -> bytes:
    """The body of the answer to a request that failed, in OpenAI's shape."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = " ".join(error.detail[:MAX_MESSAGE_CHARACTERS].split())
    content = {
        "message": message,
        "type": kind,
        "param": None,
        "code": getattr(error, "code", None),
    }
    return json.dumps({"error": content}).encode()  # ASCII: half a surrogate pair may be quoted


# ---- requests ------------------------------------------------------------------------------------


def _only(neutral: Any) -> AfterValidator:
    """A field that is understood but not supported: only its neutral value is taken."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value != neutral:
            raise ValueError(f'"{info.field_name}": only {json.dumps(neutral)} is supported')
        return value

    return AfterValidator(check)


def _prompt(prompt: Any) -> str | list[int]:
    if not isinstance(prompt, str):
        if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
            raise PydanticCustomError("prompt", "neither text nor token ids")
    if not prompt:
        raise ValueError('"prompt" is empty')
    return prompt


def _listed(stop: Any) -> Any:
    return [part for part in [stop] if part] if isinstance(stop, str) else stop


def _few_and_short(stop: list[str]) -> list[str]:
    if len(stop) > MAX_STOPS or any(len(part) > MAX_STOP_CHARACTERS for part in stop):
        raise ValueError(
            f'"stop" can have at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} '
            "characters"
        )
    return stop


def _whole(low: int, high: int, default: int | None) -> Any:
    return Field(default, ge=low, le=high, description=f"a whole number from {low} to {high}")


def _number(low: float, high: float) -> Any:
    return Field(1.0, ge=low, le=high, description=f"a number from {low:g} to {high:g}")


def _switch(default: bool) -> Any:
    return Field(default, description="true or false")


One = Annotated[Any, _only(1)]
Zero = Annotated[Any, _only(0)]
Off = Annotated[Any, _only(False)]
Text = Annotated[str, Field(min_length=1)]
Uint32 = Annotated[int, Field(ge=0, lt=2**32)]


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``.

    A field's description ends the sentence that refuses a wrong value: ``"top_p" must be ...``.
    """

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, description="a name")
    prompt: Annotated[str | list[int], PlainValidator(_prompt)] = Field(
        description="one string or one list of token ids"
    )
    max_tokens: int = _whole(1, 2**31 - 1, DEFAULT_MAX_TOKENS)
    temperature: float = _number(0.0, 100.0)
    top_p: float = _number(1e-6, 1.0)
    top_k: int = _whole(-1, 2**31 - 1, 0)
    stop: Annotated[
        list[Text], FailFast(), BeforeValidator(_listed), AfterValidator(_few_and_short)
    ] = Field([], description="a string or a list of strings, none empty")
    stop_token_ids: Any = []  # checked against the tokenizer's
    seed: int | None = _whole(-(2**63), 2**64 - 1, None)
    srpo_key: list[Uint32] | None = Field(
        None, min_length=2, max_length=2, description="two whole numbers from 0 to 4294967295"
    )
    logprobs: int | None = _whole(0, TOP_LOGPS, None)
    return_token_ids: bool = _switch(False)
    include_stop_str_in_output: bool = _switch(False)
    skip_special_tokens: bool = _switch(True)
    user: Any = None

    n: One = 1
    best_of: One = 1
    stream: Off = False
    echo: Off = False
    suffix: Annotated[Any, _only("")] = ""
    logit_bias: Annotated[Any, _only({})] = {}
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    repetition_penalty: One = 1
    min_p: Zero = 0
    min_tokens: Zero = 0
    ignore_eos: Off = False


def parse_body(data: bytes) -> CompletionRequest:
    """The request that a body holds. Raises RefusedRequest."""
    try:
        check_nesting(data)
        body = json.loads(data, parse_constant=_no_constant)
    except ValueError as error:
        raise RefusedRequest(f"the body must be a JSON object: {error}") from None
    if not isinstance(body, dict):
        raise RefusedRequest(f"the body must be a JSON object, got {short(body)}")
    fields = CompletionRequest.model_fields
    for name in body:
        if name not in fields:
            raise RefusedRequest(f'no field "{name[:64]}", {nearest(name[:64], fields)}')
    try:
        return CompletionRequest.model_validate({k: v for k, v in body.items() if v is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        if problem["type"] == "value_error":
            raise RefusedRequest(str(problem["ctx"]["error"])) from None
        got = short(body[name]) if name in body else "nothing"
        raise RefusedRequest(f'"{name}" must be {fields[name].description}, got {got}') from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def engine_request(body: CompletionRequest, tokenizer: ChatTokenizer, cache_tokens: int) -> Request:
    """The engine's request.

    A text prompt is encoded as it stands: strings of control tokens in it stay text, no chat
    template is applied.

    Args:
        body: The request of the protocol.
        tokenizer: That of the engine's model.
        cache_tokens: The engine's longest prompt and response together. A text that cannot fit is
            refused before it is encoded.

    Raises:
        RefusedRequest: The text is too long, or a stop id is none of the tokenizer's.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        size, most = len(prompt.encode(errors="surrogatepass")), cache_tokens * MAX_TOKEN_BYTES
        if size > most:
            raise RefusedRequest(
                f'"prompt" must have at most {most:,} bytes ({cache_tokens:,} tokens of '
                f"{MAX_TOKEN_BYTES}), got {size:,}"
            )
        prompt = tokenizer.encode_text(prompt)
    stop_ids, known = body.stop_token_ids, tokenizer.stop_ids
    if not isinstance(stop_ids, list) or not all(type(i) is int and i in known for i in stop_ids):
        raise RefusedRequest(f'"stop_token_ids" can only be of {list(known)}')
    seed = secrets.randbits(64) if body.seed is None else body.seed
    low, high = body.srpo_key or (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    return Request(
        prompt_ids=prompt,
        key=(low, high),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        stop_strings=tuple(body.stop),
        top_logps=body.logprobs or 0,
    )


# ---- answers -------------------------------------------------------------------------------------


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None


class Choice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: Logprobs | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(BaseModel):
    """The answer of ``POST /v1/completions``; fields that were not asked for are left unset."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    policy_version: int


class ServedModel(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "srpo_jax"
    max_model_len: int
    policy_version: int


class ModelList(BaseModel):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


def completion_answer(
    body: CompletionRequest, request: Request, done: Completion, tokenizer: ChatTokenizer, name: str
) -> CompletionAnswer:
    """The protocol's answer.

    A stop string that contains the text of a special token is looked for in the text with special
    tokens.

    Args:
        body: What was asked.
        request: What the engine was given for it.
        done: What it gave back.
        tokenizer: That of the engine's model.
        name: The model's name.

    Raises:
        RefusedRequest: 500, the log-probs are not finite.
    """
    if not np.isfinite(done.logps).all():
        raise RefusedRequest("the model gives log-probs that are not finite", 500)
    cuts = () if body.include_stop_str_in_output else request.stop_strings
    choice = Choice(
        index=0,
        text=text_before(done.ids, cuts, tokenizer, special=not body.skip_special_tokens),
        finish_reason=done.stop_reason,
        logprobs=None if body.logprobs is None else _logprobs(done, tokenizer),
    )
    if body.return_token_ids:
        choice.token_ids, choice.prompt_token_ids = done.ids, list(request.prompt_ids)
    prompt, response = len(request.prompt_ids), len(done.ids)
    return CompletionAnswer(
        id=f"cmpl-{secrets.token_hex(12)}",
        object="text_completion",
        created=int(time.time()),
        model=name,
        choices=[choice],
        usage=Usage(
            prompt_tokens=prompt, completion_tokens=response, total_tokens=prompt + response
        ),
        policy_version=done.version,
    )


def _logprobs(done: Completion, tokenizer: ChatTokenizer) -> Logprobs:
    tops = None
    if done.top_ids is not None and done.top_logps is not None:
        tops = [
            {tokenizer.decode([i]): logp for i, logp in zip(*step, strict=True)}
            for step in zip(done.top_ids.tolist(), done.top_logps.tolist(), strict=True)
        ]
    return Logprobs(
        tokens=[tokenizer.decode([i]) for i in done.ids],
        token_logprobs=done.logps.tolist(),
        top_logprobs=tops,
    )
