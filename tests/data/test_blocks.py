"""Blocks of encoded text: their tokens, documents and rows, and that chance depends on nothing but seed and number."""

from dataclasses import replace
from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from hf_vaswani.data.blocks import (
    ENCODED_LINES,
    Block,
    BlockEncoder,
    EncodedText,
    TextWindowEncoder,
    blocks_of,
    document_numbers,
    encode_lines,
    fixed_rows,
)
from hf_vaswani.data.encoding import EncodedRows, list_lengths
from hf_vaswani.data.objectives import CausalLM, MaskedLM, NextSentence
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.data.windows import Window, WindowText

CAUSAL = CausalLM(1, 2)
MASKED = MaskedLM(0.15, 3, [500, 501], None, 1, 2, 40)


def encoded(lengths: list[int], documents: list[str], start: int = 10) -> Dataset:
    """Lines of tokens that count up through the text."""
    places = np.cumsum([0, *lengths]) + start
    ids = [list(range(a, b)) for a, b in pairwise(places)]
    features = {"ids": ids, "document": documents}
    return Dataset.from_dict(features, features=ENCODED_LINES)


LENGTHS, DOCUMENTS = [5, 6, 30, 4, 9, 3, 8, 90], list("aaabbbcd")


@pytest.mark.parametrize("by_line", [False, True])
@pytest.mark.parametrize("objective", [CAUSAL, MASKED], ids=["packed", "apart"])
def test_blocks_have_all_tokens_in_order(objective, by_line) -> None:
    text = EncodedText(encoded(LENGTHS, DOCUMENTS), objective, 40, by_line=by_line)
    blocks = [text[i] for i in range(len(text))]
    assert [token for block in blocks for token in block.ids] == list(range(10, 10 + sum(LENGTHS)))
    assert all(block.ends[-1] == block.documents[-1] == len(block.ids) for block in blocks)
    rows = fixed_rows(text, objective)
    lengths = [len(row["source_ids"]) for row in rows]
    assert max(lengths) <= 40
    # An estimate that is exact, but for documents that go on in another block.
    assert all(0 <= n - length <= 1 for n, length in zip(text.block_lengths().tolist(), lengths, strict=True))
    if objective is CAUSAL:
        assert [token for row in rows for token in row["target_ids"] if token > 2] == list(
            range(10, 10 + sum(LENGTHS))
        )
        # Each document ends once; with one line in a block, too.
        assert sum(row["target_ids"].count(2) for row in rows) == 4
    if by_line:
        assert len(text) == len(LENGTHS) + 2


def test_sources_are_counted_through() -> None:
    first = EncodedText(encoded(LENGTHS, DOCUMENTS), MASKED, 40)
    second = EncodedText(encoded(LENGTHS, DOCUMENTS, 200), MASKED, 40, tag=7, source=1)
    encoder = BlockEncoder([first, second], MASKED, seed=1)
    numbers = np.array([1, len(first), len(first) + 1, len(first) + len(second)])
    rows = EncodedRows(Dataset(encoder.table(numbers, np.zeros(4, dtype=int))))
    assert [rows[i]["number"] for i in range(4)] == numbers.tolist()
    for i, block in enumerate((first[0], first[len(first) - 1], second[0], second[len(second) - 1])):
        labels = rows[i]["target_ids"][1:-1]
        assert all(label in (-100, token) for label, token in zip(labels, block.ids, strict=True))
    assert second[0].document[0] == 1 and second[0].tag == 7


def test_chance_depends_on_seed_number_and_turn_alone() -> None:
    text = EncodedText(encoded(LENGTHS, DOCUMENTS), MASKED, 40)

    def rows(numbers: list[int], turn: int = 0, seed: int = 1) -> list[list[int]]:
        table = BlockEncoder([text], MASKED, seed).table(np.array(numbers), np.full(len(numbers), turn))
        return table["source_ids"].to_pylist()

    assert rows([3, 1]) == [rows([3])[0], rows([1, 2])[0]]
    assert rows([1, 2, 3]) != rows([1, 2, 3], turn=1) != rows([1, 2, 3], turn=1, seed=2)
    window = Window(0, {}, {}, 2, (0, 0), rows=np.array([[3, 1], [0, 0]]))
    kept, table = BlockEncoder([text], MASKED, 1)[window]
    assert table["source_ids"].to_pylist() == rows([3, 1]) and kept.rows.shape == (2, 0)


NEXT = NextSentence(0.15, 3, [500, 501], None, 1, 2, 40)


@pytest.mark.parametrize("objective", [CAUSAL, MASKED, NEXT], ids=["packed", "apart", "next sentence"])
def test_the_parts_of_several_processes_are_the_rows_of_one(objective) -> None:
    """What replaces a next sentence comes from any part of the window."""
    text = EncodedText(encoded(LENGTHS, DOCUMENTS), objective, 40)
    count = len(text)
    window = Window(0, {}, {}, count, (0, 0), rows=np.array([range(1, count + 1), [0] * count]))
    encoder = BlockEncoder([text], objective, 1)
    _, whole = encoder[window]
    for processes in (2, 3, count + 2):
        parts = [encoder[replace(window, share=(index, processes))][1] for index in range(processes)]
        assert max(map(len, parts)) <= count // processes + 1
        assert pa.concat_tables(parts).to_pylist() == whole.to_pylist()


# ---- Lines -------------------------------------------------------------------------------------------------------

TEXT = {
    "text": ["one two three", "four five", "six", "seven eight </s> nine", "ten"],
    "document": ["a", "a", "b", "b", "a"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT["text"] * 3, vocab_size=300)


@pytest.mark.parametrize("objective", [CAUSAL, NEXT], ids=["packed", "next sentence"])
def test_the_parts_of_a_stream_are_the_rows_of_one(tokenizer, objective) -> None:
    names = TEXT["text"], TEXT["document"]
    texts = [WindowText(*names, range(start, start + 5), [0] * 5, None) for start in (1, 100)]
    encoder = TextWindowEncoder(tokenizer, objective, 12, seed=1)
    kept, whole = encoder[Window(0, {}, {}, 10, (0, 0), texts)]
    parts = [encoder[Window(0, {}, {}, 10, (0, 0), texts, share=(index, 2))] for index in range(2)]
    assert kept.pairs == len(whole) == parts[0][0].pairs and all(0 < len(table) < len(whole) for _, table in parts)
    assert pa.concat_tables([table for _, table in parts]).to_pylist() == whole.to_pylist()


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
