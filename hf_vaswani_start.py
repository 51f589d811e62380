"""
The entry point of `hf-vaswani` and `train.py`.

Importing the package imports torch and transformers, which takes seconds: two settings must be made before, and help
does without. This module is therefore outside the package, and imports only the standard library.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from types import FrameType

# Options that end the program before anything of torch is needed.
HELP = {"-h", "--help", "--version"}


def main(argv: Sequence[str] | None = None, program: str = "hf-vaswani") -> int:
    """
    Runs one verb of the command line.

    Args:
        argv (`Sequence[str]`, *optional*): the command line without the program's name; by default `sys.argv[1:]`.
        program (`str`): the program's name in help and errors.

    Returns:
        `int`: the exit code of `hf_vaswani.cli.main`.
    """
    before_imports()
    # Words behind "--" are no options.
    if HELP & set(takewhile(lambda word: word != "--", sys.argv[1:] if argv is None else argv)):
        _skip_imports()
    from hf_vaswani import cli

    after_imports()
    try:
        return cli.main(argv, program)
    except KeyboardInterrupt:
        return 130


def before_imports() -> None:
    """Makes waiting threads sleep, and makes Ctrl-C end the imports silently."""
    # By default, OpenMP's waiting threads spin, which makes training several times slower beside another busy program.
    # The variable is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A KeyboardInterrupt would print a traceback, and some modules turn it into an error of their own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def after_imports() -> None:
    """Makes Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _skip_imports() -> None:
    """Makes the package importable without what its `__init__` imports."""
    spec = importlib.util.find_spec("hf_vaswani")
    if spec is not None:
        sys.modules.setdefault("hf_vaswani", importlib.util.module_from_spec(spec))


def _leave(number: int, _: FrameType | None) -> None:
    # Nothing has been written yet, so no file can be incomplete.
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
