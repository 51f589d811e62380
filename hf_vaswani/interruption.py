"""Signals that ask a training to stop, and the lock that keeps a second one out of its folder."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """Something that was asked to stop by a signal. Of a training, the text says how to go on."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def stopped_by_sigterm(text: str = "stopped.") -> Iterator[None]:
    """
    SIGTERM ends what happens here as Ctrl-C does, so that what is half written is removed.

    Args:
        text (`str`): what the [`Interrupted`] then says.
    """
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A child that was forked from here, which a pool ends by this signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if _in_a_destructor(frame):
            # Python would drop the error there, and the signal with it: it comes again a moment later.
            threading.Timer(0.05, os.kill, (process, number)).start()
            return
        # Launchers send it more than once; what is half written is being removed by now.
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(text, 128 + number)

    # Only the main thread may ask for signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_a_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def exclusive_run(folder: Path) -> Iterator[None]:
    """
    Keeps a second training out of a run's folder. The system lets go of the lock of a process that was killed.

    Args:
        folder (`Path`): the run's folder, which need not be there yet.

    Raises:
        ValueError: another process is training there.
        OSError: nothing can be written there.
    """
    # Beside the folder, which is not made before the text is known to be readable.
    path = folder.resolve().with_name(f".{folder.resolve().name}.lock")
    lock = FileLock(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # filelock takes a place where it may not write for one where somebody holds the lock.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"{folder} is being trained by another process; name another --run_dir. (If there is none, delete {path}.)"
        ) from error
    except OSError as error:
        raise OSError(f"The folder {folder} cannot be written to; name another --run_dir: {error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


class Interruption:
    """Ctrl-C and SIGTERM: remembered until the running update is done. A second Ctrl-C acts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def __enter__(self) -> "Interruption":
        # Only the main thread may ask for signals.
        here = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if here else ()
        self.before = {number: signal.signal(number, self._remember) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.since = number, now
            logger.info(
                "Stopping after this update, and a validation if one is due; Ctrl-C again stops at once, without a "
                "checkpoint"
            )
        # Launchers pass on what the process group has got already: that is not a second Ctrl-C.
        elif number == signal.SIGINT and now - self.since > 1:
            raise KeyboardInterrupt("stopped at once, and without a checkpoint of this update.")

    def error(self, checkpoint: Path) -> Interrupted:
        """What to raise once everything is in `checkpoint`."""
        number = self.signal or signal.SIGTERM
        return Interrupted(
            f"stopped, with everything in {checkpoint}. The same command again goes on from there.", 128 + number
        )
