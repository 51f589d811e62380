"""Steps that are captured as CUDA graphs, with graphs that the tests replay on the CPU."""

import logging
from contextlib import nullcontext

import pytest
import torch

from hf_vaswani.captured import WARM_UP_CALLS, CapturedStep, GraphPool, are_graphs_wanted, warm_up_stream

CUDA = torch.device("cuda")


def test_a_step_is_warmed_up_captured_and_replayed(cuda_graphs) -> None:
    total, more, calls = torch.zeros(3), torch.ones(3), []

    def step() -> None:
        calls.append(len(calls))
        total.add_(more * 2)

    captured = CapturedStep(step, CUDA, "the step")
    for number in range(1, 7):
        more.fill_(number)
        captured()
        assert total.tolist() == [number * (number + 1)] * 3
    assert len(calls) == WARM_UP_CALLS + 1
    assert [graph.replays for graph in cuda_graphs.made] == [6 - WARM_UP_CALLS]


def test_numbers_of_python_are_those_of_the_capture(cuda_graphs) -> None:
    """Which is why whatever changes must be a tensor; the graphs of the tests show it as a GPU does."""
    total, factor = torch.zeros(()), [1.0]
    captured = CapturedStep(lambda: total.add_(factor[0]).squeeze_(), CUDA, "the step")
    for number in range(WARM_UP_CALLS + 2):
        factor[0] = float(number)
        captured()
    assert total.item() == sum(range(WARM_UP_CALLS + 1)) + WARM_UP_CALLS


def test_a_step_that_cannot_be_captured_runs_as_it_is(cuda_graphs, caplog) -> None:
    total, stream = torch.zeros(2), torch.cuda.current_stream(CUDA)

    def step() -> None:
        total.add_(1)
        total[0] += total.sum().item()

    captured = CapturedStep(step, CUDA, "the step")
    expected, caplog.handler.records[:] = torch.zeros(2), []
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            captured()
            expected.add_(1)
            expected[0] += expected.sum()
            torch.testing.assert_close(total, expected, rtol=0, atol=0)
    assert [record.message for record in caplog.records] == [
        "the step runs without a CUDA graph, because its capture failed: operation not permitted when stream is "
        "capturing: aten._local_scalar_dense.default"
    ]
    assert len(cuda_graphs.made) == 1 and cuda_graphs.made[0].replays == 0
    assert torch.cuda.current_stream(CUDA) is stream


@pytest.mark.parametrize(("kind", "variable"), [("cpu", "1"), ("mps", "1"), ("xpu", "1"), ("cuda", "0")])
def test_only_gpus_with_cuda_capture(cuda_graphs, monkeypatch, kind, variable) -> None:
    monkeypatch.setenv("HF_VASWANI_CUDA_GRAPHS", variable)
    calls: list[None] = []
    captured = CapturedStep(lambda: calls.append(None), torch.device(kind), "the step")
    for _ in range(5):
        captured()
    assert len(calls) == 5 and not cuda_graphs.made


@pytest.mark.parametrize(("release", "found"), [("2.12.1+cu130", False), ("2.13.0+cpu", True), ("3.0.0a0", True)])
def test_an_older_torch_has_no_graphs(monkeypatch, release, found) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.delenv("HF_VASWANI_CUDA_GRAPHS", raising=False)
    assert are_graphs_wanted() is found
    for word, wanted in (("0", False), ("1", True), ("", found)):
        monkeypatch.setenv("HF_VASWANI_CUDA_GRAPHS", word)
        assert are_graphs_wanted() is wanted


def test_all_warm_ups_of_a_gpu_use_one_stream_and_captures_that_of_their_pool(cuda_graphs, monkeypatch) -> None:
    """Workspaces of a stream are freed with a graph that was captured on it."""
    used = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or nullcontext())
    capture = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: used.append(a[2]) or capture(*a, **k))
    warm_up_stream.cache_clear()
    pools = [GraphPool(CUDA), GraphPool(CUDA), None]
    for pool in (*pools, pools[0]):
        step = CapturedStep(lambda: None, CUDA, "the step", pool)
        for _ in range(WARM_UP_CALLS + 2):
            step()
    warm_ups = [stream for number, stream in enumerate(used) if number % (WARM_UP_CALLS + 1) < WARM_UP_CALLS]
    captures = used[WARM_UP_CALLS :: WARM_UP_CALLS + 1]
    assert set(warm_ups) == {warm_up_stream(CUDA)}
    assert captures[0] is captures[3] is pools[0].stream and captures[1] is pools[1].stream
    assert len({*captures, warm_up_stream(CUDA)}) == 4
