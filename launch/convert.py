"""Converts checkpoints between Hugging Face's layout and Flax (Orbax).

to-flax reads a Hugging Face folder or a hub name. to-hf reads what to-flax wrote, or what training
saved: a run's folder (its latest checkpoint), its "best" folder, or one step of either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.cli import Parser, entry

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> int:
    example = "python -m launch.convert to-hf runs/math/best exported"
    parser = Parser("launch.convert", __doc__, example)
    parser.add_argument("direction", choices=("to-flax", "to-hf"))
    parser.add_argument("source", help="a folder; for to-flax also a hub name (Qwen/Qwen3-4B)")
    parser.add_argument("target", help="a new or empty folder")
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="of the files; by default nothing is cast, but for what training saved: it gets the "
        "recipe's model.export_dtype, or each tensor's dtype in the checkpoint the run began with",
    )  # fmt: skip
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    args = parser.parse_args(argv)

    from models.checkpoint_files import read_config
    from models.convert import load_hf, save_hf
    from models.flax_folder import load_flax, load_params, save_flax
    from models.hub import resolve_checkpoint
    from srpo_jax.recipe.paths import find_model

    if args.direction == "to-flax":
        tokenizer_from = resolve_checkpoint(find_model(args.source), revision=args.revision)
        model, _ = load_hf(tokenizer_from, dtype=args.dtype)
        save_flax(model, args.target, tokenizer_from=tokenizer_from)
    else:
        run, step = find_training_checkpoint(Path(args.source))
        if run is None:
            tokenizer_from = Path(args.source)
            model, _ = load_flax(args.source, dtype=args.dtype)
            dtype = args.dtype
        else:
            tokenizer_from, dtype = _starting_point(run)
            dtype = args.dtype or dtype
            _check_sums(step)
            model = load_params(step, read_config(tokenizer_from))
            print(f"read {step}")
        save_hf(model, args.target, tokenizer_from=tokenizer_from, dtype=dtype)
    print(f"wrote {args.target}: {model.config.model_type}, {model.config.num_layers} layers")
    return 0


def find_training_checkpoint(source: Path) -> tuple[Path | None, Path]:
    """The run and the checkpoint that a path stands for.

    Args:
        source: a run's folder (its latest checkpoint is meant), its ``checkpoints`` or ``best``
            folder, one step of either, or something else.

    Returns:
        The run's folder, None where there is none, and the folder of the step.

    Raises:
        FileNotFoundError: the run has no checkpoint.
    """
    for run in (source, source.parent, source.parent.parent):
        if not (run / "recipe.yaml").is_file():
            continue
        store = source / "checkpoints" if run == source else source
        if store.name.isdecimal():
            return run, store
        steps = [path for path in store.glob("*") if path.name.isdecimal()]
        if not steps:
            raise FileNotFoundError(f"{store}: holds no checkpoint")
        return run, max(steps, key=lambda path: int(path.name))
    return None, source


def _check_sums(step: Path) -> None:
    """Refuses a run's checkpoint of which a file is not the one that was written.

    Raises:
        CheckpointError: it names the file.
    """
    from models.config import CheckpointError
    from srpo_jax.run.checkpoint import DamagedCheckpoint, verify

    try:
        verify(step)
    except DamagedCheckpoint as error:
        raise CheckpointError(str(error)) from None


def _starting_point(run: Path) -> tuple[Path, Any]:
    """The checkpoint folder that a run started from, and the dtype or dtypes of an export.

    Raises:
        RecipeError: the run's recipe.yaml is none that a run wrote.
    """
    from models.checkpoint_files import stored_dtypes
    from models.hub import resolve_checkpoint
    from srpo_jax.recipe.errors import RecipeError
    from srpo_jax.recipe.paths import find_model
    from srpo_jax.recipe.yaml import read_yaml
    from srpo_jax.run.folder import recorded_model

    model = read_yaml(run / "recipe.yaml").get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str):
        raise RecipeError(f"{run / 'recipe.yaml'}: not the recipe of a run (no model.path)")
    folder = recorded_model(run)
    if folder is None:
        folder = resolve_checkpoint(find_model(model["path"]), revision=model.get("revision"))
    return folder, model.get("export_dtype") or stored_dtypes(folder)


if __name__ == "__main__":
    entry(main)
