"""Lets searches in fixed places run on the CPU."""

import weakref
from typing import Any

import pytest
import torch

from hf_vaswani.captured import CapturedStep
from hf_vaswani.model.generation_vaswani import FastSearchMixin
from hf_vaswani.translation import static_search

from .static import use_buckets


@pytest.fixture
def at_home(monkeypatch):
    """Lets `generate()` take static searches on the CPU, in small buffers, and yields a list of those that it took."""
    taken: list[Any] = []

    def search(*call):
        found = static_search.static_search(*call)
        taken.append(found)
        return found

    monkeypatch.setattr(FastSearchMixin, "at_home", staticmethod(search))
    monkeypatch.setattr(static_search, "PROVED", set())
    monkeypatch.setattr(static_search, "TURNED_OFF", set())
    monkeypatch.setattr(static_search, "KEPT", weakref.WeakKeyDictionary())
    use_buckets(monkeypatch, 16, 4)
    return taken


@pytest.fixture
def graphs(monkeypatch, cuda_graphs):
    """Lets static searches capture on the CPU, as they do on a GPU."""

    def captured(function, device, name, pool=None):
        return CapturedStep(function, torch.device("cuda"), name, pool)

    monkeypatch.setattr(static_search, "CapturedStep", captured)
    return cuda_graphs
