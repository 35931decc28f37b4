"""Makes the embedded checkpoint: a tiny model taught every role's format by transcripts.

The transcripts are episodes of the recipes' own workflows and training tasks, played by a teacher
that errs in the stated share of its outputs (a wrong sum, a wrong query, an early yes).
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from launch.cli import Parser, entry
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.paths import find_model
from srpo_jax.recipe.recipe import Recipe, load_recipe

RECIPES = ("configs/quickstart_math.yaml", "configs/quickstart_search.yaml")
LENGTH = 256  # tokens of a packed sequence


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.warm_start",
        __doc__,
        "python -m launch.warm_start my_tiny_team --tokens 7.5e6",
    )
    parser.add_argument("target", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--init", metavar="FOLDER", help="go on from this model and tokenizer")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="whose roles are taught")
    parser.add_argument(
        "--poor", nargs="+", type=float, default=[0.55, 0.15],
        help="share of poor outputs, one for each recipe",
    )  # fmt: skip
    parser.add_argument("--episodes", nargs="+", type=int, default=[7000, 9000])
    parser.add_argument("--tokens", type=float, default=7.5e6, help="tokens to train on")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch-rows", type=int, default=32, help=f"sequences of {LENGTH} tokens")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    recipes = [load_recipe(path) for path in args.recipes]
    for name in ("poor", "episodes"):
        if len(getattr(args, name)) != len(recipes):
            raise RecipeError(
                f"--{name} must have {len(recipes)} values, one for each recipe, got "
                f"{len(getattr(args, name))}"
            )
    _check(args, recipes)
    warm_start(recipes, args)
    return 0


def _check(args: Any, recipes: list[Recipe]) -> None:
    """Refuses what would only fail after the training.

    Raises:
        RecipeError: an option is out of its range, or the target cannot be written.
    """
    if os.path.lexists(args.target):
        if not args.target.is_dir() or any(args.target.iterdir()):
            raise RecipeError(f"{args.target}: exists and is not an empty folder")
    parent = next(p for p in args.target.absolute().parents if os.path.lexists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RecipeError(f"{args.target}: nothing can be written into {parent}")
    if args.init is not None:
        from models.convert import load_config
        from models.tokenizer import ChatTokenizer

        args.init = find_model(args.init)
        load_config(args.init)
        ChatTokenizer(args.init)
    for poor in args.poor:
        if not 0 <= poor <= 1:
            raise RecipeError(f"--poor must be in 0 .. 1, got {poor:g}")
    for name in ("episodes", "batch_rows", "lr"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if not 0 < value < math.inf:
                raise RecipeError(f"--{name.replace('_', '-')} must be positive, got {value:g}")
    least = 40 * args.batch_rows * LENGTH
    if not least <= args.tokens < math.inf:
        raise RecipeError(f"--tokens must be at least {least} (40 steps), got {args.tokens:g}")
    if args.seed < 0:
        raise RecipeError(f"--seed must be 0 or more, got {args.seed}")
    if args.vocab < 300:
        raise RecipeError(
            f"--vocab must be at least 300 (256 bytes and control tokens), got {args.vocab}"
        )
    for recipe in recipes:
        if recipe.workflow.name is None:
            raise RecipeError(f"{recipe.name}: there are teachers for math and search only")


def warm_start(recipes: list[Recipe], args: Any) -> None:
    """Trains the tiny model on transcripts of the recipes' workflows and writes it.

    Args:
        recipes: whose roles are taught.
        args: the command's options, checked.
    """
    import jax.numpy as jnp
    import numpy as np
    from rich.progress import Progress

    from models.convert import load_hf, save_hf
    from models.tokenizer import ChatTokenizer
    from srpo_jax.warm_start import encode_examples, pack_examples, train_supervised

    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        examples = []
        for recipe, poor, episodes in zip(recipes, args.poor, args.episodes, strict=True):
            bar = progress.add_task(f"{recipe.workflow.name} transcripts", total=episodes)
            examples.append(_examples(recipe, poor, episodes, args.seed, progress, bar))
        tokenizer, start = (
            (ChatTokenizer(args.init), load_hf(args.init, dtype=jnp.float32)[0])
            if args.init
            else _from_scratch(examples, scratch, args)
        )
        encoded = []
        for recipe, group in zip(recipes, examples, strict=True):
            encoded += encode_examples(
                tokenizer, group, tokenizer.stop_ids[-1],
                prompt_tokens=recipe.rollout.prompt_tokens,
                response_tokens=recipe.rollout.response_tokens,
            )  # fmt: skip
        data = pack_examples(encoded, LENGTH, 0.1, np.random.default_rng(args.seed))
        steps = int(args.tokens) // (args.batch_rows * LENGTH)
        progress.console.print(
            f"{len(encoded)} examples, {data.tokens.size} tokens; {steps} steps of "
            f"{args.batch_rows * LENGTH} tokens"
        )
        bar = progress.add_task("training", total=steps)

        def on_step(step: int, loss: float) -> None:
            progress.update(bar, completed=step, description=f"training, loss {loss:.4f}")
            if step % 100 == 0:
                progress.console.print(f"step {step}/{steps}  loss {loss:.4f}")

        model = train_supervised(
            start, data, steps=steps, batch_rows=args.batch_rows,
            lr=args.lr, seed=args.seed, vocab_size=tokenizer.vocab_size, on_step=on_step,
        )  # fmt: skip
        save_hf(model, args.target, tokenizer_from=tokenizer.folder, dtype=jnp.bfloat16)


def _from_scratch(examples: list, folder: Path, args: Any) -> tuple:
    """A tokenizer trained on the examples, and a random model."""
    from flax import nnx

    from models.qwen import Qwen
    from models.tiny import tiny_config, train_tokenizer
    from models.tokenizer import ChatTokenizer

    texts = [e.prompt.text() + e.response for group in examples for e in group[:20000]]
    systems = sorted({e.prompt.system for group in examples for e in group})
    config = tiny_config(args.vocab)
    train_tokenizer(folder, texts + systems * 100, config)
    return ChatTokenizer(folder), Qwen(config, rngs=nnx.Rngs(args.seed))


def _examples(recipe: Recipe, poor: float, episodes: int, seed: int, progress, bar) -> list:
    """One example of every distinct prompt of an event, over ``episodes`` episodes."""
    from envs.built_in import WORKFLOWS, load
    from srpo_jax.recipe.plugins import build_workflow
    from srpo_jax.recipe.tasks import task_sets
    from srpo_jax.warm_start import Teacher, transcripts

    built_in = WORKFLOWS[str(recipe.workflow.name)]
    teacher: Teacher = load(built_in.teacher)
    tasks = task_sets(recipe).train
    order = random.Random(seed)
    chosen = [tasks[order.randrange(len(tasks))] for _ in range(episodes)]
    workflow = build_workflow(recipe)
    return list(
        transcripts(
            workflow, chosen, teacher, poor=poor, seed=seed,
            rewrite=load(built_in.rewrite) if built_in.rewrite else None,
            on_episode=lambda: progress.advance(bar),
        )
    )  # fmt: skip


if __name__ == "__main__":
    entry(main)
