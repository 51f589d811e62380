"""The verbs of the package, run in child processes with optional faults."""

import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

# Audit events of Python for file accesses.
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}
# Writers without audit events; the number is the position of the path among their arguments.
WRITERS = {("safetensors.torch", "serialize_file"): 1, ("torch", "save"): 1}
READERS = {("safetensors.torch", "safe_open"): 0}


@dataclass(frozen=True)
class Fault:
    """
    A fault at the `at`-th access to files below `root`, counted from 1.

    `kill`, `term` and `interrupt` send a signal. `full` makes this and all later writes fail, as on a full disk. `log`
    is a file that gets a line for each access; without `at`, nothing else happens.
    """

    kind: Literal["kill", "term", "interrupt", "full"]
    root: Path
    at: int | None = None
    log: Path | None = None


SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}


class _Armed:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.count = 0
        # Only writes fail on a full disk.
        self.only_writes = fault.kind == "full"
        self.log = open(fault.log, "w", encoding="utf-8", buffering=1) if fault.log else None  # noqa: SIM115
        for places in (WRITERS, READERS):
            for (module, name), place in places.items():
                owner = importlib.import_module(module)
                setattr(owner, name, self.watched(name, getattr(owner, name), place, places is WRITERS))
        sys.addaudithook(self.audit)

    def audit(self, event: str, details: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS or self.count < 0:
            return
        # Within a tree that is being removed, files are named without their folder.
        in_tree = event in ("os.remove", "os.rmdir") and details[-1] != -1
        if not in_tree and not str(details[0]).startswith(str(self.fault.root)):
            return
        writes = event == "os.mkdir" or (event == "open" and bool(details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        if self.only_writes and not writes:
            return
        if self.reached(event, str(details[0])):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(details[0]))

    def reached(self, event: str, path: str) -> bool:
        """Counts an access, sends the signal if it is due, and returns whether the access must fail."""
        self.count += 1
        if self.log is not None:
            self.log.write(f"{event} {path.removeprefix(str(self.fault.root))}\n")
        if self.fault.at is None:
            return False
        if self.fault.kind == "full":
            return self.count >= self.fault.at
        if self.count == self.fault.at:
            if self.fault.kind == "kill":
                os.killpg(0, signal.SIGKILL)
            signal.raise_signal(SIGNALS[self.fault.kind])
        return False

    def watched(self, name: str, function: Callable[..., Any], place: int, writes: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            path = str(arguments[place]) if len(arguments) > place else ""
            if not path.startswith(str(self.fault.root)) or (self.only_writes and not writes):
                return function(*arguments, **settings)
            if self.reached(name, path):
                # Fails with the error of the writer, in the middle of the file.
                unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
                try:
                    return function(*arguments, **settings)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            found = function(*arguments, **settings)
            if writes and self.fault.kind == "kill":
                if self.count + 1 == self.fault.at:
                    os.truncate(path, os.path.getsize(path) // 2)
                self.reached(f"half of {name}", path)
            return found

        return call


def verb(arguments: list[str], fault: Fault | None = None) -> int:
    """Runs the command line in this process."""
    from hf_vaswani.cli import main

    if fault is not None:
        _Armed(fault)
    return main(arguments)


def verb_with_small_files(arguments: list[str], most: int) -> int:
    """Runs the command line with a limit of `most` bytes per file, at which writes fail."""
    # Standard output and error are not limited.
    pumps = [subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=number) for number in (1, 2)]
    for number, pump in enumerate(pumps, start=1):
        assert pump.stdin is not None
        os.dup2(pump.stdin.fileno(), number)
        pump.stdin.close()
    # Python checks only once whether they are files or pipes.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    code = verb(arguments)
    sys.stdout.flush()
    for number, pump in enumerate(pumps, start=1):
        os.close(number)
        pump.wait()
    return code


def on_the_hub(arguments: list[str], settings: dict[str, str]) -> int:
    """Runs the command line with the Hub of `HubServer.environment`; its client is imported already."""
    import huggingface_hub.constants
    from huggingface_hub.utils import _http

    os.environ.update(settings)
    files = settings["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": settings["HF_ENDPOINT"], "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_OFFLINE": False}
    constants |= {"HF_HUB_CACHE": settings["HF_HOME"], "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True}
    constants |= {"HF_HUB_ETAG_TIMEOUT": 2, "HF_HUB_DOWNLOAD_TIMEOUT": 2}
    for name, value in constants.items():
        setattr(huggingface_hub.constants, name, value)
    # Waiting between retries would change nothing.
    _http.time = SimpleNamespace(sleep=lambda _: None, time=time.time)
    return verb(arguments)
