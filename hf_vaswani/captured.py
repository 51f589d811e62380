"""CUDA graphs: a step whose tensors stay in their places, recorded once on a GPU and then replayed by one call."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Calls before a step is captured: libraries choose their kernels, and make their workspaces, in the first ones.
WARM_UP_CALLS = 2
# Before this release, a capture that fails may leave torch unable to draw random numbers.
MIN_TORCH = (2, 13)
# torch makes one capture at a time.
CAPTURING = threading.Lock()


def are_graphs_wanted() -> bool:
    """Returns whether torch is new enough for graphs; `HF_VASWANI_CUDA_GRAPHS`, 0 or 1, decides in its place."""
    wanted = os.environ.get("HF_VASWANI_CUDA_GRAPHS", "")
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return wanted == "1" or (wanted != "0" and release >= MIN_TORCH)


class GraphPool:
    """
    Memory that several captured steps of a GPU share, of which one may run at a time, and the stream on which they are
    captured.

    Nothing else runs on that stream: workspaces that belong to it would be freed with the first of the graphs. Torch's
    own stream for captures would be that of the GPU on which the process captured first.

    Args:
        device (`torch.device`): the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # Streams are taken from a few in turn. Those with another priority are others.
        self.stream = torch.cuda.Stream(device, priority=-1)


@cache
def warm_up_stream(device: torch.device) -> Any:
    """Returns the stream of all warm-ups on a GPU: memory that was used on a stream is kept for it."""
    return torch.cuda.Stream(device)


class CapturedStep:
    """
    A function that reads and writes tensors in fixed places, as a CUDA graph. The first calls run it, the next one
    captures it, and all later ones replay the capture: what the function does in Python is not repeated, and numbers
    that it takes from Python keep the values of the capture.

    If the capture fails, a warning says so once, and this and all later calls run the function itself. So do all calls
    on other devices than GPUs, and where [`are_graphs_wanted`] says so.

    Args:
        function (`Callable[[], None]`): reads nothing back from the device, and allocates nothing that must outlive
            the call.
        device (`torch.device`): device of its tensors.
        name (`str`): names the step in the warning.
        pool ([`GraphPool`], *optional*): memory that it shares with other steps; by default it has its own.
    """

    def __init__(
        self, function: Callable[[], None], device: torch.device, name: str, pool: GraphPool | None = None
    ) -> None:
        self.function, self.device, self.name, self.pool = function, device, name, pool
        self.is_eager = device.type != "cuda" or not are_graphs_wanted()
        self.warm_up_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Runs, captures or replays the function."""
        if self.graph is not None:
            self.graph.replay()
        elif self.is_eager:
            self.function()
        elif self.warm_up_calls < WARM_UP_CALLS:
            self.warm_up_calls += 1
            self._warm_up()
        else:
            self._capture()

    def _warm_up(self) -> None:
        """Runs the function beside the current stream, as torch asks for before a capture."""
        current, other = torch.cuda.current_stream(self.device), warm_up_stream(self.device)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            self.function()
        current.wait_stream(other)

    def _capture(self) -> None:
        """Captures the function and replays it, or runs it if that fails."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        pool = GraphPool(self.device) if self.pool is None else self.pool
        # Other threads may use the GPU meanwhile.
        capture = torch.cuda.graph(graph, pool.handle, pool.stream, capture_error_mode="thread_local")
        try:
            with CAPTURING, torch.cuda.device(self.device), capture:
                self.function()
            self.graph = graph
        # A capture fails with errors of many kinds, and has computed nothing.
        except Exception as error:
            logger.warning(f"{self.name} runs without a CUDA graph, because its capture failed: {error}")
            self.is_eager = True
        # Here, without the error, nothing holds the tensors of a capture that failed any more.
        if self.is_eager:
            # torch leaves the stream of a capture that cannot be ended as the current one.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                graph.reset()
            self.function()
        else:
            graph.replay()
