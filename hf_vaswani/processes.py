"""The processes of one launch: they meet within minutes, and then wait for each other as long as the work takes."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)

# How long processes wait for each other at the start: one of them may never come.
MEETING = timedelta(minutes=10)


def meet(launched: int, start: Callable[[timedelta], T], work: timedelta) -> T:
    """
    Joins this process with the others of its launch.

    Args:
        launched (`int`): how many they are.
        start (`Callable[[timedelta], Any]`): makes Accelerate's `Accelerator` or `PartialState`; takes the time that
            they wait for each other.
        work (`timedelta`): how long they wait for each other once they have met.

    Returns:
        What `start` returned.

    Raises:
        OSError: they did not all come.
    """
    if launched == 1:
        return start(MEETING)
    try:
        state = start(MEETING)
        state.wait_for_everyone()
    # gloo has no error class of its own.
    except RuntimeError as error:
        if not re.search(r"[Tt]ime[d ]*out|[Cc]onnect|store|rendezvous", str(error)):
            raise
        raise OSError(
            f"The {launched} processes of this launch did not all meet within {MEETING.seconds // 60} minutes: "
            f"{str(error).splitlines()[0]} Start all of them again."
        ) from error
    # Imported here, because most launches are of one process.
    from torch.distributed import distributed_c10d

    if distributed_c10d.is_initialized():
        distributed_c10d._set_pg_timeout(work)
        distributed_c10d._get_default_store().set_timeout(work)
    return state
