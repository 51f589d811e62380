"""Running text as ids and blocks: nothing is lost, documents stay apart, and the cache is found again."""

import datasets
import numpy as np
import pytest
from datasets import Dataset

from hf_vaswani.data.encoding import EncodedRows, list_lengths
from hf_vaswani.data.texts import Block, blocks_of, document_numbers, encode_lines
from hf_vaswani.data.tokenizer import train_tokenizer

TEXT = {
    "text": ["one two three", "four five", "six", "seven eight </s> nine", "ten"],
    "document": ["a", "a", "b", "b", "a"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT["text"] * 3, vocab_size=300)


def test_lines_are_encoded_without_special_tokens(tokenizer) -> None:
    encoded = encode_lines(Dataset.from_dict(TEXT), tokenizer)
    assert encode_lines(Dataset.from_dict(TEXT), tokenizer, num_proc=2)["ids"] == encoded["ids"]
    rows = EncodedRows(encoded.select_columns("ids"))
    assert len(rows) == 5
    for i, text in enumerate(TEXT["text"]):
        ids = rows[i]["ids"].tolist()
        assert ids == tokenizer(text)["input_ids"][:-1]
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == text
    assert document_numbers(encoded.data.column("document")).tolist() == [0, 0, 1, 1, 2]
    assert list_lengths(encoded, "ids").tolist() == [len(rows[i]["ids"]) for i in range(5)]


def test_the_cache_knows_text_and_tokenizer(tokenizer, tmp_path) -> None:
    Dataset.from_dict(TEXT).to_parquet(tmp_path / "text.parquet")
    text = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "text.parquet"), split="train", cache_dir=str(tmp_path)
    )
    first = encode_lines(text, tokenizer)
    again = encode_lines(text, tokenizer)
    assert first.cache_files == again.cache_files != []
    other = train_tokenizer(TEXT["text"], vocab_size=290)
    assert encode_lines(text, other).cache_files != first.cache_files
    assert encode_lines(text, tokenizer, num_proc=2)["ids"] == first["ids"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("extra", [0, 2, 3])
@pytest.mark.parametrize("longest", [7, 20, 1000])
def test_every_token_is_in_one_block(longest, extra, is_packed) -> None:
    draws = np.random.default_rng(longest + extra)
    lengths = draws.integers(1, 15, 200)
    documents = np.cumsum(draws.random(200) < 0.2)
    blocks = blocks_of(lengths, documents, longest, extra, is_packed)
    found = []
    for block in blocks:
        line = np.repeat(np.arange(block.first, block.last), lengths[block.first : block.last])
        place = np.concatenate([np.arange(n) for n in lengths[block.first : block.last]])
        found += list(zip(line[block.start : block.end], place[block.start : block.end], strict=True))
        inside = np.unique(documents[block.first : block.last])
        assert is_packed or len(inside) == 1
        assert block.end - block.start + extra * len(inside) <= longest
        # A part of a line stands alone.
        assert block.last - block.first == 1 or (block.start, block.end) == (
            0,
            lengths[block.first : block.last].sum(),
        )
    assert found == [(i, place) for i, length in enumerate(lengths) for place in range(length)]


def test_blocks_are_filled() -> None:
    lengths, documents = np.array([4, 4, 4, 4]), np.array([0, 0, 0, 1])
    assert blocks_of(lengths, documents, 10, 2) == [Block(0, 2, 0, 8), Block(2, 3, 0, 4), Block(3, 4, 0, 4)]
    # The next document costs its special tokens, too.
    assert blocks_of(lengths, documents, 12, 2, is_packed=True) == [Block(0, 2, 0, 8), Block(2, 4, 0, 8)]
    assert blocks_of(lengths, documents, 11, 2, is_packed=True) == [
        Block(0, 2, 0, 8),
        Block(2, 3, 0, 4),
        Block(3, 4, 0, 4),
    ]


def test_a_long_line_is_cut_into_even_parts() -> None:
    blocks = blocks_of(np.array([2, 25, 3]), np.array([0, 0, 0]), 12, 2)
    assert blocks == [Block(0, 1, 0, 2), Block(1, 2, 0, 8), Block(1, 2, 8, 16), Block(1, 2, 16, 25), Block(2, 3, 0, 3)]
    assert blocks_of(np.array([], dtype=int), np.array([], dtype=int), 12) == []
