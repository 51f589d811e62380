"""Batches are as large as the device needs, and no larger than its memory allows."""

from types import SimpleNamespace

import pytest
import torch

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.model.sentences_vaswani import batch_limits
from hf_vaswani.translation.budgets import (
    most_positions,
    return_unused_memory,
    search_limits,
    times_on,
    tokens_on,
    vocab_size,
)

from ..networks import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture
def memory(monkeypatch):
    """Gives all GPUs so much memory, of which so much is free, and so much more is kept by torch."""

    def give(total: int, free: int | None = None, kept: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total if free is None else free, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 + kept)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7)

    return give


def test_a_gpu_works_on_more_text_than_a_cpu() -> None:
    assert (times_on(CPU), tokens_on(CPU)) == (1, 4096)
    assert (times_on(GPU), tokens_on(GPU)) == (8, 32_768)
    assert tokens_on(CPU) < tokens_on(torch.device("mps")) < tokens_on(GPU)


@pytest.mark.parametrize(
    ("total", "logits"), [(80 * 2**30, 4 * 37_000), (8 * 2**30, 4 * 37_000), (2**30, 12 * 250_000)]
)
def test_the_logits_of_a_step_take_a_part_of_the_memory(memory, total, logits) -> None:
    memory(total)
    rows = most_positions(GPU, logits)
    assert rows is not None
    # Four copies in float32.
    assert rows * logits * 16 <= total // 8 < (rows + 1) * logits * 16
    assert most_positions(CPU, logits) is None
    assert most_positions(torch.device("xpu"), 40) is not None
    memory(1)
    assert most_positions(GPU, logits) == 1
    # A training or another program may have the rest.
    for free, kept in ((total // 10, 0), (0, total // 10), (total // 20, total // 20)):
        memory(total, free, kept)
        assert most_positions(GPU, logits) == max(1, (free + kept) // 2 // (16 * logits))


def test_pipelines_have_the_limits_of_the_device_and_its_memory(memory) -> None:
    memory(2**20)
    config = SimpleNamespace(vocab_size=100)
    cpu, gpu = (SimpleNamespace(device=device, config=config) for device in (CPU, GPU))
    assert search_limits(cpu, 8, 4) == (*batch_limits(cpu, 8, 4), None) == (2048, 512, None)
    assert search_limits(gpu, 4, 4) == (8 * 4096, 8 * 1024, 2**20 // 128 // 400)
    assert search_limits(gpu, 1, 4, 2000) == (2000, 2000, 2**20 // 128 // 100)
    assert search_limits(gpu, 1, 4, 10_000) == (10_000, 8 * 1024, 2**20 // 128 // 100)
    assert search_limits(gpu, 4, 4, processes=5) == (8 * 4096, 8 * 1024, 2**20 // 128 // 2000)
    assert VaswaniTranslationPipeline.limits is search_limits


def test_unused_memory_is_returned_to_an_accelerator_that_takes_it(accelerators, monkeypatch) -> None:
    returned = []

    def empty_cache() -> None:
        returned.append(True)
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "empty_cache", empty_cache)
    for kind, expected in ((None, []), ("cuda", [True])):
        accelerators(kind)
        return_unused_memory()
        assert returned == expected


def test_the_size_of_the_vocabulary_is_that_of_the_model() -> None:
    model = tiny_model(vocab_size=44)
    assert vocab_size(model) == 44
    other = SimpleNamespace(config=SimpleNamespace(), get_output_embeddings=model.get_output_embeddings)
    assert vocab_size(other) == 44
