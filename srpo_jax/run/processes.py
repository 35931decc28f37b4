"""The processes of one run: who they are, what they agree on, and how they end together.

A run of one process uses the same calls, which then return at once. Several are joined by
``jax.distributed``; small facts go through its coordination service, larger ones over the devices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from srpo_jax.recipe.errors import RecipeError
from srpo_jax.run.stopping import Stopped, StopRequest, leave

HEARTBEAT_SECONDS = 20  # after which a process that is gone is given up
POLL_SECONDS = 0.5
NAMED_AFTER = 30.0  # seconds that others wait for a process until its name is shown
HUNG_AFTER = 1800.0  # and until the run is given up
# How ``launch.local`` tells a process its place.
COORDINATOR, COUNT, INDEX = "SRPO_COORDINATOR", "SRPO_PROCESSES", "SRPO_PROCESS"

GOODBYE_SECONDS = 6.0  # that the first process, which holds the service, gives the others to end

_FAILED, _STOP, _LEAVING = "srpo/failed", "srpo/stop", "srpo/leaving"


class ProcessLost(RuntimeError):
    """Another process of the run failed, or did not come to where all the others wait."""

    exit_code = 1


@contextlib.contextmanager
def joined(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> Iterator[None]:
    """Within, this process is joined to the others of its run, see ``join_processes``.

    They part when all have come to the end. One that fails does not wait for that: its process is
    to end at once.
    """
    join_processes(coordinator, count, index)
    yield
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def join_processes(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Joins this process to the others of its run, before anything else uses jax.

    Without arguments these are the processes that the environment names: a TPU slice, a Slurm, Open
    MPI or Kubernetes job, or ``launch.local``; where it names none, this one stays alone.

    Args:
        coordinator: HOST:PORT of process 0.
        count: How many processes there are.
        index: Which this is, from 0.

    Raises:
        RecipeError: Only some of the arguments are given, they contradict each other, or the
            others do not answer.
    """
    given = (coordinator, count, index)
    if given == (None, None, None):
        found = os.environ.get(COORDINATOR)
        if found is not None:
            coordinator, count, index = found, int(os.environ[COUNT]), int(os.environ[INDEX])
    elif None in given:
        raise RecipeError("--coordinator, --processes and --process go together")
    if count is not None and index is not None and not 0 <= index < count:
        raise RecipeError(f"--process must be from 0 to {count - 1}, got {index}")
    import jax

    if jax.distributed.is_initialized():
        return
    # It would take SIGTERM from StopRequest, whose request reaches all processes too.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, count, index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
    except ValueError as error:
        if coordinator is not None or "should be defined" not in str(error):
            raise RecipeError(f"processes: {' '.join(str(error).split())}") from None
    except RuntimeError as error:
        if coordinator is None and "must be called before" in str(error):
            return  # a program that has used jax is no new process of a job
        raise RecipeError(f"processes: {' '.join(str(error).split())[:300]}") from None


class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        index: This one's, from 0.
        count: How many there are.
        waited: Seconds that this one has waited for others so far.
    """

    def __init__(self) -> None:
        import jax
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self.index, self.count = jax.process_index(), jax.process_count()
        self.waited = 0.0
        self._rounds = itertools.count()
        self._names = itertools.count()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.index == 0

    @property
    def name(self) -> str:
        """This process and its host, for messages."""
        return f"process {self.index} on {socket.gethostname()}"

    def new_counter(self) -> str:
        """A name for ``take``. All processes must call this equally often."""
        return str(next(self._names))

    def take(self, counter: str) -> int:
        """The next number of a counter that all processes share, from 0."""
        return self._client.key_value_increment(f"srpo/count/{counter}", 1) - 1

    def least(self, number: int | None) -> int | None:
        """The least of all processes' numbers; None where one has none. All must call this."""
        said = self.agree("" if number is None else str(number))
        return None if "" in said else min(map(int, said))

    def agree(self, value: str) -> list[str]:
        """What every process says, in their order. All must call this equally often.

        Raises:
            ProcessLost: A process failed, or did not come within HUNG_AFTER seconds.
        """
        if self.count == 1:
            return [value]
        folder = f"srpo/agree/{next(self._rounds)}"
        self._client.key_value_set(f"{folder}/{self.index}", f"{value}|{self.name}")
        started = told = time.monotonic()
        while True:
            found = dict(self._client.key_value_dir_get(f"{folder}/"))
            said = {int(key.rpartition("/")[2]): text for key, text in found.items()}
            now = time.monotonic()
            if len(said) == self.count:
                self.waited += now - started
                return [said[i].rpartition("|")[0] for i in range(self.count)]
            self._raise_failure()
            missing = ", ".join(str(i) for i in range(self.count) if i not in said)
            if now - started > HUNG_AFTER:
                raise ProcessLost(f"{self.name} waited {HUNG_AFTER:g} s for process {missing}")
            if self.first and now - told > NAMED_AFTER:
                told = now
                print(f"waiting for process {missing}, {now - started:.0f} s", file=sys.stderr)
            time.sleep(min(0.05, 0.002 + (now - started) / 50))

    def gather(self, value: Any) -> list[Any]:
        """A Python value of every process, in their order, on all of them. All must call this.

        It travels over the devices: megabytes are nothing to it.
        """
        if self.count == 1:
            return [value]
        import numpy as np
        from jax.experimental import multihost_utils

        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = [int(size) for size in self.agree(str(len(data)))]
        # Few sizes, so that few programs are compiled for them.
        longest = 1 << max(12, (max(sizes) - 1).bit_length())
        padded = np.zeros(longest, np.uint8)
        padded[: len(data)] = data
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, longest)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _failure(self) -> str | None:
        return _found(self._client, _FAILED)

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise ProcessLost(failure)

    @contextlib.contextmanager
    def ending_together(self, stop: StopRequest) -> Iterator[None]:
        """While entered: a request to stop reaches all processes, and so does a failure.

        A process that fails tells the others why; they end within seconds, whatever they wait for,
        with that cause as their message.
        """
        if self.count == 1:
            yield
            return
        ended = threading.Event()
        watching = threading.Thread(
            target=self._watch, args=(stop, ended), daemon=True, name="processes"
        )
        watching.start()
        try:
            yield
        except BaseException as error:
            ended.set()
            if not isinstance(error, ProcessLost | Stopped):
                text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                with contextlib.suppress(Exception):  # another one was first
                    self._client.key_value_set(_FAILED, f"{self.name} failed: {text}")
            self._say_goodbye()
            raise
        finally:
            ended.set()

    def _say_goodbye(self) -> None:
        """Tells that this process leaves. The first one lets the others leave before: without the
        service that it holds they would end with a stack trace of jax."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_LEAVING}/{self.index}", "")
            until = time.monotonic() + GOODBYE_SECONDS
            while self.first and time.monotonic() < until:
                if len(self._client.key_value_dir_get(f"{_LEAVING}/")) == self.count:
                    time.sleep(0.5)  # from their last word to their end
                    return
                time.sleep(0.05)

    def _watch(self, stop: StopRequest, ended: threading.Event) -> None:
        told = False
        while not ended.wait(POLL_SECONDS):
            try:
                failure = self._failure()
                asked = _found(self._client, _STOP) is not None
            except Exception:  # the coordinator is gone: jax itself ends this process
                return
            if failure is not None and not ended.wait(2.0):  # the main thread may see it itself
                print(f"error: {failure}", file=sys.stderr, flush=True)
                self._say_goodbye()
                leave(1)
            if stop.requested and not told and not asked:
                with contextlib.suppress(Exception):
                    self._client.key_value_set(_STOP, self.name)
                told = True
            if asked:
                stop.ask()


def _found(client: Any, key: str) -> str | None:
    """The value of a key, or None."""
    try:
        return client.key_value_try_get(key)
    except Exception as error:  # jax has no class of its own for it
        if "NOT_FOUND" in str(error):
            return None
        raise
