"""Blocks of encoded text: their tokens, documents and rows, and that chance depends on nothing but seed and number."""

from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset

from hf_vaswani.data.blocks import BlockEncoder, EncodedText, fixed_rows
from hf_vaswani.data.encoding import EncodedRows
from hf_vaswani.data.objectives import CausalLM, MaskedLM, Masking
from hf_vaswani.data.texts import ENCODED_LINES
from hf_vaswani.data.windows import Window
from hf_vaswani.recipe import ObjectiveRecipe

CAUSAL = CausalLM(1, 2)
MASKED = MaskedLM(Masking(ObjectiveRecipe(), 3, [500, 501]), 1, 2, 40)


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
