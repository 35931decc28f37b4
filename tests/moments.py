"""``launch.train`` that sends itself signals at a named moment:
``python -m tests.moments MOMENT SIGNALS recipe.yaml [key.path=value ...]``.

MOMENT: one of MOMENTS, or seconds after the start, or (``+1.5``) after that of the first rollout.
SIGNALS: ``TERM``, or ``INT,TERM`` for two of them with a short time between.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MOMENTS = (
    "imports", "start-up", "model load", "first compile", "rollout", "update", "sync",
    "evaluation", "save", "checksums", "export",
)  # fmt: skip
BETWEEN = 0.3  # seconds between two signals


def fire(signals: list[str]) -> None:
    print(f"signal at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.Signals[f"SIG{signals[0]}"])
    for name in signals[1:]:
        time.sleep(BETWEEN)
        print(f"signal at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def arm(moment: str, signals: list[str]) -> None:
    """Makes the call that is the moment send the signals, once."""

    def send() -> None:
        if len(signals) == 1:
            fire(signals)
        else:  # the second one comes while the first one's consequences are under way
            threading.Thread(target=fire, args=(signals,), daemon=True).start()
            time.sleep(BETWEEN / 2)

    if moment == "imports":
        send()
        return
    import srpo_jax.run.checkpoint
    from srpo_jax import trainer
    from srpo_jax.engine import Engine
    from srpo_jax.run import build as run_parts

    def at(
        owner: Any, name: str, nth: int, *, after: bool = False, do: Callable[[], None] = send
    ) -> None:
        plain, calls = getattr(owner, name), []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == nth and not after:
                do()
            result = plain(*args, **kwargs)
            if len(calls) == nth and after:
                do()
            return result

        setattr(owner, name, wrapped)

    def within(name: str, nth: int) -> None:
        """At the third step of the engine within the ``nth`` call of a function of the trainer."""
        plain, step, calls, steps = getattr(trainer, name), Engine.step, [], []

        def wrapped(*args: Any) -> Any:
            calls.append(1)
            steps.clear()
            return plain(*args)

        def counted(engine: Engine) -> Any:
            steps.append(1)
            if len(calls) == nth and len(steps) == 3:
                calls.append(1)
                send()
            return step(engine)

        setattr(trainer, name, wrapped)
        Engine.step = counted

    def compile_for_long(engine: Engine) -> Any:
        send()
        # Like a compile, it lets other threads run and returns to Python for no signal.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

    match moment:
        case "start-up":
            at(run_parts, "task_sets", 1)
        case "model load":
            at(run_parts, "load_hf", 1)
        case "first compile":
            Engine.step = compile_for_long
        case "rollout":
            within("sample_step", 2)
        case "evaluation":
            within("evaluate", 2)
        case "update":
            at(run_parts.Learner, "update", 2)
        case "sync":
            at(run_parts.Parts, "sync", 3)
        case "save":
            at(trainer.Checkpoints, "save", 2, after=True)
        case "checksums":
            at(srpo_jax.run.checkpoint, "checksums", 2)
        case "export":
            at(run_parts.Parts, "export", 1)
        case seconds:
            timer = threading.Timer(float(seconds.removeprefix("+")), send)
            timer.daemon = True
            if seconds.startswith("+"):
                at(trainer, "sample_step", 1, do=timer.start)
            else:
                timer.start()


def main(moment: str, signals: str, *arguments: str) -> None:
    from launch import train
    from launch.cli import entry

    def armed(*args: Any, **kwargs: Any) -> Any:
        """In place of the first thing that the command does once it minds signals."""
        arm(moment, signals.split(","))
        return load_recipe(*args, **kwargs)

    import srpo_jax.recipe.recipe

    load_recipe, srpo_jax.recipe.recipe.load_recipe = srpo_jax.recipe.recipe.load_recipe, armed
    entry(lambda: train.main(list(arguments)), tear_down=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
