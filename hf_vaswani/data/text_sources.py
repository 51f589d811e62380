"""The running text of a recipe: reads and checks its sources, and makes vocabulary, blocks and updates of them."""

import logging
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from ..model.sentences_vaswani import LanguageTags
from ..recipe import Recipe, SourceRecipe
from .batching import PairCollator, TokenBudgetBatchSampler, Updates
from .blocks import BlockEncoder, EncodedText, TextWindowEncoder, encode_lines, fixed_rows
from .objectives import MASK, Objective, extra_tokens, objective_of
from .reading import load_texts
from .renewed_epochs import RenewedUpdates
from .sources import VOCABULARY_PAIRS, EvaluationSet, Source, TaskData, batch_order, stream_of
from .streaming import StreamUpdates
from .tables import named_errors
from .tokenizer import (
    add_language_tags,
    load_tokenizer,
    put_special_tokens,
    train_tokenizer,
)

with extra("train"):
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)


class TextSource(Source):
    """A source of running text: lines and documents of each split, and the language tag in front of its blocks."""

    @property
    def name(self) -> str:
        """Language, or the name in `validation_sets`."""
        return self.set_name or self.recipe.source_language


class RunningTextData(TaskData):
    """Running text in one language, of which objectives make what a model predicts."""

    source_class = TextSource

    def load(self, recipe: Recipe, part: SourceRecipe) -> dict[str, Dataset | IterableDataset]:
        """Reads the splits that a source names."""
        settings = text_settings(part) | {"document_column": part.document_column}
        return load_texts(**settings, streaming=recipe.data.streaming)

    def check_split(self, recipe: Recipe, source: Source, split: str) -> None:
        """Raises a `ValueError` if a text is a single document, but the objective needs several."""
        if not recipe.objective.next_sentence:
            return
        batches = named_errors(source.pairs[split].iter(1000), source.origin(split))
        names = islice(chain.from_iterable(batch["document"] for batch in batches), VOCABULARY_PAIRS)
        first = next(names, None)
        if all(name == first for name in names):
            raise ValueError(
                f"objective.next_sentence needs several documents, but the {split} text of {source.name} is one: "
                f"{' and '.join(source.origin(split))}. Put blank lines between documents, or set "
                "data.document_column."
            )

    def check(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        labels: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Checks that the vocabulary has the entries that the objective needs."""
        if tokenizer is not None:
            objective_of(recipe, tokenizer)

    def make_tokenizer(self, recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
        """
        Loads or trains the tokenizer, see [`TaskData.make_tokenizer`]. It has the entries that the task needs, and
        puts the special tokens around a text that the task has there.
        """
        languages = list(dict.fromkeys(source.recipe.source_language for source in sources if source.tag is not None))
        extra = extra_tokens(recipe)
        if recipe.tokenizer.path is not None:
            tokenizer = load_tokenizer(recipe.tokenizer.path)
            add_language_tags(tokenizer, languages)
        else:
            lines = (line for source in sources for line in _lines(source))
            size = max(1, recipe.tokenizer.vocab_size - len(extra))
            tokenizer = train_tokenizer(lines, size, recipe.tokenizer.kind, languages)
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in extra if token != MASK])
        if MASK in extra:
            # Pipelines look for the mask in a text, to the left of which there may be a space.
            tokenizer.add_special_tokens({"mask_token": AddedToken(MASK, lstrip=True, normalized=False, special=True)})
        put_special_tokens(tokenizer, recipe.task, recipe.objective.next_sentence)
        tokenizer.model_max_length = recipe.model.max_position_embeddings
        return tokenizer

    def build_updates(
        self,
        recipe: Recipe,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str] = (),
        num_processes: int = 1,
        process_index: int = 0,
    ) -> Updates:
        """Encodes and groups the training text, see [`TaskData.build_updates`]."""
        objective, training = objective_of(recipe, tokenizer), recipe.training
        collator = PairCollator(tokenizer.pad_token_id, objective.columns)
        order = batch_order(recipe, num_processes, process_index)
        if recipe.data.streaming:
            streams = [stream_of(source, ("text", "document")) for source in sources]
            by_line = recipe.objective.unit == "lines"
            encoder = TextWindowEncoder(tokenizer, objective, recipe.objective.block_length, recipe.seed, by_line)
            return StreamUpdates(streams, encoder, recipe.data.stream_window, order, collator, training.data_workers)
        texts = [
            _encoded_text(recipe, source, source.pairs["train"], tokenizer, objective, i)
            for i, source in enumerate(sources)
        ]
        lengths = np.concatenate([text.block_lengths() for text in texts])
        weights = [(len(text), source.recipe.weight) for text, source in zip(texts, sources, strict=True)]
        sampler = TokenBudgetBatchSampler(np.stack([lengths, lengths], axis=1), order, weights)
        logger.info(f"{len(lengths):,} blocks of training text, {int(lengths.sum()):,} tokens")
        return RenewedUpdates(
            BlockEncoder(texts, objective, recipe.seed),
            np.arange(1, len(lengths) + 1),
            sampler,
            recipe.data.stream_window,
            collator,
            training.data_workers,
        )

    def encode_set(
        self,
        recipe: Recipe,
        source: Source,
        split: str,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
    ) -> EvaluationSet:
        """Encodes a set with noise that is always the same; `source` has its lines, and `target` is empty."""
        objective, texts = objective_of(recipe, tokenizer), source.pairs[split]
        encoded = fixed_rows(_encoded_text(recipe, source, texts, tokenizer, objective), objective)
        language = source.recipe.source_language
        return EvaluationSet(name, list(texts["text"]), [], source.tag, None, language, encoded)


def text_settings(part: SourceRecipe) -> dict[str, Any]:
    """Returns the keys of a source that are arguments of both [`load_texts`] and [`load_labelled`]."""
    same = ["dataset", "dataset_config"]
    same += [f"{split}_{kind}" for split in ("train", "validation", "test") for kind in ("split", "files")]
    settings = {name: getattr(part, name) for name in same}
    return settings | {"language": part.source_language, "text_column": part.source_column}


def _lines(source: Source) -> Iterator[str]:
    texts = source.pairs["train"]
    batches = named_errors(texts.iter(1000), source.origin("train"))
    if isinstance(texts, IterableDataset):
        batches = islice(batches, VOCABULARY_PAIRS // 1000)
    for batch in batches:
        yield from batch["text"]


def _encoded_text(
    recipe: Recipe,
    source: Source,
    texts: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    number: int = 0,
) -> EncodedText:
    tag = None
    if source.tag is not None:
        tag = tokenizer.convert_tokens_to_ids(LanguageTags(tokenizer).find(source.recipe.source_language))
    return EncodedText(
        encode_lines(texts, tokenizer, recipe.data.num_proc),
        objective,
        recipe.objective.block_length,
        tag,
        recipe.objective.unit == "lines",
        number,
    )
