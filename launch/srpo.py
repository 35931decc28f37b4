"""The commands under one name: ``srpo train ...`` is ``python -m launch.train ...``."""

from __future__ import annotations

import difflib
import importlib
import sys

import srpo_jax
from launch.cli import BAD_INPUT, Parser, entry

# In the order in which a newcomer needs them.
COMMANDS = {
    "quickstart": "both workflows end to end on the embedded checkpoint",
    "train": "trains what a recipe says, or resumes",
    "evaluate": "Avg@k, Pass@k, macro means and costs",
    "show": "lists episodes, or prints one with its events",
    "report": "compares runs: a table and curves",
    "rehearse": "one episode of a workflow: prompts and event audit",
    "local": "a command in several processes of this machine",
    "sweep": "a grid of runs with seeds",
    "compile_check": "compiles a recipe for a TPU slice that is not there",
    "convert": "converts checkpoints and exports runs",
    "serve": "the engine over HTTP",
    "serve_retriever": "retrieval over HTTP",
    "prepare_data": "fetches models and data",
    "warm_start": "makes the embedded checkpoint again",
}


def main() -> int:
    """Runs the command that the first argument names. Returns its exit code."""
    if not (arguments := sys.argv[1:]):
        print(_usage(), file=sys.stderr)
        return BAD_INPUT
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(_usage())
        return 0
    if first == "--version":
        print(f"srpo_jax {srpo_jax.__version__}")
        return 0
    name = first.replace("-", "_")
    if name not in COMMANDS:
        (near,) = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)
        print(f"error: no command {first!r}: did you mean {near!r}?", file=sys.stderr)
        return BAD_INPUT
    Parser.prefix = "srpo "
    return importlib.import_module(f"launch.{name}").main(rest) or 0


def _usage() -> str:
    lines = [f"  {name:16} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: srpo COMMAND ...   (srpo COMMAND --help says more)", "", *lines])


def run() -> None:
    """The console script."""
    entry(main)


if __name__ == "__main__":
    run()
