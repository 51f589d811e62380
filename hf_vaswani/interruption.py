"""Ctrl-C, SIGTERM, and the locks that keep a second process out of a run folder or a growing file."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import queues
from pathlib import Path
from types import FrameType
from typing import Any, Self

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

# Signals that ask a program to end. Slurm can send SIGUSR1 some time before it ends or moves a job.
STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal stopped the program. The text is shown to the user; a training's text says how to resume."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def stopped_by_sigterm(text: str = "stopped.") -> Iterator[None]:
    """
    Makes SIGTERM and SIGUSR1 raise [`Interrupted`] within the block, as Ctrl-C raises `KeyboardInterrupt`: unfinished
    files are removed on the way out. None is lost in a destructor, whose errors Python drops.

    Args:
        text (`str`): the text of the error.
    """
    process = os.getpid()

    def again_later(number: int) -> None:
        threading.Timer(0.05, os.kill, (process, number)).start()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process and _in_a_destructor(frame):
            again_later(number)
        else:
            signal.default_int_handler(number, frame)

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A child forked from here inherits this handler; pools end their children with SIGTERM.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if _in_a_destructor(frame):
            again_later(number)
            return
        # Launchers send it more than once; a second one must not interrupt the removal of unfinished files.
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(text, 128 + number)

    # Only the main thread may install signal handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in STOPS}
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _in_a_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


# Seconds that a training may go on after SIGTERM, most of a minute, unless its launcher has been told to wait longer.
GRACE = 50


@contextmanager
def ends_after_sigterm(text: str, grace: float | None = None) -> Iterator[None]:
    """
    Ends the process if the block still runs some time after SIGTERM. Python handles a signal only between two
    instructions of the main thread, which may wait in a library for a batch or another process that never comes.

    Args:
        text (`str`): written to standard error before the end.
        grace (`float`, *optional*): seconds from the signal to the end; by default [`GRACE`], or the time after which
            `torchrun` kills what is still running, if the environment gives it more than that.
    """
    # Only the main thread may do this, and only where a pipe can be woken by a signal.
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    if grace is None:
        told = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        grace = max(GRACE, int(told) if told.isdecimal() else 0)
    out, into = os.pipe()
    os.set_blocking(into, False)
    done = threading.Event()

    def watch() -> None:
        while (number := os.read(out, 1)) not in (b"", bytes([signal.SIGTERM])):
            pass
        os.close(out)
        if number and not done.wait(grace):
            sys.stderr.write(f"\n{text}\n")
            sys.stderr.flush()
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        # The thread reads its end.
        os.close(into)


# A forked child inherits what wakes its parent's thread.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def ignore_signals(_: int) -> None:
    """
    Prepares a worker process, as the `worker_init_fn` of a `DataLoader`.

    It ignores Ctrl-C, SIGTERM and SIGUSR1, which reach every process of a group: the training stops in good order, and
    needs its workers until then. And it ends if it cannot hand over a batch, for example because `/dev/shm` is full:
    by default it would go on without that batch, for which the training would wait forever.
    """
    for number in (signal.SIGINT, *STOPS):
        signal.signal(number, signal.SIG_IGN)
    queues.Queue._on_queue_feeder_error = staticmethod(_end_of_worker)  # type: ignore[attr-defined]


def _end_of_worker(error: Exception, batch: Any) -> None:
    sys.stderr.write(f"A worker process cannot hand over a batch: {error}\n")
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def exclusive(place: Path, patience: float = 0) -> Iterator[None]:
    """
    Holds the lock of a run folder, or of a file that grows, which keeps a second process from writing there. The
    system releases it if the process is killed.

    Args:
        place (`Path`): the folder or file, which need not exist yet.
        patience (`float`): seconds to wait for a process that holds the lock.

    Raises:
        ValueError: another process holds the lock.
        OSError: the lock cannot be written.
    """
    # Beside a run folder, which is created only after the text has been read.
    path = place.resolve().with_name(f".{place.resolve().name}.lock")
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # filelock reports a folder that is not writable as a lock that is held.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise ValueError(
            f"{place} is being written by another process: wait for it, or name another place."
        ) from error
    except OSError as error:
        raise OSError(f"{place} cannot be written to: {error}. Name another place.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


class Interruption:
    """
    Records Ctrl-C, SIGTERM or SIGUSR1 within its block instead of acting on it. A second Ctrl-C raises at once.

    Args:
        notice (`str`): logged at the first signal.
        at_once (`str`): text of the `KeyboardInterrupt` that a second Ctrl-C raises.

    Attributes:
        signal (`int`, *optional*): the first signal that was received.
    """

    def __init__(self, notice: str = "", at_once: str = "") -> None:
        self.notice, self.at_once = notice, at_once
        self.signal: int | None = None

    def __enter__(self) -> Self:
        # Only the main thread may install signal handlers.
        is_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, *STOPS) if is_main else ()
        self.before = {number: signal.signal(number, self._record) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.since = number, now
            if self.notice:
                logger.info(self.notice)
        # Launchers forward the signal that their process group has received already: that is not a second Ctrl-C.
        elif number == signal.SIGINT and now - self.since > 1:
            raise KeyboardInterrupt(self.at_once)


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGUSR1 until the end of the block. A second Ctrl-C raises at once."""
    with Interruption() as interruption:
        yield
    if interruption.signal is not None:
        signal.raise_signal(interruption.signal)
