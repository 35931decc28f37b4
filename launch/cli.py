"""What every command shares: errors a user can cause become one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


MODULES = "python -m launch."


def as_called(text: str) -> str:
    """A text that names commands as ``python -m launch.NAME``, as the user calls them."""
    return text.replace(MODULES, Parser.prefix)


class Parser(argparse.ArgumentParser):
    """argparse whose usage errors look like the commands' own.

    Attributes:
        prefix: what a command's name follows in help and hints; ``srpo`` sets its own.
    """

    prefix: ClassVar[str] = MODULES

    def __init__(self, module: str, description: str | None, example: str):
        """
        Args:
            module: what ``python -m`` starts.
            description: what the command does; the module's docstring.
            example: a whole command, as ``python -m MODULE ...``.
        """
        self._example = as_called(example)
        super().__init__(
            prog=as_called(f"python -m {module}"),
            description=description,
            epilog=f"example:\n  {self._example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            self.exit(BAD_INPUT, f"error: {missing}: missing; for example: {self._example}\n")
        self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")


def add_recipe_arguments(parser: Parser) -> None:
    """The recipe file and its ``key.path=value`` overrides."""
    parser.add_argument("recipe", help="recipe file, for instance configs/math_smollm2_cpu.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="changes to the recipe"
    )


def add_process_options(parser: Parser) -> None:
    """What joins the processes of one run, where the environment does not say it."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="of process 0, where no TPU slice, Slurm, Open MPI or Kubernetes job says it",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, metavar="N", help="with it: how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="with it: which this is, from 0")


def entry(main: Callable[[], int | None], *, tear_down: bool = True) -> NoReturn:
    """Runs a command and exits with its code.

    Args:
        main: the command; gives its exit code, None for 0.
        tear_down: False: the process ends as soon as the command is done. What it wrote is closed,
            and threads of the runtime that still run, or hang, can no longer abort or hold up its
            end.

    0: done. 2: bad input, said in one line on stderr. 1: something else that is no defect, such as
    a full disk, in one line too. 75: stopped by a signal before its end; the same command goes on
    from there. 130: interrupted, with nothing to go on from. Anything else is a defect and keeps
    its traceback.
    """
    try:
        code = main() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output (head, less) has left
        sys.stderr.close()
        code = 0
    except Exception as error:
        if (failure := exit_code(error)) is None:
            raise
        print(f"error: {message(error)}", file=sys.stderr)
        code = failure
    if not tear_down:
        with contextlib.suppress(OSError, ValueError):  # their reader has left
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# What a path of the user's can be wrong about; other system errors (a full disk) are no input.
_INPUT_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_INPUT_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that a user can cause; None for a defect.

    Such errors carry it as an attribute of their class: the modules that define them load jax.
    """
    if isinstance(error, OSError):
        is_input = isinstance(error, _INPUT_ERRORS) or error.errno in _INPUT_ERRNOS
        return getattr(type(error), "exit_code", BAD_INPUT if is_input else FAILED)
    return getattr(type(error), "exit_code", None)


def message(error: Exception) -> str:
    """An error as one line; a system's error starts with the file that it is about."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(text.split())


def output() -> Console:
    """Standard output. Text that goes to a file or a pipe gets lines that hold whole table rows."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(highlight=False, width=width)


def visible(text: str) -> str:
    """Text as a terminal may get it: control, format and lone surrogate characters as escapes."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else char.encode("unicode_escape").decode()
        for char in text
    )
