"""The metrics of a server for Prometheus, those of all its workers together."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ..extras import extra

with extra("serve"):
    import prometheus_client
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess

logger = logging.getLogger(__name__)

# The variable by which workers share a folder, with a file of each for each kind of metric.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Metrics:
    """Metrics of a server. Workers that share a folder are added up."""

    def __init__(self) -> None:
        # An app of a program has a registry of its own.
        self.registry = registry = CollectorRegistry()
        prefix = "hf_vaswani"
        self.requests = Counter(f"{prefix}_requests", "Requests", ["path", "status"], registry=registry)
        self.characters = Counter(f"{prefix}_characters", "Translated characters", registry=registry)
        self.texts = Counter(f"{prefix}_texts", "Translated texts", registry=registry)
        self.seconds = Histogram(f"{prefix}_request_seconds", "Seconds of a request", ["path"], registry=registry)
        self.batches = Histogram(
            f"{prefix}_batch_texts", "Texts of a batch", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.waiting = Gauge(
            f"{prefix}_waiting_texts", "Texts that wait", multiprocess_mode="livesum", registry=registry
        )
        if FOLDER in os.environ:
            self.registry = CollectorRegistry()
            WorkersCollector(self.registry)

    def as_text(self) -> bytes:
        """Returns what Prometheus collects."""
        forget_dead_workers()
        return prometheus_client.generate_latest(self.registry)


class WorkersCollector(multiprocess.MultiProcessCollector):
    """Adds up the metrics of all workers, except those of a file that one of them left damaged when it died."""

    def collect(self) -> list[Any]:
        """Returns the metrics."""
        files = sorted(map(str, Path(self._path).glob("*.db")))
        # The library knows no error of its own.
        with suppress(Exception):
            return self._checked(files)
        found, readable = list[Any](), list[str]()
        for file in files:
            try:
                found = self._checked([*readable, file])
                readable.append(file)
            except Exception as error:
                logger.warning(f"{Path(file).name} has no metrics: {type(error).__name__}.")
        return found

    def _checked(self, files: list[str]) -> list[Any]:
        """Returns the metrics of files; raises an error if they cannot be read, added up or written as text."""
        found = list(self.merge(files))
        prometheus_client.generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda: found)))
        return found


def forget_dead_workers() -> None:
    """Takes the texts that wait in dead workers out of the metrics."""
    folder = os.environ.get(FOLDER)
    for file in Path(folder).glob("gauge_livesum_*.db") if folder else ():
        number = file.stem.rpartition("_")[2]
        try:
            os.kill(int(number), 0)
        # Workers have one user: a process of another one has the number of a worker that is dead.
        except (ProcessLookupError, PermissionError):
            # Another worker may have done it.
            with suppress(OSError):
                multiprocess.mark_process_dead(int(number))
        except (ValueError, OverflowError):
            # It is no worker's.
            continue
