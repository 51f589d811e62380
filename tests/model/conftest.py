"""Fixtures for the tests of the travelling files."""

import logging

import pytest
import transformers

from hf_vaswani import VaswaniForCausalLM, VaswaniForConditionalGeneration
from hf_vaswani.model.generation_vaswani import prove_generate


@pytest.fixture(autouse=True, scope="session")
def proved() -> None:
    """Proves `generate()` before any test that watches what a search calls, in whatever order they run."""
    for kind in (VaswaniForConditionalGeneration, VaswaniForCausalLM):
        prove_generate(kind)


@pytest.fixture
def transformers_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Returns what transformers logs, also what it says once in a process."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()
    return caplog
