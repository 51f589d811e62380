"""Joint vocabulary of a foreign model, whose source and target may have ids of their own."""

from dataclasses import dataclass

import torch


@dataclass
class Vocabulary:
    """
    Our ids, and the row of each in the embeddings of the foreign model.

    Args:
        tokens (`list[str]`): token of each id.
        source_rows (`torch.LongTensor` of shape `(vocab_size,)`): row in the source embeddings; -1 without one.
        target_rows (`torch.LongTensor` of shape `(vocab_size,)`): row in the target embeddings; -1 without one.
        is_target (`torch.BoolTensor` of shape `(vocab_size,)`): True for the ids that a translation may contain; each
            target row has one.
        never (`float`): output bias of all other ids, low enough that they are never generated.
    """

    tokens: list[str]
    source_rows: torch.Tensor
    target_rows: torch.Tensor
    is_target: torch.Tensor
    never: float

    def target_id(self, row: int) -> int:
        """
        Returns our id of a target row.

        Raises:
            ValueError: There is no such row.
        """
        found = ((self.target_rows == row) & self.is_target).nonzero()
        if len(found) != 1:
            raise ValueError(
                f"The settings contain the id {row}, but the target vocabulary has only "
                f"{int(self.is_target.sum())} entries."
            )
        return int(found[0, 0])

    def target_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns our ids of target rows, in the same shape."""
        ids = torch.empty(int(self.target_rows.max()) + 1, dtype=torch.long)
        ids[self.target_rows[self.is_target]] = self.is_target.nonzero()[:, 0]
        return ids[rows]

    def source_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rearranges source embeddings, `(rows, d_model)` -> `(vocab_size, d_model)`; ids without a row get zeros."""
        return _select(matrix, self.source_rows)

    def target_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rearranges target embeddings, `(rows, d_model)` -> `(vocab_size, d_model)`; ids without a row get zeros."""
        return _select(matrix, self.target_rows)

    def output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Rearranges the output bias, `(rows,)` -> `(vocab_size,)`."""
        return bias[self.target_rows.clamp(min=0)].masked_fill(~self.is_target, self.never)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Rearranges logits, `(..., rows)` -> `(..., vocab_size)`."""
        return logits[..., self.target_rows.clamp(min=0)] + torch.where(self.is_target, 0.0, self.never)


def _select(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Selects rows of a matrix; -1 selects zeros."""
    return matrix[rows.clamp(min=0)].masked_fill(rows[:, None] < 0, 0.0)
