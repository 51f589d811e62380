"""Running text in one language, from all sources of a run, of which objectives make what a model predicts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ..model.sentences_vaswani import LanguageTags
from .blocks import BlockEncoder, EncodedText, TextWindowEncoder, encode_lines, fixed_rows
from .objectives import MASK, Objective, ObjectiveSettings
from .reading import Source
from .task_data import VOCABULARY_ROWS, EvaluationSet, TaskData, TrainingRows
from .tokenizer import Frame, put_special_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningTextData(TaskData):
    """
    Running text.

    Attributes:
        objective ([`ObjectiveSettings`]): what a model predicts.
        frame ([`Frame`]): the special tokens around a text.
        by_line (`bool`): whether a model reads each line by itself, and no blocks of several lines.
    """

    objective: ObjectiveSettings
    frame: Frame
    by_line: bool = False

    stream_columns = ("text", "document")

    @property
    def longest_row(self) -> int:
        """Most tokens of a block."""
        return self.objective.block_length

    def check_split(self, source: Source, split: str) -> None:
        """Raises a `ValueError` if a text is a single document, but the objective needs several."""
        if not self.objective.next_sentence:
            return
        names = islice(chain.from_iterable(batch["document"] for batch in source.batches(split)), VOCABULARY_ROWS)
        first = next(names, None)
        if all(name == first for name in names):
            raise ValueError(
                f"objective.next_sentence needs several documents, but the {split} text of {source.name} is one: "
                f"{' and '.join(source.origin(split))}. Put blank lines between documents, or set "
                "data.document_column."
            )

    def check(
        self, sources: Sequence[Source], labels: Sequence[str], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Checks that the vocabulary has the entries that the objective needs."""
        if tokenizer is not None:
            self.objective.build(tokenizer)

    def extra_tokens(self) -> list[str]:
        """Returns the entries that the objective needs in the vocabulary."""
        return self.objective.extra_tokens()

    def set_up_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Adds the entries that the task needs, and puts the special tokens around a text that it has there."""
        extra = self.extra_tokens()
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in extra if token != MASK])
        if MASK in extra:
            # Pipelines look for the mask in a text, to the left of which there may be a space.
            tokenizer.add_special_tokens({"mask_token": AddedToken(MASK, lstrip=True, normalized=False, special=True)})
        put_special_tokens(tokenizer, self.frame, self.objective.next_sentence)

    def sentences(self, source: Source, batch: Mapping[str, list[Any]]) -> list[str]:
        """Returns lines."""
        return batch["text"]

    def row_columns(self, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        """Returns the columns of the objective."""
        return self.objective.build(tokenizer).columns

    def encode_training(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], seed: int
    ) -> TrainingRows:
        """Encodes the training text, see [`TaskData.encode_training`]; its rows are made anew in each epoch."""
        objective = self.objective.build(tokenizer)
        texts = [self._encoded(source, "train", tokenizer, objective, i) for i, source in enumerate(sources)]
        lengths = np.concatenate([text.block_lengths() for text in texts])
        logger.info(f"{len(lengths):,} blocks of training text, {int(lengths.sum()):,} tokens")
        encoder, numbers = BlockEncoder(texts, objective, seed), np.arange(1, len(lengths) + 1)
        return TrainingRows(np.stack([lengths, lengths], axis=1), list(map(len, texts)), encoder, numbers)

    def window_encoder(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> TextWindowEncoder:
        """Returns the encoder of windows of a stream."""
        settings = self.objective
        return TextWindowEncoder(tokenizer, settings.build(tokenizer), settings.block_length, seed, self.by_line)

    def encode_set(
        self, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]
    ) -> EvaluationSet:
        """Encodes a set with noise that is always the same; `source` has its lines, and `target` is empty."""
        objective, lines = self.objective.build(tokenizer), list(source.splits[split]["text"])
        encoded = fixed_rows(self._encoded(source, split, tokenizer, objective), objective)
        return EvaluationSet(
            source.name, lines, [], source.tag, None, source.source_language, encoded, objective.columns
        )

    def _encoded(
        self, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, objective: Objective, number: int = 0
    ) -> EncodedText:
        tag = None
        if source.tag is not None:
            tag = tokenizer.convert_tokens_to_ids(LanguageTags(tokenizer).find(source.source_language))
        lines = encode_lines(source.splits[split], tokenizer, self.num_proc)
        return EncodedText(lines, objective, self.objective.block_length, tag, self.by_line, number)
