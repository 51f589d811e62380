"""
Child processes of the tests, forked from a server that has imported everything: each starts in 0.1 seconds, not in 5.

A child is like a process that a user starts: its own process group, empty standard input, outputs in files. But it
imports nothing anew: tests of imports, and of settings that are read at import, need a real process.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing is computed in the server, because threads do not survive a fork.
FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("hf_vaswani.cli", "hf_vaswani.training.loop", "hf_vaswani.metrics", "hf_vaswani.hub.publishing"),
    *("hf_vaswani.hub.evaluation", "tests.children", "tests.campaign.verbs"),
    # What a training imports on its way.
    *(
        "datasets.io.generator",
        "scipy.io",
        "attrs",
        "matplotlib.backends.backend_agg",
        "PIL.JpegImagePlugin",
    ),
]
# Seconds after which a command counts as hung, more than ten times what any takes on an idle machine.
LIMIT = 60


@dataclass(frozen=True)
class End:
    """Outcome of a child process; `code` is `None` if it hung, and negative after a signal."""

    code: int | None
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """Last line of standard error."""
        return (self.err.replace("\r", "\n").strip().splitlines() or [""])[-1]


class Child:
    """
    Runs a function in a process of its own.

    Args:
        folder (`Path`): where its outputs are written.
        function (`Callable`): what it runs; the exit code is what it returns, as in `sys.exit`.
        arguments (`Any`): those of the function.
        environment (`dict[str, str]`, *optional*): variables to set before.
    """

    def __init__(
        self,
        folder: Path,
        function: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = folder / "out", folder / "err"
        FORKED.set_forkserver_preload(PRELOADED)
        self.process = FORKED.Process(target=_in_child, args=(self.outputs, environment or {}, function, arguments))
        self.process.start()

    def kill(self) -> None:
        """Kills the whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def end(self, limit: float = LIMIT) -> End:
        """Waits at most `limit` seconds, and then kills the process group."""
        self.process.join(limit)
        hung = self.process.is_alive()
        self.kill()
        self.process.join()
        texts = [path.read_text("utf-8", errors="replace") if path.exists() else "" for path in self.outputs]
        return End(None if hung else self.process.exitcode, *texts)


def _in_child(
    outputs: tuple[Path, Path], environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # multiprocessing gives it another number, which children of this process do not have.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # The default of a process that a user starts; here it would be the fork server.
    multiprocessing.set_start_method("fork", force=True)
    # Shows where it hangs.
    faulthandler.dump_traceback_later(LIMIT - 5, file=2)
    os.environ.update(environment)
    sys.exit(function(*arguments))


def run(folder: Path, function: Callable[..., Any], *arguments: Any, **settings: Any) -> End:
    """Runs a function in a child process to its end; see [`Child`]."""
    return Child(folder, function, *arguments, **settings).end()


def rarely_switching(function: Callable[..., Any], *arguments: Any) -> Any:
    """
    Calls a function with a long switch interval: a thread that waits for another one without releasing Python's lock
    then hangs for good.
    """
    sys.setswitchinterval(1000)
    return function(*arguments)


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def worlds(processes: int = 2) -> list[dict[str, str]]:
    """Returns the environments that a launcher gives its processes, by rank."""
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "CUDA_VISIBLE_DEVICES": ""}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def launch(folder: Path, function: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Child]:
    """Starts a function in two processes that meet, as a launcher does; see [`Child`]."""
    environment = settings.pop("environment", None) or {}
    return [
        Child(folder / world["RANK"], function, *arguments, environment=environment | world, **settings)
        for world in worlds()
    ]


def run_launched(folder: Path, function: Callable[..., Any], *arguments: Any, **settings: Any) -> list[End]:
    """Runs a function in two processes to the end; if one fails, the other is killed, as by `torchrun`."""
    children = launch(folder, function, *arguments, **settings)
    until = time.monotonic() + 2 * LIMIT
    while any(child.process.is_alive() for child in children) and time.monotonic() < until:
        if any(child.process.exitcode for child in children):
            # It may end by itself, with an error of its own.
            until = min(until, time.monotonic() + 5)
        time.sleep(0.02)
    return [child.end(0) for child in children]


def run_python(arguments: list[str]) -> None:
    """Does in this process what `python SCRIPT ...`, `python -m MODULE ...` or `python -c PROGRAM ...` would do."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something is true, for two minutes at most."""
    until = time.monotonic() + 2 * LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def python(*arguments: str, environment: dict[str, str] | None = None) -> End:
    """Runs `python ARGUMENTS ...` in a child process to its end; see [`run_python`]."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), run_python, list(arguments), environment=environment)
