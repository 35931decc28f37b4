"""A grading process: one JSON request a line on standard input, one JSON verdict a line out.

Run by the pool as ``python -m envs.math.grading.worker CPU_SECONDS MEMORY_MB``. A request is
``{"answer": text, "golds": [text, ...]}``, a verdict ``{"correct": bool, "error": text or null}``.
A request that takes more processor time than allowed kills the process: the signal works inside
long arithmetic, where no exception could be raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; its end closes our input
    seconds, megabytes = float(sys.argv[1]), int(sys.argv[2])
    # Verdicts go to a private copy of standard output: what libraries print must not mix in.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from envs.math.grading.compare import same_answer
    from envs.math.grading.numbers import LENGTH_LIMIT, Undecided
    from envs.math.grading.symbolic import Unparsed, equal

    same_answer(r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}", equal)  # builds the parser's tables
    same_answer(r"1+2i", r"\sqrt{8}", equal)
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        correct, error = False, None
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for gold in request["golds"]:
            try:
                correct = same_answer(request["answer"], gold, equal)
            except MemoryError:
                error = "memory limit"
            except Unparsed as unparsed:
                error = f"gold not readable: {unparsed}"
            except Undecided as limit:
                error = str(limit)
            except RecursionError:
                error = f"{LENGTH_LIMIT}: nested too deep for the parser"
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            if correct:
                error = None
                break
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"correct": correct, "error": error}), file=out, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
