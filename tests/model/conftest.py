"""Fixtures for the tests of the travelling files."""

import pytest

from hf_vaswani import VaswaniForCausalLM, VaswaniForConditionalGeneration
from hf_vaswani.model.generation_vaswani import prove_generate


@pytest.fixture(autouse=True, scope="session")
def proved() -> None:
    """Proves `generate()` before any test that watches what a search calls, in whatever order they run."""
    for kind in (VaswaniForConditionalGeneration, VaswaniForCausalLM):
        prove_generate(kind)
