"""The shards of a table on the machines of a Ray cluster."""

import json
import logging
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import ray
import ray.data
from ray.exceptions import RayError

from ..records import from_json, to_json
from .manifest import Folder, Manifest, ShardRecord
from .worker import ShardWorker, TextTranslator

logger = logging.getLogger(__name__)

# A shard whose process dies so often is an error, not an endless work.
MAX_ATTEMPTS = 4
# Folder of the marks of shards that are being translated, beside the results.
ATTEMPTS = "attempts"


@dataclass(frozen=True)
class Workers:
    """
    How many processes translate, and what each of them gets.

    Attributes:
        count (`int`, *optional*): processes; by default as many as the cluster has room for.
        cpus (`float`): cores of each.
        gpus (`float`, *optional*): GPUs of each, for example 0.5; by default 1 if the cluster has any, else 0.
    """

    count: int | None = None
    cpus: float = 1
    gpus: float | None = None


def connect() -> None:
    """Joins the Ray cluster that `ray start` or `RAY_ADDRESS` names, or else starts one of this machine alone."""
    if ray.is_initialized():
        return
    # Ray reports to its authors by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The command has a progress bar of its own.
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # Joins a cluster of `ray start` or RAY_ADDRESS. One that another program has for itself ends with that program.
    ray.init(log_to_driver=False, logging_level=logging.WARNING)


class _Worker:
    """
    A process that translates shards. Ray starts it again without end if it dies, and its shard with it.

    Errors are returned, because of those that are raised Ray Data keeps the traceback alone.
    """

    def __init__(self, manifest: Manifest, output: str, load: Callable[[], TextTranslator]) -> None:
        self.manifest, self.output, self.load, self.folder = manifest, output, load, Folder(output)

    @cached_property
    def translate(self) -> ShardWorker:
        """The translator, with its model, which is loaded with the first shard."""
        return ShardWorker(self.manifest, self.output, self.load)

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        try:
            return {"record": json.dumps(to_json(self._translated(row["shard"]))), "error": ""}
        except (ValueError, OSError) as error:
            return {"record": "", "error": str(error)}
        except Exception as error:
            logger.exception("A shard cannot be translated")
            return {"record": "", "error": f"Shard {row['shard']}: {type(error).__name__}: {error}"}

    def _translated(self, number: int) -> ShardRecord:
        names = [f"{ATTEMPTS}/{number:05}-{attempt}.json" for attempt in range(1, MAX_ATTEMPTS + 1)]
        before = set(self.folder.sizes(ATTEMPTS))
        name = next((name for name in names if name.rpartition("/")[2] not in before), None)
        if name is None:
            shard = self.manifest.shards[number]
            url = self.manifest.sources[shard.source].url
            raise OSError(
                f"The process that translates shard {number}, which begins at row {shard.first} of {url}, has died "
                f"{MAX_ATTEMPTS} times, perhaps for lack of memory."
            )
        self.folder.write_json(name, {"machine": platform.node(), "process": os.getpid()})
        try:
            return self.translate(number)
        finally:
            # Where the process dies, this is not reached.
            self.folder.remove(name)


def translate_on_ray(
    manifest: Manifest, output: str, missing: list[int], load: Callable[[], TextTranslator], workers: Workers
) -> Iterator[ShardRecord]:
    """
    Translates shards on a Ray cluster. A process that dies is started again, and so is its shard.

    Args:
        manifest ([`Manifest`]): the table.
        output (`str`): path or URL of the folder of the results, which all machines reach.
        missing (`list[int]`): numbers of the shards to translate.
        load (`Callable`): loads the model, in each process.
        workers ([`Workers`]): the processes.

    Yields:
        [`ShardRecord`]: those of the shards, in the order in which they are done.

    Raises:
        ValueError: a process raised an error, or the cluster has no room for one.
        OSError: the cluster has failed.
    """
    if not missing:
        return
    connect()
    room = ray.cluster_resources()
    gpus = workers.gpus if workers.gpus is not None else float(room.get("GPU", 0) >= 1)
    fits = [room.get(name, 0) // share for name, share in (("CPU", workers.cpus), ("GPU", gpus)) if share]
    most = int(min(fits, default=1))
    if not most:
        raise ValueError(
            f"The Ray cluster has {room.get('CPU', 0):g} CPUs and {room.get('GPU', 0):g} GPUs, but a process needs "
            f"{workers.cpus:g} and {gpus:g}: change --worker-cpus or --worker-gpus."
        )
    if workers.count is not None and workers.count > most:
        # Ray would wait for machines that may never come.
        raise ValueError(f"The Ray cluster has room for {most} processes, but --workers is {workers.count}.")
    count = min(len(missing), workers.count or most)
    folder = Folder(output)
    for name in folder.sizes(ATTEMPTS):
        # An earlier command that was killed left it.
        folder.remove(f"{ATTEMPTS}/{name}")
    # One row of this dataset is one shard, and each is a task of its own.
    shards = ray.data.from_items([{"shard": number} for number in missing], override_num_blocks=len(missing))
    done = shards.map(
        cast(Any, _Worker),
        fn_constructor_args=(manifest, output, load),
        # A second shard waits with the others, not with a process that may be slow.
        compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
        num_cpus=workers.cpus,
        num_gpus=gpus,
    )
    try:
        for row in done.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            yield from_json(ShardRecord, json.loads(row["record"]))
    except RayError as error:
        raise OSError(f"The Ray cluster has failed: {' '.join(str(error).split())[:500]}") from error
