"""Embeddings in two dimensions, with their neighbours (Section 3.4), and positional encodings (Section 3.5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Neighbours of a token: the entries of the vocabulary whose embeddings have the greatest cosine with its own.
NEIGHBOURS = 5


@dataclass(frozen=True)
class Embeddings:
    """
    Tokens in the plane of the first two principal components of their embeddings.

    Attributes:
        tokens (`list[int]`): the tokens.
        points (`torch.FloatTensor` of shape `(tokens, 2)`): their places.
        neighbours (`list[list[int]]`): the nearest entries of the vocabulary to each of them, nearest first.
        cosines (`torch.FloatTensor` of shape `(tokens, neighbours)`): cosines of the angles between both.
        neighbour_points (`torch.FloatTensor` of shape `(tokens, neighbours, 2)`): places of the neighbours.
        explained (`list[float]`): share of the variance of the tokens' embeddings in each of both components.
    """

    tokens: list[int]
    points: torch.Tensor
    neighbours: list[list[int]]
    cosines: torch.Tensor
    neighbour_points: torch.Tensor
    explained: list[float]


@torch.inference_mode()
def project_embeddings(matrix: torch.Tensor, tokens: Sequence[int], excluded: Sequence[int] = ()) -> Embeddings:
    """
    Projects the embeddings of tokens to two dimensions by principal component analysis.

    Args:
        matrix (`torch.Tensor` of shape `(vocab_size, d_model)`): the embedding matrix.
        tokens (`Sequence[int]`): tokens, each once.
        excluded (`Sequence[int]`): tokens that are nobody's neighbours, such as padding.
    """
    matrix = matrix.detach().float().cpu()
    chosen = matrix[list(tokens)]
    mean = chosen.mean(dim=0)
    _, values, directions = torch.linalg.svd(chosen - mean, full_matrices=False)
    variances = torch.nn.functional.pad(values.square(), (0, 2))
    axes = torch.zeros(matrix.shape[1], 2)
    axes[:, : min(2, len(directions))] = directions[:2].T
    lengths = matrix.norm(dim=1).clamp(min=1e-9)
    cosines = chosen @ matrix.T / lengths / lengths[list(tokens), None]
    cosines[:, list(excluded)] = -torch.inf
    cosines[range(len(tokens)), list(tokens)] = -torch.inf
    best = cosines.topk(min(NEIGHBOURS, max(matrix.shape[0] - 1 - len(set(excluded)), 0)))
    return Embeddings(
        list(tokens),
        (chosen - mean) @ axes,
        best.indices.tolist(),
        best.values,
        (matrix[best.indices] - mean) @ axes,
        (variances[:2] / variances.sum().clamp(min=1e-9)).tolist(),
    )


@torch.inference_mode()
def position_encodings(stack: Any, length: int) -> torch.Tensor:
    """
    Returns the encodings of the first positions of a stack.

    Args:
        stack ([`VaswaniStack`]): encoder or decoder.
        length (`int`): number of positions.

    Returns:
        `torch.FloatTensor` of shape `(length, d_model)`.

    Raises:
        ValueError: learned positions are fewer than that.
    """
    device = next(stack.parameters()).device
    stack.positions.check(length - 1)
    return stack.positions.encode(torch.arange(length, device=device)).float().cpu()
