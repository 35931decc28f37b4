"""Python environments of the peers that a benchmark compares with, one for each peer.

A peer pins versions that this project does not share, so each gets a venv under
``.benchmark_envs/`` in the project's root. It is made on first use and again when its pins change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".benchmark_envs"
REQUIREMENTS = {
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2"),
    "torch": ("torch==2.13.0", "transformers==5.24.0"),
}
OUTPUT_LINES = 15


class PeerError(RuntimeError):
    """A learner could not be installed or run; ``output`` holds the end of what it printed."""

    exit_code = 2

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output


def last_lines(text: str) -> str:
    """The end of a program's output, for an error message."""
    return "\n".join(text.rstrip().splitlines()[-OUTPUT_LINES:])


def peer_python(
    peer: str,
    *,
    folder: Path = FOLDER,
    say: Callable[[str], None] = print,
    base: str = sys.executable,
) -> Path:
    """The interpreter of a peer's environment, which is made where it is not there.

    The stamp is written last, so an environment whose installation was cut short is made anew.

    Args:
        peer: A key of REQUIREMENTS.
        folder: Holds all environments.
        say: Called before a new one is made.
        base: The interpreter that makes it.

    Raises:
        PeerError: It cannot be made; with the end of the installer's output.
    """
    home = folder / peer
    python = home / "bin" / "python"
    stamp = home / "requirements.installed"
    requirements = "\n".join(REQUIREMENTS[peer]) + "\n"
    if python.exists() and stamp.exists() and stamp.read_text() == requirements:
        return python
    say(f"making {home}: {' '.join(REQUIREMENTS[peer])} (several minutes)")
    if home.exists():
        shutil.rmtree(home)
    for command in (
        [base, "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--disable-pip-version-check", *REQUIREMENTS[peer]],
    ):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        if done.returncode:
            raise PeerError(
                f"{peer}: {' '.join(command[2:4])} ended with code {done.returncode}, so there is "
                f"no {home}",
                last_lines(done.stdout),
            )
    stamp.write_text(requirements)
    return python
