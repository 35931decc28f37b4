"""transformers' generate on the requests of a Math rollout round, in batches as they come.

The work is a JSON object on stdin: model (a folder), prompts (ids of each request), lengths (tokens
to draw for each), most (tokens of a response that stops where it ends), temperature, stop_ids, rows
(of a batch), repeats. The last line is JSON: tokens_per_second [repeats] of the lengths asked for,
and lengths [requests] of responses that stop where they end, the stop included.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.timing import print_json


def generate(model: torch.nn.Module, work: dict, lengths: list[int], stops: bool) -> list[int]:
    """The lengths of all responses: those asked for, or with ``stops`` up to the first stop id.

    Each batch runs to its longest row; log-probs are computed and let go.
    """
    prompts, rows, stop_ids = work["prompts"], work["rows"], work["stop_ids"]
    model.generation_config.eos_token_id = stop_ids if stops else None
    found = []
    for first in range(0, len(prompts), rows):
        tokens, mask = left_padded(prompts[first : first + rows], stop_ids[0])
        asked = lengths[first : first + rows]
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=mask, do_sample=True, temperature=work["temperature"],
                top_k=0, top_p=1.0, max_new_tokens=max(asked), pad_token_id=stop_ids[0],
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
            responses = out.sequences[:, tokens.shape[1] :]
            log_probs(out.scores, responses)
        ends = stop_ids if stops else []
        found += [length(ids[:n], ends) for ids, n in zip(responses.tolist(), asked, strict=True)]
    return found


def left_padded(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    tokens = [[pad] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def log_probs(scores: tuple[torch.Tensor, ...], responses: torch.Tensor) -> torch.Tensor:
    """[rows, tokens] under the sampled distribution, from each step's scores [rows, vocabulary]."""
    return torch.stack(
        [
            step.gather(1, ids[:, None])[:, 0] - step.logsumexp(1)
            for step, ids in zip(scores, responses.T, strict=True)
        ],
        dim=1,
    )


def length(ids: list[int], stop_ids: list[int]) -> int:
    """The tokens of a response up to and including its first stop id."""
    return next((n for n, token in enumerate(ids, 1) if token in stop_ids), len(ids))


def main() -> None:
    work = json.load(sys.stdin)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    own = generate(model, work, [work["most"]] * len(work["prompts"]), stops=True)  # warms up too
    speeds = []
    for _ in range(work["repeats"]):
        start = time.perf_counter()
        drawn = generate(model, work, work["lengths"], stops=False)
        speeds.append(sum(drawn) / (time.perf_counter() - start))
    print_json({"tokens_per_second": speeds, "lengths": own})


if __name__ == "__main__":
    main()
