"""Trains what a recipe says, or goes on where its run folder stopped."""

from __future__ import annotations

from launch.cli import Parser, add_process_options, add_recipe_arguments, entry
from srpo_jax.run.processes import joined
from srpo_jax.run.stopping import StopRequest


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.train",
        __doc__,
        "python -m launch.train configs/math_smollm2_cpu.yaml trainer.steps=4 optimizer.lr=3e-6",
    )
    add_recipe_arguments(parser)
    add_process_options(parser)
    args = parser.parse_args(argv)
    # Entered before the slow imports: a signal that comes during these is taken note of.
    with StopRequest(owns_process=True) as stop:
        from srpo_jax.recipe.recipe import load_recipe

        recipe = load_recipe(args.recipe, args.overrides)
        with joined(args.coordinator, args.processes, args.process):
            from srpo_jax import trainer

            return trainer.run(recipe, stop=stop)


if __name__ == "__main__":
    entry(main, tear_down=False)
