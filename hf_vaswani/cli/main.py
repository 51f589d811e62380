"""The command line: hf-vaswani VERB. One sentence and exit code 2 for whatever a person can put right."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from hf_vaswani import __version__

from . import convert, evaluate, runs, translate

logger = logging.getLogger("hf_vaswani")


def main(argv: Sequence[str] | None = None, program: str = "hf-vaswani") -> int:
    """
    Runs one verb.

    Args:
        argv (`Sequence[str]`, *optional*): the command line without the program's name; by default the process's own.
        program (`str`): the program's name in help and errors.

    Returns:
        `int`: the exit code: 0, or 2 after bad input.
    """
    if sys.stderr is None:
        # It was closed; libraries write to it.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    # Accelerate warns at each checkpoint that a tied matrix is stored once, as it should be.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The Hub's client tells of each new try, and where nothing has changed.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        with _standard_output():
            options = _parser().parse_args(argv, argparse.Namespace(program=program))
            options.run(options)
        return 0
    except BrokenPipeError:
        # Whoever reads the output has enough, as `head` has.
        _discard(sys.stdout)
        return 0
    except (ValueError, OSError, ImportError) as error:
        logger.debug("Where it happened:", exc_info=True)
        sys.stderr.write(f"{program}: {' '.join(str(error).split())}\n")
        return 2
    except RuntimeError as error:
        # torch has no class of its own for this on a CPU.
        if "memory" not in str(error):
            raise
        sys.stderr.write(f"{program}: There is not enough memory: {str(error).splitlines()[0]}\n")
        return 2
    except MemoryError:
        sys.stderr.write(f"{program}: There is not enough memory.\n")
        return 2
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{program}: {str(error) or 'stopped.'}\n")
        return getattr(error, "exit_code", 130)


class _StandardOutput:
    """Standard output, the errors of which say that they are its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As that of the stream."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """As that of the stream."""
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        # Once more at the end, because argparse keeps such an error to itself.
        if self._error is not None:
            raise self._error
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            # Python would try again when it ends, and tell of it.
            _discard(self._stream)
            self._error = OSError(f"Standard output cannot be written: {error.strerror or error}.")
            raise self._error from error


@contextmanager
def _standard_output() -> Iterator[None]:
    """Standard output for one verb: UTF-8 as every text here, and written to its end, or one error says why not."""
    if sys.stdout is None:
        raise ValueError("Standard output is closed: send it to a file, or to /dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have bytes that are not UTF-8.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    output = _StandardOutput(sys.stdout)
    with redirect_stdout(cast(TextIO, output)):
        try:
            yield
        finally:
            output.flush()


def _discard(stream: TextIO) -> None:
    """Lets nothing more come out of a stream, in which there may be something still."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    """All verbs; each has the function that does it under `run`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani", description="The 2017 Transformer: train it, use it.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for family in (runs, translate, evaluate, convert):
        family.add_verbs(verbs)
    return parser
