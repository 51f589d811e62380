"""The command line, hf-vaswani VERB: errors that users can fix are one sentence and exit code 2."""

import argparse
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from ..memory import limit_kernel_cache
from ..records import public_text
from ..version import __version__
from . import check, evaluate, pairs, recipes, runs, serve, translate

logger = logging.getLogger("hf_vaswani")

# How torch, cuBLAS, CTranslate2, ONNX Runtime and C++ say that memory has run out; most have no class for this error.
OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|(can.?t|cannot|failed to|unable to) allocate|ALLOC_FAILED|bad_alloc",
    re.IGNORECASE,
)

# Verbs of version 0.1 that are gone, and what replaces them.
REMOVED_VERBS = {
    "compare": "sacrebleu REFERENCES -i BASELINE SYSTEM -m bleu chrf ter --paired-bs -f text",
    "diversify": "bash configs/jobs/diversify.sh RECIPE.yaml RUN_FOLDER",
}


def main(argv: Sequence[str] | None = None, program: str = "hf-vaswani") -> int:
    """
    Runs one verb.

    Args:
        argv (`Sequence[str]`, *optional*): arguments without the program name; by default those of the process.
        program (`str`): program name for help and errors.

    Returns:
        `int`: exit code: 0, 2 for bad input, 130 after Ctrl-C, or 128 and the number of another signal. An error that
        is one sentence has its traceback in front if the environment variable `HF_VASWANI_DEBUG` is 1.
    """
    limit_kernel_cache()
    if sys.stderr is None:
        # Standard error was closed, but libraries write to it.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Public("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logger.setLevel(logging.INFO)
    # Accelerate warns at each checkpoint that a tied matrix is stored once, which is intended.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The Hub client logs each retry, and each upload without changes.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        with _standard_output():
            _refuse_removed(sys.argv[1:] if argv is None else argv)
            options = _parser().parse_args(argv, argparse.Namespace(program=program))
            options.run(options)
        return 0
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does.
        _discard(sys.stdout)
        return 0
    except (ValueError, OSError, ImportError) as error:
        _say(program, " ".join(str(error).split()))
        return 2
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        _say(program, f"Out of memory: {str(error).splitlines()[0]}")
        return 2
    except MemoryError:
        _say(program, "Out of memory.")
        return 2
    except KeyboardInterrupt as error:
        _say(program, str(error) or "stopped.")
        return getattr(error, "exit_code", 130)


def _refuse_removed(argv: Sequence[str]) -> None:
    """Raises an error with the replacement if the verb is one of `REMOVED_VERBS`."""
    if argv and argv[0] in REMOVED_VERBS:
        raise ValueError(f"{argv[0]} is no longer a verb. Use instead: {REMOVED_VERBS[argv[0]]}")


def _say(program: str, text: str) -> None:
    """Writes the sentence of the error that is handled, behind its traceback if `HF_VASWANI_DEBUG` is set."""
    if os.environ.get("HF_VASWANI_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    sys.stderr.write(f"{program}: {public_text(text)}\n")


class _Public(logging.Formatter):
    """Messages without the secrets that a URL may have: others may read a log."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        return public_text(super().format(record))


class _StandardOutput:
    """Standard output whose write errors name it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes to the stream."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flushes the stream."""
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        # Raised again by the final flush, because argparse swallows the error.
        if self._error is not None:
            raise self._error
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            # At exit, Python would flush again and report the same error.
            _discard(self._stream)
            self._error = OSError(f"Standard output cannot be written: {error.strerror or error}.")
            raise self._error from error


@contextmanager
def _standard_output() -> Iterator[None]:
    """Makes standard output UTF-8, and flushes it at the end, so write errors are raised here."""
    if sys.stdout is None:
        raise ValueError("Standard output is closed: send it to a file, or to /dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths may contain bytes that are not UTF-8.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    output = _StandardOutput(sys.stdout)
    with redirect_stdout(cast(TextIO, output)):
        try:
            yield
        finally:
            output.flush()


def _discard(stream: TextIO) -> None:
    """Discards what is left in a stream's buffer."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    """The parser of all verbs, each with its function under `run`."""
    parser = argparse.ArgumentParser(
        prog="hf-vaswani",
        description='Train, translate with and publish the Transformer of "Attention Is All You Need".',
        epilog="hf-vaswani VERB --help explains a verb.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for family in (check, runs, translate, pairs, recipes, serve, evaluate):
        family.add_verbs(verbs)
    return parser
