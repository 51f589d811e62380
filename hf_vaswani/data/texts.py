"""Running text as ids: its lines, encoded once and cached, and the blocks of lines that a model reads at once."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .encoding import id_lists
from .tokenizer import backend

with extra("train"):
    import datasets
    from datasets import Dataset
    from datasets.fingerprint import Hasher

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

    def encode(rows: pa.Table) -> pa.Table:
        # Another process receives the tokenizer without it.
        plain.encode_special_tokens = True
        ids = id_lists(rows["text"].to_pylist(), plain, add_special_tokens=False)
        return pa.table({"ids": ids, "document": rows["document"].cast(pa.string())})

    return (
        texts.with_format("arrow")
        .map(
            encode,
            batched=True,
            remove_columns=texts.column_names,
            features=ENCODED_LINES,
            num_proc=num_proc,
            # Using a fast tokenizer changes its pickle, with which `datasets` would not find the cache again.
            new_fingerprint=Hasher.hash([texts._fingerprint, plain.to_str()]),
            desc="Encoding",
        )
        .with_format(None)
    )


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
