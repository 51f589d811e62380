"""What a process keeps of the memory that it has used."""

import os
import platform

import pytest

from hf_vaswani.cli import main
from hf_vaswani.memory import keep_freed_memory, return_freed_memory


def test_onednn_keeps_few_products_unless_the_environment_says_otherwise(monkeypatch) -> None:
    """Otherwise the memory grows by a gigabyte where texts have many lengths."""
    names = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    for given, kept in ((None, "256"), ("9", "9")):
        for name in names:
            monkeypatch.delenv(name, raising=False)
            if given:
                monkeypatch.setenv(name, given)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert [os.environ[name] for name in names] == [kept] * 2


@pytest.mark.parametrize("libc", ["glibc", "musl"])
def test_freed_blocks_are_kept_and_returned_where_glibc_can(monkeypatch, libc) -> None:
    told = []

    class Library:
        def __init__(self, _: None) -> None:
            self.mallopt = lambda parameter, value: told.append((parameter, value))
            self.malloc_trim = told.append

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    keep_freed_memory()
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3).
    assert told == ([(-3, 4 * 2**20), (-1, 2**31 - 1)] if libc == "glibc" else [])
    return_freed_memory()
    assert told[2:] == ([0] if libc == "glibc" else [])
