"""CUDA graphs: a step whose tensors stay in their places, recorded once on a GPU and then replayed by one call."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Calls before a step is captured: libraries choose their kernels, and make their workspaces, in the first ones.
WARM_UP_CALLS = 2
# Captures share a stream of torch's.
CAPTURING = threading.Lock()


def are_graphs_wanted() -> bool:
    """Returns whether the environment leaves graphs on."""
    return os.environ.get("HF_VASWANI_CUDA_GRAPHS") != "0"


class CapturedStep:
    """
    A function that reads and writes tensors in fixed places, as a CUDA graph. The first calls run it, the next one
    captures it, and all later ones replay the capture: what the function does in Python is not repeated, and numbers
    that it takes from Python keep the values of the capture.

    If the capture fails, a warning says so once, and this and all later calls run the function itself. So do all calls
    on other devices than GPUs, and with `HF_VASWANI_CUDA_GRAPHS=0` in the environment.

    Args:
        function (`Callable[[], None]`): reads nothing back from the device, and allocates nothing that must outlive
            the call.
        device (`torch.device`): device of its tensors.
        name (`str`): names the step in the warning.
        pool (*optional*): memory that several steps share, from `torch.cuda.graph_pool_handle()`. Of these, only one
            may run at a time.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, name: str, pool: Any = None) -> None:
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
        current, other = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            self.function()
        current.wait_stream(other)

    def _capture(self) -> None:
        """Captures the function and replays it, or runs it if that fails."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads may use the GPU meanwhile.
            mode = {"pool": self.pool, "capture_error_mode": "thread_local"}
            with CAPTURING, torch.cuda.device(self.device), torch.cuda.graph(graph, **mode):
                self.function()
        # A capture fails with errors of many kinds, and has computed nothing.
        except Exception as error:
            logger.warning(f"{self.name} runs without a CUDA graph, because its capture failed: {error}")
            self.is_eager = True
            # torch leaves the stream of a capture that cannot be ended as the current one.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                graph.reset()
            self.function()
            return
        self.graph = graph
        graph.replay()
