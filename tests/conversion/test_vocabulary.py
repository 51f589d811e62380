"""Rows of a foreign model's embeddings, rearranged for our ids."""

from dataclasses import replace

import pytest
import torch

from hf_vaswani.conversion.vocabulary import Vocabulary

# Two ids of the source alone, one of both sides, and two of the target alone.
JOINT = Vocabulary(
    tokens=["a", "b", "</s>", "x", "y"],
    source_rows=torch.tensor([0, 2, 1, -1, -1]),
    target_rows=torch.tensor([-1, -1, 0, 2, 1]),
    is_target=torch.tensor([False, False, True, True, True]),
    never=-1e9,
)
MATRIX = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])


def test_matrices_have_a_row_for_each_id_and_zeros_without_one() -> None:
    assert JOINT.source_matrix(MATRIX)[:, 0].tolist() == [1, 3, 2, 0, 0]
    assert JOINT.target_matrix(MATRIX)[:, 0].tolist() == [0, 0, 1, 3, 2]


def test_ids_outside_the_target_are_never_generated() -> None:
    assert JOINT.output_bias(torch.tensor([0.1, 0.2, 0.3])).tolist() == pytest.approx([-1e9, -1e9, 0.1, 0.3, 0.2])
    logits = JOINT.logits(torch.tensor([[[5.0, 6.0, 7.0]]]))
    assert logits.tolist() == [[[-1e9, -1e9, 5.0, 7.0, 6.0]]]


def test_a_source_symbol_may_have_the_row_of_an_unknown_one() -> None:
    """As in fairseq, where its logit is that of <unk> minus a constant."""
    vocabulary = replace(JOINT, target_rows=torch.tensor([0, 0, 0, 2, 1]), never=-64.0)
    assert vocabulary.logits(torch.tensor([5.0, 6.0, 7.0])).tolist() == [-59.0, -59.0, 5.0, 7.0, 6.0]
    assert vocabulary.target_matrix(MATRIX)[:, 0].tolist() == [1, 1, 1, 3, 2]


def test_target_rows_are_found_again() -> None:
    assert [JOINT.target_id(row) for row in range(3)] == [2, 4, 3]
    assert JOINT.target_ids(torch.tensor([[0, 1], [2, 2]])).tolist() == [[2, 4], [3, 3]]
    for row in (3, -1):
        with pytest.raises(ValueError, match=f"contain the id {row}, but the target vocabulary has only 3 entries"):
            JOINT.target_id(row)
