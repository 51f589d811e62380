"""The vocabulary of tests of attention, searches and pages."""

from typing import Any

import pytest

from hf_vaswani.data.tokenizer import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Any:
    """A vocabulary of characters, of which a formula in a figure needs dollars."""
    return train_tokenizer(["ab $c$ abc bca cab ca bc"], 20, kind="characters")
