"""The text of a recipe: reads and checks its sources, and makes vocabulary, ids and updates of them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..corpus.duplicates import HeldOut
from ..extras import extra
from ..model.sentences_vaswani import LanguageTags
from ..recipe import PAIR_TASKS, Alteration, Recipe, SourceRecipe
from ..records import public
from .alterations import altered_set
from .batching import BatchOrder, EpochUpdates, PairCollator, TokenBudgetBatchSampler, Updates
from .encoding import EncodedRows, encode_pairs, pair_lengths
from .reading import load_pairs
from .remote import file_name
from .renewal import renewal_of
from .renewed_epochs import RenewedUpdates, RowEncoder
from .streaming import Stream, StreamUpdates
from .tables import named_errors, place_of
from .tokenizer import (
    add_language_tags,
    add_tags,
    has_tag,
    is_tag,
    language_tag,
    load_tokenizer,
    train_tokenizer,
)
from .windows import WindowEncoder

with extra("train"):
    from datasets import Dataset, IterableDataset, concatenate_datasets
    from datasets.fingerprint import Hasher

logger = logging.getLogger(__name__)

# Pairs of each stream that the vocabulary is trained on.
VOCABULARY_PAIRS = 1_000_000
# Keys of a source that name its text.
NO_TRAINING_TEXT: dict[str, Any] = {"train_files": None, "train_split": None}
NO_EVALUATION_TEXT: dict[str, Any] = {
    f"{split}_{kind}": None for split in ("validation", "test") for kind in ("files", "split")
}


@dataclass
class Source:
    """A source of text: the pairs of each split, and the language tag of its source sentences."""

    recipe: SourceRecipe
    pairs: dict[str, Dataset | IterableDataset]
    tag: str | None
    set_name: str | None = None

    @property
    def name(self) -> str:
        """Direction, as in en-de, or the name in `validation_sets`."""
        return self.set_name or f"{self.recipe.source_language}-{self.recipe.target_language}"

    @property
    def front(self) -> str | None:
        """Text in front of each source sentence: the language tag, then the prefix."""
        return " ".join(text for text in (self.tag, self.recipe.prefix) if text is not None) or None

    def files(self, split: str) -> list[str]:
        """Returns the files of a split, if it has some."""
        files = getattr(self.recipe, f"{split}_files")
        return [] if files is None else [files] if isinstance(files, str) else list(files.values())

    def origin(self, split: str) -> list[str]:
        """Returns the files of a split, or the dataset, for error messages, without the secrets of URLs."""
        return public(self.files(split) or [str(self.recipe.dataset)])


@dataclass
class EvaluationText:
    """A validation or test set: its name, as in en-de, its text with language tag and prefix in front, both of them
    together (`front`), the prefix alone, and the target language."""

    name: str
    source: list[str]
    target: list[str]
    front: str | None
    prefix: str | None
    target_language: str

    @property
    def plain(self) -> list[str]:
        """Source sentences without tag and prefix."""
        return self.source if self.front is None else [text.removeprefix(f"{self.front} ") for text in self.source]

    def with_front(self, sentences: Sequence[str]) -> list[str]:
        """Puts tag and prefix in front of the sentences that are not blank."""
        return _with_front(sentences, self.front)


@dataclass
class EvaluationSet(EvaluationText):
    """A validation or test set with the ids of both sides."""

    encoded: Dataset


class TaskData(ABC):
    """
    The text of a recipe for one family of tasks: read, encoded, and grouped into updates.

    A family is a subclass, and an entry of `TASK_DATA` in `training.preparation`.
    """

    source_class: type[Source] = Source
    contents = "text"

    def read(self, recipe: Recipe) -> list[Source]:
        """
        Reads the text of a recipe.

        Args:
            recipe ([`Recipe`]): its sections `data` and `more_data`.

        Returns:
            `list[Source]`: in the order of the recipe; every split has text.

        Raises:
            ValueError: a split is empty or cannot be read; the message has file and line.
            FileNotFoundError: a file or dataset does not exist.
        """
        sources: list[Source] = []
        for part in (recipe.data, *recipe.more_data):
            source = self.read_source(recipe, part)
            if "train" not in source.pairs:
                section = "more_data" if sources else "data"
                of = f" for {source.name}" if recipe.more_data else ""
                raise ValueError(f"There is no training text{of}: set {section}.train_files or {section}.dataset.")
            self._check_splits(recipe, source)
            sources.append(source)
        return sources

    def read_sets(self, recipe: Recipe) -> list[Source]:
        """
        Reads the validation and test sets that a recipe names.

        Args:
            recipe ([`Recipe`]): its section `validation_sets`.

        Returns:
            `list[Source]`: in the order of the recipe, without training text.

        Raises:
            ValueError: a set has no text, cannot be read, or does not fit the training text.
            FileNotFoundError: a file or dataset does not exist.
        """
        sources = []
        for name, part in recipe.named_sets.items():
            source = self.read_source(recipe, replace(part, **NO_TRAINING_TEXT), name)
            if not source.pairs:
                raise ValueError(
                    f"validation_sets.{name} has no text: set its validation_files, its test_files or its dataset."
                )
            self._check_splits(recipe, source)
            sources.append(source)
        return sources

    def read_source(self, recipe: Recipe, part: SourceRecipe, set_name: str | None = None) -> Source:
        """Reads one source, which may lack splits or have empty ones."""
        tag = language_tag(self.tagged_language(part)) if recipe.data.target_tag else None
        return self.source_class(part, self.load(recipe, part), tag, set_name)

    def _check_splits(self, recipe: Recipe, source: Source) -> None:
        for split in source.pairs:
            if not self.has_text(source, split):
                origin = " and ".join(source.origin(split))
                raise ValueError(
                    f"The {split} set of {source.name} is empty: there is no {self.contents} in {origin}."
                )
            self.check_split(recipe, source, split)

    @abstractmethod
    def load(self, recipe: Recipe, part: SourceRecipe) -> dict[str, Dataset | IterableDataset]:
        """Reads the splits that a source names."""

    def tagged_language(self, part: SourceRecipe) -> str:
        """Returns the language that a language tag in front of the text names."""
        return part.source_language

    def has_text(self, source: Source, split: str) -> bool:
        """Returns whether a split has any text."""
        return next(named_errors(source.pairs[split].iter(1), source.origin(split)), None) is not None

    def check_split(self, recipe: Recipe, source: Source, split: str) -> None:
        """Raises a `ValueError` if the text of a split cannot be used for the task."""
        return

    def label_names(self, sources: Sequence[Source]) -> list[str]:
        """Returns the labels of the training text, each once; tasks without labels have none."""
        return []

    def check(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        labels: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Raises a `ValueError` if the text does not fit the labels of the model, or the task its vocabulary."""
        return

    def count_held_out(self, sources: list[Source], num_proc: int | None = None) -> list[dict[str, int] | None]:
        """Counts test and validation pairs that also occur in the training text; `None` for tasks without pairs."""
        return [None] * len(sources)

    @abstractmethod
    def make_tokenizer(self, recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
        """
        Loads the tokenizer that a recipe names, or trains one on the training text of all sources.

        Args:
            recipe ([`Recipe`]): its tokenizer section and task.
            sources (`list[Source]`): result of [`TaskData.read`]. Only the first million rows of a stream are used.

        Returns:
            [`PreTrainedTokenizerBase`], whose `model_max_length` is `max_position_embeddings` of the model.

        Raises:
            ValueError: the vocabulary is too small, or the tokenizer cannot be used.
        """

    @abstractmethod
    def build_updates(
        self,
        recipe: Recipe,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str] = (),
        num_processes: int = 1,
        process_index: int = 0,
    ) -> Updates:
        """
        Encodes the training text and groups it into updates.

        Args:
            recipe ([`Recipe`]): token budget, accumulation, seed, workers.
            sources (`list[Source]`): result of [`TaskData.read`].
            tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
            labels (`Sequence[str]`): names of the labels, by id.
            num_processes (`int`): number of processes that share the updates.
            process_index (`int`): index of this process.

        Returns:
            [`Updates`].

        Raises:
            ValueError: nothing fits the token budget, a label is unknown, or the vocabulary lacks what the recipe
                needs.
        """

    def encode_sets(
        self,
        recipe: Recipe,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str] = (),
    ) -> dict[str, list[EvaluationSet]]:
        """
        Encodes the validation and test sets.

        Args:
            recipe ([`Recipe`]): the experiment.
            sources (`list[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].
            tokenizer ([`PreTrainedTokenizerBase`]), labels (`Sequence[str]`): as in [`TaskData.build_updates`].

        Returns:
            `dict[str, list[EvaluationSet]]`: the sets of all sources, by split ("validation" or "test").

        Raises:
            ValueError: the model accepts no text as long as this, or lacks a label or an entry of the vocabulary.
        """
        sets: dict[str, list[EvaluationSet]] = {}
        for split in ("validation", "test"):
            with_text = [source for source in sources if split in source.pairs]
            for source, name in zip(with_text, set_names(sources, split), strict=True):
                encoded = self.encode_set(recipe, source, split, name, tokenizer, labels)
                sets.setdefault(split, []).append(encoded)
        return sets

    @abstractmethod
    def encode_set(
        self,
        recipe: Recipe,
        source: Source,
        split: str,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
    ) -> EvaluationSet:
        """Encodes one split of a source as the set of this name."""


class PairData(TaskData):
    """Sentence pairs."""

    contents = "pair with text on both sides"

    def read(self, recipe: Recipe) -> list[Source]:
        """Reads the text, see [`TaskData.read`], and warns if nothing tells two target languages apart."""
        sources = super().read(recipe)
        targets = dict.fromkeys(source.recipe.target_language for source in sources)
        is_told = recipe.data.target_tag or all(source.recipe.prefix is not None for source in sources)
        if len(targets) > 1 and not is_told:
            logger.warning(
                f"The target languages are {', '.join(targets)}, but the source sentences have no tag for them: set "
                "data.target_tag, unless the text itself names the target language"
            )
        return sources

    def read_sets(self, recipe: Recipe) -> list[Source]:
        """Reads the named sets, see [`TaskData.read_sets`]; the model must have their language tags and prefixes."""
        sources = super().read_sets(recipe)
        # The vocabulary of another model may have more tags than the recipe has languages.
        if recipe.tokenizer.path is not None or recipe.initialize.from_ is not None:
            return sources
        trained = {target for _, target in recipe.language_pairs}
        prefixes = {part.prefix for part in (recipe.data, *recipe.more_data)}
        for source in sources:
            part = source.recipe
            if source.tag is not None and part.target_language not in trained:
                raise ValueError(
                    f"validation_sets.{source.name} has the target language {part.target_language!r}, for which the "
                    f"model has no tag (data.target_tag): its training text has {', '.join(sorted(trained))}."
                )
            if part.prefix is not None and is_tag(part.prefix) and part.prefix not in prefixes:
                raise ValueError(
                    f"validation_sets.{source.name}.prefix is {part.prefix!r}, for which the model has no entry: no "
                    "training text has this prefix."
                )
        return sources

    def read_training(self, recipe: Recipe, part: SourceRecipe) -> Source:
        """
        Reads the training text of one source of a recipe alone.

        Args:
            recipe ([`Recipe`]): the experiment.
            part ([`SourceRecipe`]): the source.

        Returns:
            [`Source`]: with the split "train".

        Raises:
            ValueError: there is no training text, or it cannot be read.
            FileNotFoundError: a file or dataset does not exist.
        """
        source = self.read_source(recipe, replace(part, **NO_EVALUATION_TEXT))
        if "train" not in source.pairs:
            raise ValueError("There is no training text: set data.train_files or data.dataset.")
        return source

    def read_evaluation(self, recipe: Recipe) -> list[Source]:
        """
        Reads the validation and test sets of a recipe without its training text.

        Args:
            recipe ([`Recipe`]): its sections `data`, `more_data` and `validation_sets`.

        Returns:
            `list[Source]`: in the order of the recipe, those of `validation_sets` last.

        Raises:
            ValueError: a set of `validation_sets` is empty, or a set cannot be read.
            FileNotFoundError: a file or dataset does not exist.
        """
        parts = (recipe.data, *recipe.more_data)
        sources = [self.read_source(recipe, replace(part, **NO_TRAINING_TEXT)) for part in parts]
        return [*sources, *self.read_sets(recipe)]

    def load(self, recipe: Recipe, part: SourceRecipe) -> dict[str, Dataset | IterableDataset]:
        """Reads the splits that a source names."""
        no_text = ("prefix", "document_column", "pair_column", "label_column", "weight", "license")
        names = [name for name in SourceRecipe.__dataclass_fields__ if name not in no_text]
        return load_pairs(**{name: getattr(part, name) for name in names}, streaming=recipe.data.streaming)

    def tagged_language(self, part: SourceRecipe) -> str:
        """Returns the target language."""
        return part.target_language

    def has_text(self, source: Source, split: str) -> bool:
        """Returns whether a split has a pair with text on both sides."""
        batches = named_errors(source.pairs[split].iter(1000), source.origin(split))
        rows = (row for batch in batches for row in zip(batch["source"], batch["target"], strict=True))
        return any(source.strip() and target.strip() for source, target in rows)

    def count_held_out(self, sources: list[Source], num_proc: int | None = None) -> list[dict[str, int] | None]:
        """
        Counts the validation and test pairs that have their source or their target in the training text, too.

        Args:
            sources (`list[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].
            num_proc (`int`, *optional*): processes that share the work, whose result is cached on disk.

        Returns:
            `list[dict[str, int] | None]`: for each source, the number by split; `None` for all if a training text is
            streamed, because it would have to be read once more.
        """
        training = [source.pairs["train"] for source in sources if "train" in source.pairs]
        if any(isinstance(pairs, IterableDataset) for pairs in training):
            return [None] * len(sources)
        held_out = held_out_text(sources)
        for pairs in training:
            found_in = pairs.filter(
                held_out.find,
                input_columns=["source", "target"],
                batched=True,
                num_proc=num_proc,
                new_fingerprint=Hasher.hash([pairs._fingerprint, [sorted(side) for side in held_out.sides]]),
                desc="Looking for held-out text",
            )
            # Other processes have noted what they found in copies of their own.
            for batch in found_in.iter(1000):
                held_out.find(batch["source"], batch["target"])
        found: list[dict[str, int] | None] = [{} for _ in sources]
        for (i, split), (_, count) in held_out.counts().items():
            found[i] = (found[i] or {}) | {split: count}
        return found

    def make_tokenizer(self, recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
        """
        Loads or trains the tokenizer, see [`TaskData.make_tokenizer`]. It has a tag for each target language if
        `data.target_tag` is set, and an entry for each prefix of the form `<bt>`.
        """
        # Each once, in the order of the sources.
        languages = list(dict.fromkeys(source.recipe.target_language for source in sources if source.tag is not None))
        prefixes = prefix_tags(sources)
        if recipe.tokenizer.path is not None:
            tokenizer = load_tokenizer(recipe.tokenizer.path)
            if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
                raise ValueError(
                    f"The tokenizer {recipe.tokenizer.path} (tokenizer.path) does not put {tokenizer.eos_token} after "
                    "a sentence, so a model would never learn where to end: give it a post-processor that does."
                )
            if special := [prefix for prefix in prefixes if prefix in tokenizer.all_special_tokens]:
                raise ValueError(
                    f"The prefix {special[0]!r} is a special token of the tokenizer {recipe.tokenizer.path} "
                    "(tokenizer.path): choose another word."
                )
            add_language_tags(tokenizer, languages)
            add_tags(tokenizer, prefixes)
        else:
            sentences = (sentence for source in sources for sentence in _sentences(source))
            settings = recipe.tokenizer
            tokenizer = train_tokenizer(sentences, settings.vocab_size, settings.kind, languages, prefixes)
        # The limit at which `translate` splits a line and `truncation=True` truncates. Training has limits of its own.
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
        updates = _updates(recipe, sources, tokenizer, num_processes, process_index)
        prefixes = [source.recipe.prefix for source in sources]
        # Text without prefixes has the fingerprint that earlier versions gave it.
        if any(prefix is not None for prefix in prefixes):
            updates.fingerprint = updates.fingerprint | {"prefixes": prefixes}
        return updates

    def encode_sets(
        self,
        recipe: Recipe,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str] = (),
    ) -> dict[str, list[EvaluationSet]]:
        """Encodes the sets, see [`TaskData.encode_sets`]; tags and prefixes are in front of their source sentences."""
        for source in sources:
            if source.tag is not None:
                LanguageTags(tokenizer).find(source.recipe.target_language)
        for prefix in prefix_tags(sources):
            if not has_tag(tokenizer, prefix):
                raise ValueError(
                    f"The vocabulary has no entry for the prefix {prefix!r}: give it to a source of training text, or "
                    "set initialize.add_tokens."
                )
        return super().encode_sets(recipe, sources, tokenizer, labels)

    def encode_set(
        self,
        recipe: Recipe,
        source: Source,
        split: str,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
    ) -> EvaluationSet:
        """Encodes a set, and checks that the model can read it, altered too if the recipe asks for it."""
        pairs, limit = source.pairs[split], longest_input(recipe)
        encoded = encode_pairs(pairs, tokenizer, source.front)
        altered = recipe.evaluation.altered if limit is not None and split == "test" else []
        parts = {split: encoded} | {
            f"altered {split} ({kind})": encode_pairs(_altered(pairs, kind), tokenizer, source.front)
            for kind in altered
        }
        for kind, part in parts.items():
            if limit is not None and len(part) and (longest := int(pair_lengths(part).max())) > limit:
                raise ValueError(
                    f"The {kind} set has a side of {longest} tokens, but model.max_position_embeddings is {limit}."
                )
        if empty := len(pairs) - len(encoded):
            logger.warning(f"The {split} set has {empty} pairs with an empty side, which count in its BLEU")
        return EvaluationSet(**vars(_evaluation_text(source, split, name)), encoded=encoded)


def _with_front(sentences: Sequence[str], front: str | None) -> list[str]:
    before = "" if front is None else f"{front} "
    return [before + sentence if sentence.strip() else "" for sentence in sentences]


def held_out_text(sources: list[Source]) -> HeldOut[tuple[int, str]]:
    """Returns the validation and test text of each source, named by its place among the sources and the split."""
    return HeldOut(
        {
            (i, split): ((row["source"], row["target"]) for row in source.pairs[split])
            for i, source in enumerate(sources)
            for split in source.pairs
            if split != "train"
        }
    )


def prefix_tags(sources: Sequence[Source]) -> list[str]:
    """Returns the prefixes of sources that are one entry of the vocabulary, such as `"<bt>"`, each once."""
    prefixes = dict.fromkeys(source.recipe.prefix for source in sources)
    return [prefix for prefix in prefixes if prefix is not None and is_tag(prefix)]


def _sentences(source: Source) -> Iterator[str]:
    prefix = source.recipe.prefix
    pairs = source.pairs["train"]
    batches = named_errors(pairs.iter(1000), source.origin("train"))
    if isinstance(pairs, IterableDataset):
        batches = islice(batches, VOCABULARY_PAIRS // 1000)
    for batch in batches:
        # A prefix of plain text is part of the text, as it is encoded; a tag has an entry without being learned.
        yield from batch["source"] if prefix is None or is_tag(prefix) else _with_front(batch["source"], prefix)
        yield from batch["target"]


def evaluation_texts(sources: list[Source], split: str) -> list[EvaluationText]:
    """
    Names the sets of a split, and puts language tags and prefixes in front of their source sentences.

    Args:
        sources (`list[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].
        split (`str`): "validation" or "test".

    Returns:
        `list[EvaluationText]`: the sets of the sources that have this split, in their order. A further set of the
        direction en-de is called en-de.2.
    """
    with_text = [source for source in sources if split in source.pairs]
    names = set_names(sources, split)
    return [_evaluation_text(source, split, name) for source, name in zip(with_text, names, strict=True)]


def _evaluation_text(source: Source, split: str, name: str) -> EvaluationText:
    pairs, part = source.pairs[split], source.recipe
    sentences = _with_front(pairs["source"], source.front)
    return EvaluationText(name, sentences, list(pairs["target"]), source.front, part.prefix, part.target_language)


def set_names(sources: list[Source], split: str) -> list[str]:
    """Returns the names of the sets of a split, in the order of the sources that have it: en-de, en-de.2, ..."""
    names: list[str] = []
    for source in sources:
        if split in source.pairs:
            same = sum(name.split(".")[0] == source.name for name in names)
            names.append(f"{source.name}.{same + 1}" if same else source.name)
    return names


def _altered(pairs: Dataset, alteration: Alteration) -> Dataset:
    sources, references = altered_set(pairs["source"], [[target] for target in pairs["target"]], alteration)
    return Dataset.from_dict({"source": sources, "target": [target for (target,) in references]})


def _updates(
    recipe: Recipe,
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    num_processes: int,
    process_index: int,
) -> Updates:
    renewal = renewal_of(recipe, tokenizer)
    training, collator = recipe.training, PairCollator(tokenizer.pad_token_id)
    order = batch_order(recipe, num_processes, process_index)
    if recipe.data.streaming:
        streams = [stream_of(source) for source in sources]
        encoder = WindowEncoder(tokenizer, renewal)
        return StreamUpdates(streams, encoder, recipe.data.stream_window, order, collator, training.data_workers)
    parts, first = [], 1
    for source in sources:
        pairs = source.pairs["train"]
        parts.append(encode_pairs(pairs, tokenizer, source.front, first, recipe.data.num_proc))
        first += len(pairs)
    encoded = concatenate_datasets(parts)
    weights = [(len(part), source.recipe.weight) for part, source in zip(parts, sources, strict=True)]
    sampler = TokenBudgetBatchSampler(pair_lengths(encoded), order, weights)
    _report(sampler, first - 1 - len(encoded))
    if renewal is None:
        return EpochUpdates(EncodedRows(encoded), sampler, collator, training.data_workers)
    texts = [(source.pairs["train"], source.front) for source in sources]
    return RenewedUpdates(
        RowEncoder(tokenizer, renewal, texts),
        encoded.with_format("numpy")["number"][:],
        sampler,
        recipe.data.stream_window,
        collator,
        training.data_workers,
    )


def batch_order(recipe: Recipe, num_processes: int, process_index: int) -> BatchOrder:
    """
    Returns the settings of a recipe that make batches, for one of several processes.

    Raises:
        ValueError: the share of a process in `training.tokens_per_update` does not hold a block.
    """
    tokens, count = recipe.training.batches(num_processes)
    if recipe.task not in PAIR_TASKS and recipe.objective.block_length > tokens:
        raise ValueError(
            f"training.tokens_per_update ({recipe.training.tokens_per_update}) leaves batches of {tokens} tokens to "
            f"{num_processes} processes, fewer than objective.block_length ({recipe.objective.block_length}): raise "
            "it, or start fewer processes."
        )
    return BatchOrder(
        tokens,
        recipe.seed,
        count,
        num_processes,
        process_index,
        max_length=longest_input(recipe),
    )


def stream_of(source: Source, columns: tuple[str, str] = ("source", "target")) -> Stream:
    """Returns the training text of a source, with these columns, as a stream."""
    return Stream(
        source.pairs["train"],
        source.name,
        source.recipe.weight,
        source.front,
        _description(source),
        source.origin("train"),
        columns,
    )


def _report(sampler: TokenBudgetBatchSampler, empty: int) -> None:
    source_tokens, target_tokens = sampler.lengths.sum(axis=0)
    count = len(sampler.lengths)
    logger.info(f"{count:,} training pairs, {source_tokens:,} source and {target_tokens:,} target tokens")
    if empty or sampler.skipped:
        logger.warning(f"Skipped: {sampler.order.describe_skipped(empty, sampler.skipped)}")


def _description(source: Source) -> dict[str, Any]:
    """Describes a stream without reading it: names, and the sizes of files."""
    recipe = source.recipe
    if recipe.train_files is not None:
        return {"files": [[file_name(file), place_of(file)[1][0]] for file in source.files("train")]}
    return {"dataset": recipe.dataset, "config": recipe.dataset_config, "split": recipe.train_split}


def longest_input(recipe: Recipe) -> int | None:
    """Returns the most tokens that the model accepts, which only learned positions limit."""
    return recipe.model.max_position_embeddings if recipe.model.position_encoding == "learned" else None
