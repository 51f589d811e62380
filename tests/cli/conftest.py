"""Texts and helpers shared by the tests of several verbs."""

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_vaswani.cli import main

SOURCES = ["one two three", "", "nine  four"]
TARGETS = ["eins zwei drei", "", "neun vier vier"]


def translate(monkeypatch, capsys, text: bytes, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code = main(["translate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def texts(tmp_path):
    """Writes two files of many short lines, some empty; returns their folder and the whole text as bytes."""
    words = ["one", "two three", "", "four five six", "nine"]
    lines = [f"{words[i % 5]} {words[i % 3]}".strip() for i in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines[:33]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n".join(lines[33:]), encoding="utf-8")
    return tmp_path, "\n".join(lines).encode()


@pytest.fixture
def files(tmp_path):
    """Writes `SOURCES` and `TARGETS`; returns the names of the two files."""
    for name, lines in (("a.en", SOURCES), ("a.de", TARGETS)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [str(tmp_path / name) for name in ("a.en", "a.de")]


def as_pharaoh(alignment, method: str = "argmax") -> str:
    return " ".join(f"{i}-{j}" for i, j in alignment.links(method))


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """Limits the size of files: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
