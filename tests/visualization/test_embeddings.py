"""Projected embeddings, neighbours and positions, against plain computations."""

import pytest
import torch

from hf_vaswani.model.modeling_vaswani import sinusoids
from hf_vaswani.visualization.embeddings import NEIGHBOURS, position_encodings, project_embeddings

from ..networks import tiny_model


def test_points_of_a_plane_keep_their_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    plane, _ = torch.linalg.qr(torch.randn(16, 2, generator=generator))
    matrix = torch.randn(30, 2, generator=generator) @ plane.T + 3
    found = project_embeddings(matrix, [4, 7, 9, 12, 20])
    torch.testing.assert_close(
        torch.cdist(found.points, found.points),
        torch.cdist(matrix[found.tokens], matrix[found.tokens]),
        atol=1e-3,
        rtol=0,
    )
    assert sum(found.explained) == pytest.approx(1, abs=1e-4)
    assert found.explained[0] >= found.explained[1]
    # Neighbours are projected as the tokens are.
    near = torch.tensor(found.neighbours)
    between = (matrix[found.tokens][:, None] - matrix[near]).norm(dim=-1)
    torch.testing.assert_close(
        (found.points[:, None] - found.neighbour_points).norm(dim=-1), between, atol=1e-3, rtol=0
    )


def test_neighbours_have_the_greatest_cosines() -> None:
    matrix = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    found = project_embeddings(matrix, [3, 5], excluded=[0, 1])
    for token, neighbours, cosines in zip(found.tokens, found.neighbours, found.cosines, strict=True):
        all_cosines = {
            i: float(torch.cosine_similarity(matrix[token], matrix[i], dim=0)) for i in range(2, 30) if i != token
        }
        assert neighbours == sorted(all_cosines, key=lambda i: -all_cosines[i])[:NEIGHBOURS]
        assert cosines.tolist() == pytest.approx([all_cosines[i] for i in neighbours], abs=1e-5)


@pytest.mark.parametrize("tokens", [[5], [5, 6]])
def test_few_tokens_and_a_small_vocabulary(tokens) -> None:
    found = project_embeddings(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)), tokens, [0, 1, 2, 3])
    assert found.points.shape == (len(tokens), 2)
    assert found.points.isfinite().all()
    assert len(found.neighbours[0]) == 3


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
def test_positions_are_those_of_the_model(layout) -> None:
    model = tiny_model(sinusoid_layout=layout)
    found = position_encodings(model.get_encoder(), 9)
    torch.testing.assert_close(found, sinusoids(torch.arange(9), 16, layout))
    learned = tiny_model(position_encoding="learned", max_position_embeddings=12)
    table = learned.model.decoder.positions.table.weight
    assert torch.equal(position_encodings(learned.get_decoder(), 12), table)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        position_encodings(learned.get_decoder(), 13)
