"""
Starts the command line. Two settings must stand before torch is imported, which takes seconds and which any module of
the package does; so this module is beside the package, and imports nothing but the standard library.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None, program: str = "hf-vaswani") -> int:
    """
    Runs one verb.

    Args:
        argv (`Sequence[str]`, *optional*): the command line without the program's name; by default the process's own.
        program (`str`): the program's name in help and errors.

    Returns:
        `int`: the exit code, as that of `hf_vaswani.cli.main`.
    """
    before_imports()
    from hf_vaswani import cli

    after_imports()
    try:
        return cli.main(argv, program)
    except KeyboardInterrupt:
        return 130


def before_imports() -> None:
    """Threads that wait are to sleep, and Ctrl-C ends the imports without a word."""
    # By default they spin, and a second busy program on the machine then makes training several times slower. OpenMP
    # reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A KeyboardInterrupt would show wherever it is, and some modules take it for an error of their own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def after_imports() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, _: FrameType | None) -> None:
    # Nothing has been written yet that could be half.
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
