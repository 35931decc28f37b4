"""Runs a command in several processes of this machine that train or evaluate together.

For one host with several GPUs a process for each is seldom needed: one process uses all devices of
its host. What a run on several hosts does can be tried out so.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from launch.cli import Parser, entry
from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.processes import COORDINATOR, COUNT, INDEX

GRACE = 15.0  # seconds between the end of one process and that of the others
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    example = "python -m launch.local --processes 2 -- python -m launch.train configs/math.yaml"
    parser = Parser("launch.local", __doc__, example)
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--devices", type=int, metavar="M", help="virtual CPU devices of each (a run on the CPU)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("the following arguments are required: command")
    for name in ("processes", "devices"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise RecipeError(f"--{name} must be at least 1, got {number}")
    return run_processes(command, args.processes, args.devices)


def run_processes(command: list[str], count: int, devices: int | None = None) -> int:
    """Runs ``command`` in ``count`` processes until all have ended.

    Each line of theirs begins with the number of its process. A signal is passed on to all. When
    one ends with an error, the others get GRACE seconds.

    Args:
        command: The program and its arguments.
        count: How many processes.
        devices: Virtual CPU devices of each (None: as the environment says).

    Returns:
        The exit code of the first process that ended with another than 0, else 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, COORDINATOR: f"127.0.0.1:{port}", COUNT: str(count)}
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    children: list[subprocess.Popen[str]] = []
    for index in range(count):
        try:
            child = subprocess.Popen(
                command, env={**environment, INDEX: str(index)}, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            for other in children:
                other.kill()
            raise RecipeError(f"{command[0]}: {error.strerror}") from None
        children.append(child)
    readers = [
        threading.Thread(target=_relay, args=(index, child.stdout), daemon=True)
        for index, child in enumerate(children)
    ]
    for reader in readers:
        reader.start()

    def pass_on(number: int, _: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        code = _wait(children)
    finally:
        for child in children:
            child.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join()
    return code


def _wait(children: list[subprocess.Popen[str]]) -> int:
    first, until = 0, float("inf")
    while any(child.poll() is None for child in children):
        for index, child in enumerate(children):
            if child.poll() and not first:
                first, until = _code(child), time.monotonic() + GRACE
                print(f"process {index} ended with code {first}", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            return first
        time.sleep(0.05)
    return first or next((_code(child) for child in children if child.returncode), 0)


def _code(child: subprocess.Popen[str]) -> int:
    """The exit code, as a shell gives it where a signal ended the process."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _relay(index: int, lines: IO[str]) -> None:
    for line in lines:
        if line.startswith("[Gloo]"):  # who is connected to whom, at every new program
            continue
        print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    entry(main)
