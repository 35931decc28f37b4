"""How exact the engine is: the same requests over slot counts and with sharing on and off, their
order, and its log-probs against a forward pass over the whole sequences, in float32 and bfloat16.

The model is the benchmarks' of 54.5 M random weights, or a checkpoint. The last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.ours_engine import model_config
from launch.cli import Parser, entry, output
from models.config import ModelConfig
from models.convert import load_hf
from models.qwen import Qwen, split_params
from models.tokenizer import ChatTokenizer
from srpo_jax.engine import Completion, Engine, Request, request_key
from srpo_jax.engine.sampling import row_uniforms

SLOTS = (32, 7, 1)
LONGEST_PROMPT, LONGEST = 220, 96
LENGTH = LONGEST_PROMPT + LONGEST
MEMBERS = 3  # of an event, for the gap of its ratio

# Asked of a checkpoint.
QUESTIONS = [f"What is {a} {op} {b}?" for op in "+-*" for a, b in ((17, 25), (48, 36), (7, 12))]


class Model(NamedTuple):
    """A model, its parameters, the ids it draws from and those that end a response."""

    config: ModelConfig
    graphdef: Any
    params: dict
    vocab_size: int
    stop_ids: tuple[int, ...] = ()

    def engine(self, **options: Any) -> Engine:
        return Engine(
            self.config, self.graphdef, self.params, vocab_size=self.vocab_size,
            stop_ids=self.stop_ids, cache_tokens=LENGTH, burst=16, **options,
        )  # fmt: skip


class Difference(NamedTuple):
    """Two runs of the same requests: the largest difference of log-probs up to the first differing
    token, how many requests have one, and the largest margin at those (0 where there is none)."""

    logps: float
    requests: int
    margin: float


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "benchmarks.engine_exactness", __doc__,
        "python -m benchmarks.engine_exactness --model data/smollm2",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="FOLDER", help="a checkpoint (default: 54.5 M random weights)"
    )
    args = parser.parse_args(argv)
    if args.model is None:
        config = model_config(LENGTH)
        model = Model(config, *split_params(Qwen(config, rngs=nnx.Rngs(0))), config.vocab_size)
        requests = random_requests(config.vocab_size)
    else:
        model, requests = checkpoint_model(args.model)
    console = Console(stderr=True, highlight=False)
    report, summary = measure(model, requests, say=console.print)
    output().print(report)
    print(json.dumps(summary), flush=True)
    return 0


def random_requests(vocab_size: int) -> list[Request]:
    """28 requests: 4 prompts of five requests each, and 8 that begin as the longest of these."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, vocab_size, n).tolist() for n in (40, 97, 130, LONGEST_PROMPT)]
    shared = [prompts[i // 5] for i in range(20)]
    branches = [prompts[3][:150] + rng.integers(10, vocab_size, 5 * i).tolist() for i in range(8)]
    lengths = rng.integers(8, LONGEST + 1, 28).tolist()
    return [
        Request(prompt, request_key(1, i), n, temperature=0.0 if i % 4 == 3 else 1.0)
        for i, (prompt, n) in enumerate(zip(shared + branches, lengths, strict=True))
    ]


def checkpoint_model(folder: str) -> tuple[Model, list[Request]]:
    """A checkpoint and three requests for each of a few questions: the members of an event."""
    tokenizer = ChatTokenizer(folder)
    model, config = load_hf(folder, dtype=jnp.float32)
    requests = [
        Request(
            tokenizer.encode_chat("", question),
            request_key(1, i, member), LONGEST,
        )
        for i, question in enumerate(QUESTIONS)
        for member in range(MEMBERS)
    ]  # fmt: skip
    stop_ids = tuple(tokenizer.stop_ids)
    return Model(config, *split_params(model), tokenizer.vocab_size, stop_ids), requests


def measure(model: Model, requests: Sequence[Request], say: Any) -> tuple[Table, dict[str, Any]]:
    """Runs everything; the report, and its worst figures."""
    reference = model.engine(slots=SLOTS[0])
    expected = reference.run(requests)
    reversed_run = reference.run(requests[::-1])[::-1]
    some = requests[::3]
    alone = reference.run(some)
    order = sum(
        not same_bits(a, b)
        for a, b in (
            *zip(reversed_run, expected, strict=True),
            *zip(alone, expected[::3], strict=True),
        )
    )
    tokens = sum(len(done.ids) for done in expected)
    table = Table(title=f"{len(requests)} requests, {tokens} tokens, against {SLOTS[0]} slots")
    for name in ("run", "log-probs differ by", "requests differ", "margin at the first token"):
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_row("reverse order, and a third alone", "", f"{order} in bits", "")
    found = []
    for slots in SLOTS:
        for sharing in (True, False):
            if slots == SLOTS[0] and sharing:
                continue
            name = f"{slots} slots, sharing {'on' if sharing else 'off'}"
            say(name)
            done = model.engine(slots=slots, sharing=sharing).run(requests)
            found.append(difference(model, requests, expected, done))
            logps, differing, margin = found[-1]
            table.add_row(
                name, f"{logps:.1e}", f"{differing}", f"{margin:.1e}" if differing else ""
            )
    gaps = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        say(f"{name} against a forward pass")
        done = (
            expected
            if dtype == jnp.float32
            else model.engine(slots=SLOTS[0], dtype=dtype).run(requests)
        )
        gaps[name] = gap_of(model, requests, done)
        largest, mean, event = gaps[name]
        table.add_row(
            f"{name} decoding, a whole forward pass", f"{largest:.1e}", "", f"mean {mean:.1e}"
        )
        table.add_row(
            f"  log-ratio of events of {MEMBERS}",
            f"{event.max():.1e}",
            "",
            f"mean {event.mean():.1e}",
        )
    return table, {
        "logp_difference": max(d.logps for d in found),
        "differing_tokens": sum(d.requests for d in found),
        "largest_margin": max(d.margin for d in found),
        "order_differing": order,
        "gap_float32": gaps["float32"][0],
        "gap_bfloat16": gaps["bfloat16"][0],
    }


def same_bits(a: Completion, b: Completion) -> bool:
    return a.ids == b.ids and a.logps.tobytes() == b.logps.tobytes()


def difference(
    model: Model,
    requests: Sequence[Request],
    expected: Sequence[Completion],
    found: Sequence[Completion],
) -> Difference:
    """``found`` against ``expected``: see Difference."""
    largest, margins = 0.0, []
    for request, one, other in zip(requests, expected, found, strict=True):
        at = next(
            (i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b), None
        )
        end = min(len(one.ids), len(other.ids)) if at is None else at
        largest = max(largest, float(np.abs(one.logps[:end] - other.logps[:end]).max(initial=0)))
        if at is not None:
            logp = sequence_logps(model, request, one.ids)[at]
            uniform = float(row_uniforms(jnp.array([request.key], jnp.uint32), jnp.array([at]))[0])
            greedy = request.temperature == 0
            margins.append(margin(logp, None if greedy else uniform, one.ids[at]))
    return Difference(largest, len(margins), max(margins, default=0.0))


def margin(logps_V: np.ndarray, uniform: float | None, token: int) -> float:
    """How near another token was: for a uniform, the distance in probability to the nearer edge of
    the token's interval of the distribution function; for greedy (None), that of the two best
    log-probs."""
    if uniform is None:
        second, first = np.sort(logps_V)[-2:]
        return float(first - second)
    ends = np.cumsum(np.exp(logps_V.astype(np.float64)))
    begin = ends[token - 1] if token else 0.0
    return float(min(abs(uniform - begin), abs(uniform - ends[token])))


def gap_of(
    model: Model, requests: Sequence[Request], done: Sequence[Completion]
) -> tuple[float, float, np.ndarray]:
    """Largest and mean difference of a token's log-prob from the float32 forward pass, and of the
    log-ratios of events of MEMBERS requests in turn: |sum of differences| / sqrt(MEMBERS)."""
    gaps = []
    for request, completion in zip(requests, done, strict=True):
        logps = sequence_logps(model, request, completion.ids)
        gaps.append(completion.logps - logps[np.arange(len(completion.ids)), completion.ids])
    whole = np.abs(np.concatenate(gaps))
    sums = np.array([gap.sum() for gap in gaps])
    events = sums[: len(sums) // MEMBERS * MEMBERS].reshape(-1, MEMBERS).sum(1)
    return float(whole.max()), float(whole.mean()), np.abs(events) / np.sqrt(MEMBERS)


def sequence_logps(model: Model, request: Request, ids: Sequence[int]) -> np.ndarray:
    """Log-probs [tokens, vocabulary] of a response from one pass over the whole sequence, under the
    request's temperature (greedy: 1)."""
    first = len(request.prompt_ids) - 1
    whole = [*request.prompt_ids, *ids][:-1]
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(whole)] = whole
    segments = (np.arange(LENGTH) < len(whole)).astype(np.int32)[None]
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    at = np.minimum(first + np.arange(LONGEST), LENGTH - 1)
    logits = _logits(model.graphdef, model.params, tokens, positions, segments, at)
    logits = logits[: len(ids), : model.vocab_size] / (request.temperature or 1.0)
    return np.asarray(jax.nn.log_softmax(logits))


@jax.jit(static_argnums=0)
def _logits(graphdef, params, tokens, positions, segments, at):
    model = nnx.merge(graphdef, params)
    return model.logits(model(tokens, positions, segments)[0, at])


if __name__ == "__main__":
    entry(main)
