"""The processes of one launch: joining them, work that only the main process does, and gathered results."""

import atexit
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from .memory import keep_freed_memory, limit_kernel_cache

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

    from .recipe import TrainingRecipe

# Accelerate is imported where it is needed: translating in a single process does without it.

T = TypeVar("T")

# Timeout of the rendezvous at the start, in which one process may never arrive.
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# Timeout of a training once all processes have met: one of them may read a large text, learn its vocabulary and encode
# it while the others wait.
TRAINING_TIMEOUT = timedelta(hours=12)
# Timeout of a translation once all processes have met: the main process waits for whoever writes its input.
TRANSLATION_TIMEOUT = timedelta(days=7)

# The store of process 0, which lives as long as the process.
_stores: list[Any] = []
# The device that this process got when it joined the others of its launch.
_devices: list[torch.device] = []
# Set by `accelerate launch --cpu`.
USE_CPU = "ACCELERATE_USE_CPU"


class Launch(Protocol):
    """The processes of a launch as one of them sees it: [`Processes`], or Accelerate's `Accelerator`."""

    @property
    def num_processes(self) -> int:
        """Number of processes."""

    @property
    def process_index(self) -> int:
        """Index of this process; 0 is the main process."""


def join_process_group(timeout: timedelta) -> "PartialState":
    """
    Joins this process with the others of its launch, if there are any.

    Args:
        timeout (`timedelta`): timeout of collective operations once all processes have met.

    Returns:
        `accelerate.PartialState`.

    Raises:
        OSError: some process did not arrive within [`RENDEZVOUS_TIMEOUT`].
        ValueError: Accelerate does not see the others.
    """
    from accelerate import PartialState

    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched == 1:
        return PartialState(cpu=_is_set(USE_CPU), timeout=RENDEZVOUS_TIMEOUT)
    on_cpu = _computes_on_cpu()
    end_with_launcher()
    atexit.register(close_process_group)
    try:
        use_own_store()
        # Without an accelerator and without `cpu`, PartialState takes this process for the only one.
        state = PartialState(cpu=on_cpu, timeout=RENDEZVOUS_TIMEOUT)
        state.wait_for_everyone()
    # gloo has no error class of its own.
    except RuntimeError as error:
        if not re.search(r"[Tt]ime[d ]*out|[Cc]onnect|store|rendezvous", str(error)):
            raise
        raise OSError(
            f"The {launched} processes of this launch did not all meet within {RENDEZVOUS_TIMEOUT.seconds // 60} "
            f"minutes: {str(error).splitlines()[0]} Start all of them again."
        ) from error
    if state.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {state.num_processes}: each would do the whole "
            "work alone. Start one process, or set ACCELERATE_USE_CPU=true."
        )
    _devices[:] = [state.device]
    # Imported here, because most launches are of one process.
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout)
    distributed_c10d._get_default_store().set_timeout(timeout)
    return state


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on")


def launched_here() -> int:
    """Returns the number of processes of this launch on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def own_device() -> torch.device:
    """
    Returns where this process computes: on the device of its launch, if it has joined one; else on the accelerator of
    this machine. Without an accelerator, or with `accelerate launch --cpu`, it is the CPU.
    """
    if _devices:
        return _devices[0]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None or _is_set(USE_CPU) else accelerator


def _computes_on_cpu() -> bool:
    """
    Returns whether the processes of a launch compute on the CPU: the user or the machine wants it, or the accelerator
    is Apple's MPS, on which several processes cannot exchange anything.

    Raises:
        ValueError: two processes of this machine would have one accelerator, on which they cannot meet, either.
    """
    device = own_device()
    if device.type == "mps":
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logging.getLogger(__name__).warning("Several processes cannot meet on MPS: they compute on the CPU")
        return True
    # A job of Slurm may show each process its own device alone; `torchrun` and `accelerate launch` show them all.
    sees_all = device.type != "cpu" and torch.distributed.is_torchelastic_launched()
    if sees_all and (here := launched_here()) > (count := torch.accelerator.device_count()):
        raise ValueError(
            f"{here} processes were launched on this machine, but each needs a device of its own, and torch finds "
            f"{count} of the kind {device.type}: launch {count}, or set ACCELERATE_USE_CPU=true to compute on "
            "the CPU."
        )
    return device.type == "cpu"


def close_process_group() -> None:
    """
    Closes a process group that uses gloo, be it for CPUs only; called at the end of the process at the latest.

    Gloo's threads need Python's lock to release the tensors they sent last. One that asks for it while Python shuts
    down aborts the process ("terminate called without an active exception"), and closing the group may wait for the
    threads while it holds the lock. So they get half a second before it.
    """
    from torch import distributed

    if distributed.is_initialized() and "gloo" in distributed.get_backend():
        time.sleep(0.5)
        distributed.destroy_process_group()


def end_with_launcher() -> None:
    """
    Asks Linux to send this process SIGTERM when its launcher dies. Otherwise the processes of a launcher that was
    killed would keep the run folder from the next launch until they are done.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # noqa: N806 (the kernel's name)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def use_own_store() -> None:
    """
    Makes the processes of a launch that may be restarted meet at a store of their own, in process 0.

    By default they meet at the store of `torchrun`, which outlives them and keeps the addresses of the processes
    before a restart: those after it would call the dead (https://github.com/pytorch/pytorch/issues/135712).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    environment = os.environ
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts == 0 or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, key = environment["MASTER_ADDR"], "hf_vaswani/port"
    old = TCPStore(host, int(environment["MASTER_PORT"]), is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    if environment["RANK"] == "0":
        # `multi_tenant` lets the process group find this server by its port.
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        _stores.append(own)
        port = own.port
        old.set(key, str(port))
    else:
        until = time.monotonic() + RENDEZVOUS_TIMEOUT.seconds
        # The first ports may be those of processes that have ended.
        while not _listens(host, port := int(old.get(key))):
            if time.monotonic() > until:
                raise OSError(
                    f"Process 0 of this launch cannot be reached at {host}:{port}, or did not start within "
                    f"{RENDEZVOUS_TIMEOUT.seconds // 60} minutes."
                )
            time.sleep(0.1)
    environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def on_main_process(launch: Launch, function: Callable[..., T], *arguments: Any) -> T:
    """
    Calls a function in process 0 only, and shares its result or its error with every process.

    Meant for work on the disk: on another machine, a file that process 0 has just written may not be visible yet. All
    processes call this together.

    Args:
        launch ([`Launch`]): the processes.
        function (`Callable`): called with `arguments`.

    Returns:
        The result of the function.

    Raises:
        Exception: in process 0, as raised by the function; in the others a `ValueError`, `OSError` or `ImportError` of
            the same text, and for any other error a `RuntimeError`.
    """
    result: Any = None
    failure: Exception | None = None
    if launch.process_index == 0:
        try:
            result = function(*arguments)
        except Exception as error:
            failure = error
    if launch.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        result, told = broadcast_object_list([result, _kind_and_text(failure)])
        if told is not None and failure is None:
            raise _error_of(*told)
    if failure is not None:
        raise failure
    return cast(T, result)


def on_every_process(launch: Launch, function: Callable[[], T]) -> list[T]:
    """
    Calls a function in every process, and shares all results, or the first error. All processes call this together.

    Args:
        launch ([`Launch`]): the processes.
        function (`Callable`): called without arguments.

    Returns:
        `list`: the results of all processes, in the order of the processes, in every process.

    Raises:
        Exception: as raised by the function in this process, or else as by [`on_main_process`].
    """
    if launch.num_processes == 1:
        return [function()]
    from accelerate.utils import gather_object

    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    found = gather_object([(result, _kind_and_text(failure))])
    if failure is not None:
        raise failure
    for _, told in found:
        if told is not None:
            raise _error_of(*told)
    return [cast(T, each) for each, _ in found]


@contextmanager
def local_main_process_first(launch: "Accelerator") -> Iterator[None]:
    """
    Runs the block in one process of each machine first, and then in the others, which read what it has cached.

    As Accelerate's, but no process waits for one that failed: an error in a first process is raised in all, as by
    [`on_main_process`]. All processes come here together.
    """

    def meet_first(failure: Exception | None) -> None:
        """Waits for the first processes, and raises the error of one of them."""
        if launch.num_processes == 1:
            return
        from accelerate.utils import gather_object

        told = next(filter(None, gather_object([_kind_and_text(failure)])), None)
        if told is not None and failure is None:
            raise _error_of(*told)

    if not launch.is_local_main_process:
        meet_first(None)
        yield
        return
    try:
        yield
    except Exception as error:
        meet_first(error)
        raise
    meet_first(None)


# Errors that are one sentence for the user, by their names.
SHARED: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, OSError, ImportError)}


def _kind_and_text(error: Exception | None) -> tuple[str, str] | None:
    """Returns an error as text: not every error can be pickled, or made again of what was pickled."""
    if error is None:
        return None
    for name, kind in SHARED.items():
        if isinstance(error, kind):
            return name, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def _error_of(kind: str, text: str) -> Exception:
    return SHARED.get(kind, RuntimeError)(text)


# ---- Training ----------------------------------------------------------------------------------------------------


def build_accelerator(
    training: "TrainingRecipe", run_dir: str, choose_precision: Callable[[torch.device], str]
) -> "Accelerator":
    """
    Joins the processes of a training, with the recipe's precision, compiler and trackers.

    Args:
        training ([`TrainingRecipe`]): the section `training` of the recipe.
        run_dir (`str`): folder of the run.
        choose_precision (`Callable`): chooses the precision of `auto`, called in process 0 with its device.

    Returns:
        `accelerate.Accelerator`.

    Raises:
        ValueError: the launch contradicts itself or the recipe, or the machine lacks something the recipe needs.
        OSError: some process did not arrive.
    """
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin

    _check_precision(training)
    _check_launch_type()
    limit_kernel_cache()
    state = join_process_group(TRAINING_TIMEOUT)
    precision: str | None = training.mixed_precision
    if precision == "auto":
        precision = on_main_process(state, choose_precision, state.device)
    accelerator = Accelerator(
        cpu=(state.num_processes > 1 or _is_set(USE_CPU)) and state.device.type == "cpu",
        mixed_precision=precision,
        log_with=training.trackers or None,
        # One graph for all lengths: compiled for each of them, it would never stop compiling.
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=True) if training.compile else None,
        project_config=ProjectConfiguration(project_dir=run_dir),
        step_scheduler_with_optimizer=False,
    )
    if accelerator.distributed_type.value not in LAUNCH_TYPES:
        raise ValueError(_refusal(accelerator.distributed_type.value))
    if accelerator.distributed_type.value == "FSDP":
        _check_fsdp(accelerator, training)
    # All processes log the same, so only the main process does.
    logging.getLogger(__package__).setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    available = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    missing = [tracker for tracker in training.trackers if tracker not in available]
    if missing:
        raise ValueError(
            f"training.trackers names {', '.join(missing)}, not installed here: install what is missing, or remove it."
        )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(training.cpu_threads or threads_of_a_process())
        keep_freed_memory()
    else:
        limit_threads()
    return accelerator


# Accelerate's names of what a training can be launched on.
LAUNCH_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP")
# Variables that `accelerate launch` sets for launchers with packages of their own; they are read before any import.
OTHER_LAUNCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def _check_launch_type() -> None:
    for variable, name in OTHER_LAUNCHES.items():
        if _is_set(variable):
            raise ValueError(_refusal(name))


def _refusal(kind: str) -> str:
    return (
        f"This training cannot be launched with {kind}: launch it on one device, on several CPUs, GPUs, XPUs or NPUs, "
        "or with FSDP2 (see accelerate config)."
    )


def _check_precision(training: "TrainingRecipe") -> None:
    precision = training.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision not in (None, "no", "bf16", "fp16", "auto"):
        raise ValueError(
            f"The precision of accelerate launch (--mixed_precision) must be no, bf16 or fp16, but it is {precision}."
        )
    if precision == "fp16" and own_device().type == "cpu":
        raise ValueError("training.mixed_precision fp16 needs a GPU; on a CPU choose no or bf16.")


def _check_fsdp(accelerator: "Accelerator", training: "TrainingRecipe") -> None:
    from .recipe import MATRIX_OPTIMIZERS

    if not accelerator.is_fsdp2:
        raise ValueError("FSDP version 1 cannot train this model: launch it with fsdp_version: 2.")
    if training.ema_decay is not None:
        raise ValueError(
            f"training.ema_decay is {training.ema_decay}, but a moving average cannot be taken of weights that FSDP "
            "shards: remove it, or launch without FSDP."
        )
    if training.optimizer in MATRIX_OPTIMIZERS:
        raise ValueError(
            f"training.optimizer is {training.optimizer!r}, which needs whole matrices, but FSDP shards them: use "
            "'adam', or launch without FSDP."
        )
    if training.tokens_per_batch == "auto":
        raise ValueError(
            "training.tokens_per_batch auto measures a whole model on each device, but FSDP shards it: set a number."
        )
    if training.adapter is not None:
        raise ValueError("training.adapter does not work with FSDP: launch the training without FSDP.")


# ---- Processors --------------------------------------------------------------------------------------------------


def threads_of_a_process(processes: int | None = None) -> int:
    """
    Returns the share of a process in the processors, by default one of those that were launched here: `accelerate
    launch` would give it a single thread.
    """
    return max(1, processors() // (processes or launched_here()))


def limit_threads(processes: int | None = None) -> None:
    """
    Lowers the number of torch's threads to [`threads_of_a_process`]: torch knows neither the quota of a container nor
    other processes. The variable OMP_NUM_THREADS may have set fewer.
    """
    torch.set_num_threads(min(torch.get_num_threads(), threads_of_a_process(processes)))


def processors() -> int:
    """
    Returns the number of processors that this process may use: those of its affinity (`taskset`, Slurm), or fewer if
    the quota of a container is smaller (`docker run --cpus`, `limits.cpu` of Kubernetes). With more threads than the
    quota has processors, all of them are stopped for a part of the time; half a processor is worth that.
    """
    if hasattr(os, "process_cpu_count"):
        # From Python 3.13 on; it knows the affinity, and what a user has told Python.
        cores = os.process_cpu_count() or 1
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota + 0.5) for quota in _quotas())]))


# Where Linux mounts control groups, and which of them this process is in.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _quotas() -> Iterator[float]:
    """Yields the quotas of this process's control groups and of those above, in processors."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # The number of a hierarchy, its controllers, and the path of the group.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mounts, files = ["."], ["cpu.max"]
        elif "cpu" in controllers.split(","):
            # Version 1 of control groups.
            mounts, files = [controllers, "cpu"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # In a container, the path may be that of the host, and its own group the root.
        own = PurePosixPath(path.lstrip("/"))
        for folder in (Path(mount, group) for mount in mounts for group in (own, *own.parents)):
            with suppress(OSError, ValueError, ArithmeticError):
                quota, period = " ".join((CGROUPS / folder / name).read_text() for name in files).split()
                # No quota is `max` or -1.
                if quota != "max" and int(quota) > 0:
                    yield int(quota) / int(period)


# ---- Translating -------------------------------------------------------------------------------------------------


class Processes:
    """
    The processes of a translation, started by `accelerate launch` or `torchrun`; without a launcher, this one alone.

    Attributes:
        num_processes (`int`): number of processes.
        process_index (`int`): index of this process; 0 is the main process.
    """

    def __init__(self) -> None:
        self.num_processes, self.process_index = 1, 0
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            state = join_process_group(TRANSLATION_TIMEOUT)
            self.num_processes, self.process_index = state.num_processes, state.process_index

    @property
    def is_main_process(self) -> bool:
        """True in process 0."""
        return self.process_index == 0

    def on_main_process(self, function: Callable[[], T]) -> T:
        """
        Calls [`on_main_process`]; where the function fails, the other processes exit without a message, because
        process 0 prints it: with code 2 for what a user can mend, and else with 1.
        """
        try:
            return on_main_process(self, function)
        except Exception as error:
            if self.is_main_process:
                raise
            sys.exit(2 if isinstance(error, tuple(SHARED.values())) else 1)

    def chunks(self, items: Iterable[T], size: int) -> Iterator[list[T]]:
        """
        Reads items, such as lines, in process 0, and yields them in every process.

        Args:
            items (`Iterable`): read in process 0 only.
            size (`int`): items of a chunk for each process.

        Yields:
            `list`: the next `size * num_processes` items; fewer at the end.
        """
        items = iter(items)
        while chunk := self.on_main_process(lambda: list(islice(items, size * self.num_processes))):
            yield chunk

    def gather(self, part: T) -> list[T]:
        """Returns the parts of all processes, in the order of the processes, in every process."""
        if self.num_processes == 1:
            return [part]
        from accelerate.utils import gather_object

        return cast(list[T], gather_object([part]))
