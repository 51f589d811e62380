"""The built-in English-German corpus, `pocket.tsv.xz` beside this file, which `tools/pocket_corpus.py` writes."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("pocket.tsv.xz")
SPLITS = ("train", "validation", "test")


class PocketPair(NamedTuple):
    """A sentence pair; `links` are the words that belong together, counted from 0, as in `0-0 1-2`."""

    english: str
    german: str
    links: str


@cache
def read_pocket_corpus() -> dict[str, list[PocketPair]]:
    """Reads 20,000 pairs to train on, 500 for validation and 500 to test; no sentence is in two of them."""
    corpus: dict[str, list[PocketPair]] = {split: [] for split in SPLITS}
    with lzma.open(FILE, "rt", encoding="utf-8", newline="\n") as rows:
        for row in rows:
            split, *columns = row.rstrip("\n").split("\t")
            corpus[split].append(PocketPair(*columns))
    return corpus
