"""The running text of a recipe: reads and checks its sources, and makes vocabulary, blocks and updates of them."""

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ..model.sentences_vaswani import LanguageTags
from ..recipe import Recipe, SourceRecipe
from .batching import PairCollator, TokenBudgetBatchSampler, Updates
from .blocks import BlockEncoder, EncodedText, TextWindowEncoder, fixed_rows
from .objectives import MASK, Objective, extra_tokens, objective_of
from .reading import load_texts
from .renewed_epochs import RenewedUpdates
from .sources import VOCABULARY_PAIRS, EvaluationSet, Source, batch_order, set_names, stream_of
from .streaming import StreamUpdates
from .tables import named_errors
from .texts import encode_lines
from .tokenizer import (
    add_language_tags,
    language_tag,
    load_tokenizer,
    put_special_tokens,
    train_tokenizer,
)

try:
    from datasets import Dataset, IterableDataset
except ImportError as error:
    raise ImportError(f"Reading training text needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

NO_TRAINING_TEXT = {"train_files": None, "train_split": None}


class TextSource(Source):
    """A source of running text: lines and documents of each split, and the language tag in front of its blocks."""

    @property
    def name(self) -> str:
        """Language, or the name in `validation_sets`."""
        return self.set_name or self.recipe.source_language


def read_texts(recipe: Recipe) -> list[Source]:
    """
    Reads the running text of a recipe.

    Args:
        recipe ([`Recipe`]): its sections `data` and `more_data`.

    Returns:
        `list[Source]`: in the order of the recipe; every split has a line of text.

    Raises:
        ValueError: a split is empty or cannot be read.
        FileNotFoundError: a file or dataset does not exist.
    """
    sources: list[Source] = []
    for part in (recipe.data, *recipe.more_data):
        texts = load_texts(**_settings(part), streaming=recipe.data.streaming)
        source = TextSource(part, texts, _tag(recipe, part))
        if "train" not in source.pairs:
            raise ValueError("There is no training text: set data.train_files or data.dataset.")
        sources.append(source)
    return _with_documents(recipe, _checked(sources))


def _with_documents(recipe: Recipe, sources: list[Source]) -> list[Source]:
    """Raises a `ValueError` if a text is a single document, and its segments are to be told from those of others."""
    for source in sources if recipe.objective.next_sentence else []:
        for split, texts in source.pairs.items():
            batches = named_errors(texts.iter(1000), source.origin(split))
            names = islice(chain.from_iterable(batch["document"] for batch in batches), VOCABULARY_PAIRS)
            first = next(names, None)
            if all(name == first for name in names):
                raise ValueError(
                    f"objective.next_sentence needs several documents, but the {split} text of {source.name} is one: "
                    f"{' and '.join(source.origin(split))}. Put blank lines between documents, or set "
                    "data.document_column."
                )
    return sources


def read_text_sets(recipe: Recipe) -> list[Source]:
    """Reads the text of `validation_sets`, as [`read_texts`] does that of the sources."""
    sources: list[Source] = []
    for name, part in recipe.named_sets.items():
        texts = load_texts(**_settings(part) | NO_TRAINING_TEXT)
        sources.append(TextSource(part, texts, _tag(recipe, part), name))
        if not texts:
            raise ValueError(
                f"validation_sets.{name} has no text: set its validation_files, its test_files or its dataset."
            )
    return _with_documents(recipe, _checked(sources))


def _checked(sources: list[Source]) -> list[Source]:
    """Raises a `ValueError` if a split has no text."""
    for source in sources:
        for split, texts in source.pairs.items():
            if next(named_errors(texts.iter(1), source.origin(split)), None) is None:
                raise ValueError(f"The {split} text of {source.name} is empty: {' and '.join(source.origin(split))}.")
    return sources


def _settings(part: SourceRecipe) -> dict[str, Any]:
    """Returns the keys of a source that are arguments of [`load_texts`]."""
    same = ["dataset", "dataset_config", "document_column"]
    same += [f"{split}_{kind}" for split in ("train", "validation", "test") for kind in ("split", "files")]
    settings = {name: getattr(part, name) for name in same}
    return settings | {"language": part.source_language, "text_column": part.source_column}


def _tag(recipe: Recipe, part: SourceRecipe) -> str | None:
    return language_tag(part.source_language) if recipe.data.target_tag else None


def make_text_tokenizer(recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer that a recipe names, or trains one on the training text of all sources. It gets the entries
    that the task needs, and puts the special tokens around a text that the task has there.

    Args:
        recipe ([`Recipe`]): its tokenizer section, task and objective.
        sources (`list[Source]`): result of [`read_texts`]. Only the first million lines of a stream are used.

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the vocabulary is too small, or the tokenizer cannot be used.
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


def _lines(source: Source) -> Iterator[str]:
    texts = source.pairs["train"]
    batches = named_errors(texts.iter(1000), source.origin("train"))
    if isinstance(texts, IterableDataset):
        batches = islice(batches, VOCABULARY_PAIRS // 1000)
    for batch in batches:
        yield from batch["text"]


def build_text_updates(
    recipe: Recipe,
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    num_processes: int = 1,
    process_index: int = 0,
) -> Updates:
    """
    Encodes the training text, cuts it into blocks, and groups these into updates.

    Args:
        recipe ([`Recipe`]): task, objective, token budget, accumulation, seed, workers.
        sources (`list[Source]`): result of [`read_texts`].
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        num_processes (`int`), process_index (`int`): number of processes that share the updates, and this one's index.

    Returns:
        [`Updates`].

    Raises:
        ValueError: the vocabulary lacks an entry that the task needs.
    """
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


def encode_text_sets(
    recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[EvaluationSet]]:
    """
    Encodes the validation and test text, with noise that is always the same.

    Args:
        recipe ([`Recipe`]), sources (`list[Source]`), tokenizer ([`PreTrainedTokenizerBase`]): as in
            [`build_text_updates`].

    Returns:
        `dict[str, list[EvaluationSet]]`: the sets of all sources, by split ("validation" or "test"). Their `source`
        has the lines, and their `target` is empty.
    """
    sets: dict[str, list[EvaluationSet]] = {}
    objective = objective_of(recipe, tokenizer)
    for split in ("validation", "test"):
        with_text = [source for source in sources if split in source.pairs]
        for source, name in zip(with_text, set_names(sources, split), strict=True):
            texts = source.pairs[split]
            encoded = fixed_rows(_encoded_text(recipe, source, texts, tokenizer, objective), objective)
            language = source.recipe.source_language
            sets.setdefault(split, []).append(
                EvaluationSet(name, list(texts["text"]), [], source.tag, None, language, encoded)
            )
    return sets
