"""Running text as ids: its lines, the blocks of lines that a model reads at once, and the rows made of blocks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .encoding import EncodedRows, cached, id_lists, list_lengths
from .objectives import ALL, BlockText, Objective
from .tokenizer import backend
from .windows import ENCODE_BATCH, Window, WindowText

with extra("train"):
    import datasets
    from datasets import Dataset


ENCODED_LINES = datasets.Features(
    {"ids": datasets.List(datasets.Value("int32")), "document": datasets.Value("string")}
)


class Block(NamedTuple):
    """
    Lines that a model reads at once, or a part of a line that is too long.

    Attributes:
        first (`int`), last (`int`): numbers of the first line, and of the line behind the last one.
        start (`int`), end (`int`): places of the block's tokens among those of its lines.
    """

    first: int
    last: int
    start: int
    end: int


def encode_lines(texts: Dataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None) -> Dataset:
    """
    Encodes lines as ids. The result is cached on disk under the fingerprints of the text and the tokenizer.

    Args:
        texts (`Dataset`): columns `text` and `document`.
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer.
        num_proc (`int`, *optional*): number of processes; by default one, with the tokenizer's threads.

    Returns:
        `Dataset` with the columns `ids`, without special tokens at the ends of a line, and `document`.

    Raises:
        OSError: the cache cannot be written.
        ValueError: a line has an unpaired UTF-16 surrogate.
    """
    plain = plain_tokenizer(tokenizer)

    def encode(rows: pa.Table, indices: list[int]) -> pa.Table:
        # Another process receives the tokenizer without it.
        plain.encode_special_tokens = True
        ids = id_lists(rows["text"].to_pylist(), plain, add_special_tokens=False)
        return pa.table({"ids": ids, "document": rows["document"].cast(pa.string())})

    return cached(texts, encode, ENCODED_LINES, [plain.to_str()], num_proc)


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Returns a tokenizer of the library `tokenizers` that finds no special tokens in a text: a "</s>" is text."""
    plain = Tokenizer.from_str(backend(tokenizer, False).to_str())
    plain.encode_special_tokens = True
    return plain


def document_numbers(names: pa.ChunkedArray) -> np.ndarray:
    """Numbers documents in the order of their lines, of shape `(lines,)`: a new one begins where the name changes."""
    if len(names) == 0:
        return np.empty(0, dtype=np.int64)
    changes = pa.compute.not_equal(names[1:], names[:-1]).to_numpy()
    return np.concatenate([[0], np.cumsum(changes)])


def blocks_of(
    lengths: np.ndarray, documents: np.ndarray, longest: int, extra: int = 0, is_packed: bool = False
) -> list[Block]:
    """
    Cuts running text into blocks: as many lines of one document as fit.

    Args:
        lengths (`np.ndarray` of shape `(lines,)`): tokens of each line.
        documents (`np.ndarray` of shape `(lines,)`): document of each line.
        longest (`int`): most tokens of a block. A longer line makes several blocks of its own.
        extra (`int`): tokens that a document in a block costs besides its lines, such as `<s>` and `</s>`.
        is_packed (`bool`): whether a block goes on with the next document.

    Returns:
        `list[Block]`: in the order of the text; every token is in one of them.
    """
    blocks: list[Block] = []
    room = longest - extra
    first, used = 0, 0
    for i, (length, document) in enumerate(zip(lengths.tolist(), documents.tolist(), strict=True)):
        is_new = i > first and document != documents[i - 1]
        cost = length + extra * (is_new or i == first)
        if i > first and (used + cost > longest or length > room or (is_new and not is_packed)):
            blocks.append(_whole(lengths, first, i))
            first, used, cost = i, 0, length + extra
        if length > room:
            # Parts of about the same length.
            count = -(-length // room)
            cuts = [length * part // count for part in range(count + 1)]
            blocks += [Block(i, i + 1, start, end) for start, end in pairwise(cuts)]
            first, used = i + 1, 0
        else:
            used += cost
    if first < len(lengths):
        blocks.append(_whole(lengths, first, len(lengths)))
    return blocks


def _whole(lengths: np.ndarray, first: int, last: int) -> Block:
    return Block(first, last, 0, int(lengths[first:last].sum()))


class EncodedText:
    """
    The encoded lines of a source, cut into blocks.

    Args:
        encoded (`Dataset`): result of [`encode_lines`].
        objective ([`Objective`]): tells what a block needs besides its text.
        longest (`int`): most tokens of a block, special tokens included.
        tag (`int`, *optional*): id of the language tag.
        by_line (`bool`): whether each line is a block.
        source (`int`): number of the source, which tells its documents from those of others.
    """

    def __init__(
        self,
        encoded: Dataset,
        objective: Objective,
        longest: int,
        tag: int | None = None,
        by_line: bool = False,
        source: int = 0,
    ) -> None:
        self.lines = EncodedRows(encoded.select_columns("ids"))
        self.lengths = list_lengths(encoded, "ids").astype(np.int64)
        self.documents = document_numbers(encoded.data.column("document"))
        self.objective, self.tag, self.source = objective, tag, source
        units = np.arange(len(self.lengths)) if by_line else self.documents
        packed = objective.is_packed and not by_line
        self.blocks: list[Block] = blocks_of(self.lengths, units, longest, objective.extra, packed)

    def block_lengths(self) -> np.ndarray:
        """Returns the tokens of each block, special tokens included, of shape `(blocks,)`."""
        extra = self.objective.extra
        found = [
            block.end - block.start + extra * int(1 + self.documents[block.last - 1] - self.documents[block.first])
            for block in self.blocks
        ]
        return np.array(found, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> BlockText:
        block = self.blocks[number]
        numbers = range(block.first, block.last)
        ids = np.concatenate([line["ids"] for line in self.lines.__getitems__(list(numbers))])
        lengths, documents = self.lengths[block.first : block.last], self.documents[block.first : block.last]
        is_part = (block.start, block.end) != (0, len(ids))
        ends = np.cumsum(lengths).tolist() if not is_part else [block.end - block.start]
        last_lines = np.flatnonzero(np.diff(documents)).tolist()
        is_last_line = block.last == len(self.documents) or self.documents[block.last] != documents[-1]
        return BlockText(
            ids[block.start : block.end].tolist(),
            ends,
            [*(ends[i] for i in last_lines), ends[-1]],
            bool(is_last_line) and block.end == len(ids),
            (self.source, int(documents[0])),
            self.tag,
        )


class BlockEncoder(torch.utils.data.Dataset[tuple[Window, pa.Table]]):
    """
    A dataset that is indexed by windows of blocks, and makes their rows.

    What happens to a block depends on the seed, the block's number in the text and the pass over the text; which other
    document [`NextSentence`] takes, on the blocks of the window, too. All processes have the same windows.

    Args:
        texts (`Sequence[EncodedText]`): the sources. Blocks are numbered from 1 through all of them.
        objective ([`Objective`]): makes the rows.
        seed (`int`): seed of the run.
    """

    def __init__(self, texts: Sequence[EncodedText], objective: Objective, seed: int) -> None:
        self.texts, self.objective, self.seed = texts, objective, seed
        self.starts = np.cumsum([1, *map(len, texts)])

    def __getitem__(self, window: Window) -> tuple[Window, pa.Table]:
        numbers, repetitions = window.rows
        table = self.table(numbers, repetitions, window.part(len(numbers)))
        return replace(window, rows=window.rows[:, :0]), table

    def table(self, numbers: np.ndarray, repetitions: np.ndarray, part: slice = ALL) -> pa.Table:
        """
        Makes the rows of a part of the blocks that are read together.

        Args:
            numbers (`np.ndarray` of shape `(blocks,)`): numbers of the blocks.
            repetitions (`np.ndarray` of shape `(blocks,)`): how often each was taken before.
            part (`slice`): the blocks whose rows are made.

        Returns:
            `pa.Table` with the columns of the objective, and `number`.
        """
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        texts = [
            self.texts[source][number - self.starts[source]]
            for source, number in zip(sources.tolist(), numbers.tolist(), strict=True)
        ]
        rngs = [
            random.Random(f"{self.seed} {number} {repetition}")
            for number, repetition in zip(numbers.tolist(), repetitions.tolist(), strict=True)
        ]
        return self.objective.table(texts, rngs, numbers.tolist(), part)


def fixed_rows(text: EncodedText, objective: Objective) -> Dataset:
    """Returns the rows of all blocks with noise that is always the same, for validation and test."""
    encoder = BlockEncoder([text], objective, 0)
    numbers = np.arange(1, len(text) + 1)
    return Dataset(encoder.table(numbers, np.zeros_like(numbers)), fingerprint=f"fixed {len(text)}")


@dataclass(eq=False)
class TextWindowEncoder(torch.utils.data.Dataset[tuple[Window, pa.Table]]):
    """
    A dataset that is indexed by windows of lines from streams: encodes the lines, cuts them into blocks, and makes the
    rows of these. A document ends where its window ends.

    Attributes:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        objective ([`Objective`]): makes the rows.
        longest (`int`): most tokens of a block, special tokens included.
        seed (`int`): seed of the run.
        by_line (`bool`): whether each line is a block.
    """

    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    longest: int
    seed: int
    by_line: bool = False

    def __getitem__(self, window: Window) -> tuple[Window, pa.Table]:
        texts, numbers, rngs = [], [], []
        plain = plain_tokenizer(self.tokenizer)
        for i, text in enumerate(window.texts):
            encoded = self._encoded(plain, text)
            tag = None if text.source_prefix is None else self.tokenizer.convert_tokens_to_ids(text.source_prefix)
            cut = EncodedText(encoded, self.objective, self.longest, tag, self.by_line, source=i)
            for number, block in enumerate(cut.blocks):
                texts.append(cut[number])
                numbers.append(text.numbers[block.first])
                repetition = text.repetitions[block.first]
                rngs.append(random.Random(f"{self.seed} {numbers[-1]} {repetition} {block.start}"))
        table = self.objective.table(texts, rngs, numbers, window.part(len(texts)))
        return replace(window, texts=[], pairs=len(texts)), table

    @staticmethod
    def _encoded(plain: Tokenizer, text: WindowText) -> Dataset:
        """Encodes the lines of one source, as [`encode_lines`] does."""
        parts = [text.sources[start : start + ENCODE_BATCH] for start in range(0, len(text.sources), ENCODE_BATCH)]
        ids = pa.concat_arrays([id_lists(part, plain, add_special_tokens=False) for part in parts])
        return Dataset(pa.table({"ids": ids, "document": pa.array(text.targets)}), fingerprint="window")
