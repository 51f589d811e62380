"""Blocks of encoded text, and the rows that an objective makes of them anew in each epoch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from .encoding import EncodedRows, id_lists, list_lengths
from .objectives import BlockText, Objective, as_table
from .texts import Block, blocks_of, document_numbers, plain_tokenizer
from .windows import AT_ONCE, Window, WindowText

try:
    from datasets import Dataset
except ImportError as error:
    raise ImportError(f"Encoding training text needs {error.name}: pip install 'hf_vaswani[train]'") from error


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
        numbers, turns = window.rows
        return replace(window, rows=window.rows[:, :0]), self.table(numbers, turns)

    def table(self, numbers: np.ndarray, turns: np.ndarray) -> pa.Table:
        """
        Makes the rows of blocks.

        Args:
            numbers (`np.ndarray` of shape `(blocks,)`): numbers of the blocks.
            turns (`np.ndarray` of shape `(blocks,)`): how often each was taken before.

        Returns:
            `pa.Table` with the columns of the objective, and `number`.
        """
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        texts = [
            self.texts[source][number - self.starts[source]]
            for source, number in zip(sources.tolist(), numbers.tolist(), strict=True)
        ]
        chances = [
            random.Random(f"{self.seed} {number} {turn}")
            for number, turn in zip(numbers.tolist(), turns.tolist(), strict=True)
        ]
        return as_table(self.objective.rows(texts, chances), numbers.tolist())


def fixed_rows(text: EncodedText, objective: Objective) -> Dataset:
    """Returns the rows of all blocks with noise that is always the same, for validation and test."""
    encoder = BlockEncoder([text], objective, 0)
    numbers = np.arange(1, len(text) + 1)
    return Dataset(encoder.table(numbers, np.zeros_like(numbers)), fingerprint=f"fixed {len(text)}")


class TextWindowEncoder(torch.utils.data.Dataset[tuple[Window, pa.Table]]):
    """
    A dataset that is indexed by windows of lines from streams: encodes the lines, cuts them into blocks, and makes the
    rows of these. A document ends where its window ends.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        objective ([`Objective`]): makes the rows.
        longest (`int`): most tokens of a block, special tokens included.
        seed (`int`): seed of the run.
        by_line (`bool`): whether each line is a block.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, objective: Objective, longest: int, seed: int, by_line: bool = False
    ) -> None:
        self.tokenizer, self.objective = tokenizer, objective
        self.longest, self.seed, self.by_line = longest, seed, by_line

    def __getitem__(self, window: Window) -> tuple[Window, pa.Table]:
        texts, numbers, chances = [], [], []
        plain = plain_tokenizer(self.tokenizer)
        for i, text in enumerate(window.texts):
            encoded = self._encoded(plain, text)
            tag = None if text.front is None else self.tokenizer.convert_tokens_to_ids(text.front)
            cut = EncodedText(encoded, self.objective, self.longest, tag, self.by_line, source=i)
            for number, block in enumerate(cut.blocks):
                texts.append(cut[number])
                numbers.append(text.numbers[block.first])
                turn = text.turns[block.first]
                chances.append(random.Random(f"{self.seed} {numbers[-1]} {turn} {block.start}"))
        table = as_table(self.objective.rows(texts, chances), numbers)
        return replace(window, texts=[], pairs=len(texts)), table

    @staticmethod
    def _encoded(plain: Tokenizer, text: WindowText) -> Dataset:
        """Encodes the lines of one source, as [`encode_lines`] does."""
        parts = [text.sources[start : start + AT_ONCE] for start in range(0, len(text.sources), AT_ONCE)]
        ids = pa.concat_arrays([id_lists(part, plain, add_special_tokens=False) for part in parts])
        return Dataset(pa.table({"ids": ids, "document": pa.array(text.targets)}), fingerprint="window")
