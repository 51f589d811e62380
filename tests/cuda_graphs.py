"""CUDA graphs without a GPU: each replay computes again what the capture recorded, from the numbers it recorded."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from hf_vaswani import captured
from hf_vaswani.captured import CapturedStep
from hf_vaswani.model import modeling_vaswani
from hf_vaswani.training import consistency, update

# Operators that a GPU cannot capture, because Python waits for their result.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "equal"}


class Recorder(TorchDispatchMode):
    """Records the operators within its block, and at its end undoes what they changed: a capture computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.known: dict[int, torch.Tensor] = {}
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_recording = False

    def __enter__(self):
        self.is_recording, self.random_state = True, torch.get_rng_state()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function.overloadpacket._qualified_op_name.removeprefix("aten::") in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        for each in tensors((arguments, keywords)):
            if id(each) not in self.known:
                self.known[id(each)] = each
                self.before.append((each.detach(), each.detach().clone()))
        result = function(*arguments, **keywords)
        for each in tensors(result):
            self.known.setdefault(id(each), each)
        self.calls.append((function, arguments, keywords, result))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        self.is_recording = False
        torch.set_rng_state(self.random_state)
        for tensor, value in self.before:
            tensor.copy_(value)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def replay(self) -> None:
        """Computes the recorded operators again, on the tensors that they had, or on the new results of others."""
        new: dict[int, torch.Tensor] = {}

        def current(value: Any) -> Any:
            return new.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for function, arguments, keywords, result in self.calls:
            again = function(*tree_map(current, arguments), **tree_map(current, keywords))
            new |= dict(zip(map(id, tensors(result)), tensors(again), strict=True))


def tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors of nested lists, tuples and dicts."""
    return [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


class Graph:
    """`torch.cuda.CUDAGraph`; all of a test are in `Graph.made`."""

    made: list["Graph"] = []

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.replays = 0
        Graph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.recorder.replay()

    def reset(self) -> None:
        """Forgets the capture."""


class Stream:
    """`torch.cuda.Stream`: on a CPU, everything is in order."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority

    def wait_stream(self, other: "Stream") -> None:
        """Does nothing."""


@contextmanager
def graphs_on_the_cpu() -> Iterator[type[Graph]]:
    """Replaces what a capture needs of torch.cuda, and yields the class whose `made` has the graphs of the block."""
    current: list[Any] = [Stream()]

    @contextmanager
    def graph(graph: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local" and stream.priority == -1
        # As torch does, the stream stays the current one if a capture fails.
        before, current[0] = current[0], stream
        with graph.recorder:
            yield
        current[0] = before

    made: dict[str, Any] = {"CUDAGraph": Graph, "graph": graph, "Stream": Stream}
    made |= dict.fromkeys(("stream", "device"), lambda _: nullcontext())
    made |= {"is_current_stream_capturing": lambda: any(each.recorder.is_recording for each in Graph.made)}
    made |= {"current_stream": lambda _=None: current[0], "set_stream": lambda stream: current.__setitem__(0, stream)}
    made["graph_pool_handle"] = lambda: None
    pinned = patch.object(torch.Tensor, "pin_memory", lambda self: self)
    any_torch = patch.object(captured, "MIN_TORCH", (0, 0))
    with patch.multiple(torch.cuda, **made), patch.object(Graph, "made", []), pinned, any_torch:
        yield Graph


def updates_of_a_gpu(monkeypatch: pytest.MonkeyPatch, passes: bool = True) -> None:
    """
    Lets trainings on the CPU make their updates as on a GPU, by [`graphs_on_the_cpu`]; `passes` says whether their
    passes are captured, too.
    """
    build = update.Updater.__init__

    def ahead(self: update.Updater, *arguments: Any, **keywords: Any) -> None:
        build(self, *arguments, **keywords)
        self.runs_ahead, self.reads_no_mask, self.captures_passes = True, True, passes

    monkeypatch.setattr(update.Updater, "__init__", ahead)
    cuda = torch.device("cuda")
    monkeypatch.setattr(update, "CapturedStep", lambda step, _, *more: CapturedStep(step, cuda, *more))
    monkeypatch.setattr(consistency, "selects_labels", lambda _: False)
    # Ids are checked on a CPU only.
    monkeypatch.setattr(modeling_vaswani, "check_ids", lambda *_, **__: None)
