"""What every command shares: errors a user can cause become one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

BAD_INPUT = 2
STOPPED_EARLY = 75


class Parser(argparse.ArgumentParser):
    """argparse whose usage errors look like the commands' own."""

    def __init__(self, module: str, description: str, example: str):
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")


def add_recipe_arguments(parser: Parser) -> None:
    """The recipe file and its ``key.path=value`` overrides."""
    parser.add_argument("recipe", help="recipe file, for instance configs/math_smollm2_cpu.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="changes to the recipe"
    )


def entry(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and exits with its code.

    0: done; 2: bad input, said in one line on stderr; 75: stopped before its target step, the same
    command goes on from there. Anything else is a defect and keeps its traceback.
    """
    try:
        code = main() or 0
    except KeyboardInterrupt:
        print("stopped; resume with the same command", file=sys.stderr)
        code = STOPPED_EARLY
    except BrokenPipeError:  # the reader of our output (head, less) has left
        sys.stderr.close()
        code = 0
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that a user can cause; None for a defect.

    Such errors carry it as an attribute of their class: the modules that define them load jax.
    """
    if isinstance(error, FileNotFoundError):
        return BAD_INPUT
    return getattr(type(error), "exit_code", None)


def output() -> Console:
    """Standard output. Text that goes to a file or a pipe gets room for whole table rows."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(highlight=False, width=wide)


def visible(text: str) -> str:
    """Text as a terminal may get it: control, format and lone surrogate characters as escapes."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else char.encode("unicode_escape").decode()
        for char in text
    )
