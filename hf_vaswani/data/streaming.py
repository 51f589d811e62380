"""Streamed training text: read in windows, each of which is shuffled, encoded and batched in memory."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import torch

from ..extras import extra
from .batching import BatchOrder, PairCollator
from .tables import named_errors
from .windows import Window, WindowText, WindowUpdates

with extra("train"):
    from datasets import IterableDataset

# The start of a stream.
START: dict[str, Any] = {"passes": 0, "pairs": 0, "state": {}}

# Pairs are numbered from 1 in the first stream, from here in the second, from twice this number in the third, ...
NUMBERS = 10**12


@dataclass
class Stream:
    """
    A source of text of unknown length, repeated without end.

    Args:
        rows (`IterableDataset`): two text columns.
        name (`str`): direction, as in en-de.
        weight (`float`): mixing ratio among the streams.
        front (`str`, *optional*): language tag or prefix in front of the source sentences, or both.
        description (`dict[str, Any]`): identifies the text when a run is resumed; JSON-serializable.
        origin (`Sequence[str]`): files or dataset, for error messages.
        columns (`tuple[str, str]`): the columns; of running text, `text` and `document`.
    """

    rows: IterableDataset
    name: str
    weight: float
    front: str | None
    description: dict[str, Any]
    origin: Sequence[str] = ()
    columns: tuple[str, str] = ("source", "target")


class _Reader:
    """Reads the pairs of one stream, pass after pass, from a JSON-serializable `place`; they follow number `first`."""

    def __init__(self, stream: Stream, place: dict[str, Any], first: int) -> None:
        # An iterable dataset holds its own position, so it cannot be shared.
        self.rows = copy.deepcopy(stream.rows)
        self.name = stream.name
        self.front = stream.front
        self.first = first
        self.origin = stream.origin or [stream.name]
        self.columns = stream.columns
        self._go_to(place)

    def _go_to(self, place: dict[str, Any]) -> None:
        self.place = place
        self.rows.load_state_dict(place["state"])
        self.iterator = named_errors(self.rows, self.origin)
        self.ahead = next(self.iterator, None)
        if self.ahead is None:
            raise ValueError(f"The training text of {self.name} is empty.")

    def take(self, count: int) -> WindowText:
        """Reads the next `count` pairs, or the rest of this pass if it is shorter."""
        rows = list(chain([self.ahead], islice(self.iterator, count - 1)))
        first, pairs = self.first + self.place["pairs"] + 1, self.place["pairs"] + len(rows)
        numbers, repetitions = range(first, first + len(rows)), [self.place["passes"]] * len(rows)
        sources, targets = ([row[column] for row in rows] for column in self.columns)
        text = WindowText(sources, targets, numbers, repetitions, self.front)
        self.place = self.place | {"pairs": pairs, "state": self.rows.state_dict()}
        # One row is read ahead to recognize the last pair of a pass.
        self.ahead = next(self.iterator, None)
        if self.ahead is None:
            self._go_to(START | {"passes": self.place["passes"] + 1})
        return text


class StreamUpdates(WindowUpdates):
    """
    [`Updates`] over text that is streamed instead of cached: window after window, pass after pass.

    A window has `size` pairs, which are batched like those of an epoch. The first stream sets the pass: a window ends
    where it ends, and a pass has each of its pairs exactly once. The other streams are mixed in by weight, and repeat
    independently of it. All processes read the same text.

    Args:
        streams (`Sequence[Stream]`): sources of the text.
        encoder ([`WindowEncoder`] or [`TextWindowEncoder`]), order, collator, num_workers: as in [`WindowUpdates`].
        size (`int`): pairs of a window, all streams together.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        encoder: torch.utils.data.Dataset[tuple[Window, pa.Table]],
        size: int,
        order: BatchOrder,
        collator: PairCollator,
        num_workers: int = 0,
    ) -> None:
        super().__init__(encoder, order, collator, num_workers)
        self.streams = streams
        self.size = size
        self.start: dict[str, Any] = {"window": 0, "update": 0, "places": [START] * len(streams)}
        self.fingerprint: dict[str, Any] = {"streams": [stream.description for stream in streams]}

    def windows(self, position: dict[str, Any]) -> Iterator[Window]:
        """Yields the windows from a position on: the number of a window, and the places of all streams before it."""
        index, places = position["window"], position["places"]
        readers = zip(self.streams, places, strict=True)
        first, *others = [_Reader(stream, place, i * NUMBERS) for i, (stream, place) in enumerate(readers)]
        weights = [stream.weight for stream in self.streams]
        share = max(1, round(self.size * weights[0] / sum(weights)))
        while True:
            before = first.place["pairs"]
            texts = [first.take(share)]
            after = before + len(texts[0].sources)
            for reader, weight in zip(others, weights[1:], strict=True):
                # Counted from the start of the pass, so rounding errors do not accumulate.
                wanted = int(after * weight / weights[0]) - int(before * weight / weights[0])
                while wanted:
                    texts.append(reader.take(wanted))
                    wanted -= len(texts[-1].sources)
            reached = [reader.place for reader in (first, *others)]
            count = sum(len(text.sources) for text in texts)
            ends = {"window": index, "places": places}, {"window": index + 1, "places": reached}
            yield Window(index, *ends, count, (places[0]["passes"], reached[0]["passes"]), texts)
            index, places = index + 1, reached
