"""What SIGTERM and Ctrl-C do to a run.

The first asks it to stop: an update or a save in progress is finished, anything else is abandoned,
the last complete step is saved. The second ends the process at once; files are written whole, so
nothing is left half-written.

Handlers only take note. One that raised would raise wherever the main thread is: in a callback of
the compiler the exception is lost, and in the middle of an update it would leave half a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

STOPPED = 75  # the exit code of a run that was stopped: the same command goes on from there
GRACE = 4.0  # seconds until a process that is busy with what may be abandoned ends without it

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Work was abandoned because the run was asked to stop."""

    exit_code = STOPPED


def no_end() -> None:
    """There is nothing to save or say."""


class StopRequest:
    """A context manager: while it is entered, SIGTERM and SIGINT ask the run to stop.

    Outside the main thread there are no handlers: the caller calls ``ask``.

    Args:
        owns_process: A command's own process: it ends with code 75 after ``grace`` seconds even
            where the main thread cannot (it compiles, or waits in a call), and at once on a second
            signal. Else it is the caller's (a notebook's): a second signal raises
            KeyboardInterrupt.
        grace: Seconds.

    Attributes:
        requested: Whether the run was asked to stop.
        on_end: Called before the process ends in the main thread's place: saves what there is.
    """

    def __init__(self, *, owns_process: bool = False, grace: float = GRACE):
        self.requested = False
        self.on_end: Callable[[], None] = no_end
        self._owns_process, self._grace = owns_process, grace
        self._previous: dict[int, Any] = {}
        self._busy = threading.RLock()  # held by who must not be cut off, and by who ends it all
        self._wakeup: tuple[socket.socket, int] | None = None  # and the one before it

    def ask(self) -> None:
        """Asks the run to stop, as a signal does."""
        self.requested = True

    def check(self) -> None:
        """Raises Stopped once the run was asked to stop."""
        if self.requested:
            raise Stopped("the run was asked to stop")

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """What is done within is finished, whatever signal comes (but for a second one)."""
        with self._busy:
            yield

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._owns_process:
            # Python's own handlers wait for the main thread to leave a call into the compiler; the
            # byte that every signal writes here does not.
            read, write = socket.socketpair()
            write.setblocking(False)
            previous = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
            self._wakeup = write, previous
            threading.Thread(target=self._watch, args=(read,), daemon=True, name="signals").start()
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._wakeup is not None:
            write, previous = self._wakeup
            signal.set_wakeup_fd(previous)
            write.close()  # the watching thread reads the end of the stream
            self._wakeup = None

    def _handle(self, *_: object) -> None:
        if self.requested and not self._owns_process:
            raise KeyboardInterrupt
        self.ask()

    def _watch(self, signals: socket.socket) -> None:
        """Sees every signal at once, also while the main thread is in a call into the compiler."""
        with signals:
            if not _next_signal(signals):
                return
            self.ask()
            signals.settimeout(self._grace)
            try:
                second = _next_signal(signals)
            except TimeoutError:
                threading.Thread(target=self._end, daemon=True).start()
                signals.settimeout(None)
                second = _next_signal(signals)
            if second:
                leave(STOPPED)

    def _end(self) -> None:
        """Ends the process in the main thread's place, once that is in nothing to be finished."""
        with self._busy:
            code = STOPPED
            try:
                self.on_end()
            except Exception as error:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
                code = 1
            leave(code)


def _next_signal(signals: socket.socket) -> bool:
    """Waits for one of our signals. False: the stream has ended, there will be none."""
    while number := signals.recv(1):
        if number[0] in _SIGNALS:
            return True
    return False


def leave(code: int) -> NoReturn:
    """Ends the process here and now, without waiting for any thread."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(code)
