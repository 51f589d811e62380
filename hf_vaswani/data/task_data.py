"""The text of a run, for any family of tasks: read, encoded, and grouped into updates."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .batching import BatchOrder, EpochUpdates, PairCollator, TokenBudgetBatchSampler, Updates
from .reading import Source, load_splits
from .tokenizer import add_tags, is_tag, load_tokenizer, train_tokenizer
from .windows import Exchange, RenewedUpdates, StreamUpdates

with extra("train"):
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

# Rows of each stream that the vocabulary is trained on.
VOCABULARY_ROWS = 1_000_000


@dataclass(frozen=True)
class VocabularySettings:
    """
    The vocabulary of a run.

    Attributes:
        kind (`str`), size (`int`): kind and maximum number of the entries, see [`train_tokenizer`].
        split_digits (`bool`): whether each digit is an entry of its own.
        path (`str`, *optional*): folder or Hub id of a tokenizer to use instead of training one.
        max_length (`int`): the limit at which `translate` splits a line and `truncation=True` truncates; training has
            limits of its own.
    """

    kind: Any = "bpe"
    size: int = 37_000
    split_digits: bool = False
    path: str | None = None
    max_length: int = 1024


@dataclass
class EvaluationText:
    """
    A validation or test set.

    Attributes:
        name (`str`): name of the set, as in en-de.
        source (`list[str]`), target (`list[str]`): its text, with language tag and prefix in front of the source.
        source_prefix (`str`, *optional*): language tag and prefix together.
        prefix (`str`, *optional*): the prefix alone.
        target_language (`str`): language of the target sentences.
    """

    name: str
    source: list[str]
    target: list[str]
    source_prefix: str | None
    prefix: str | None
    target_language: str

    @property
    def plain(self) -> list[str]:
        """Source sentences without tag and prefix."""
        before = self.source_prefix
        return self.source if before is None else [text.removeprefix(f"{before} ") for text in self.source]

    def with_prefix(self, sentences: Sequence[str]) -> list[str]:
        """Puts tag and prefix in front of the sentences that are not blank."""
        return with_prefix(sentences, self.source_prefix)


@dataclass
class EvaluationSet(EvaluationText):
    """A validation or test set with the ids of both sides, and its other `columns` for [`PairCollator`]."""

    encoded: Dataset
    columns: Sequence[str] = ()


@dataclass
class TrainingRows:
    """
    The encoded training text.

    Attributes:
        lengths (`np.ndarray` of shape `(rows, 2)`): source and target tokens of each row.
        counts (`list[int]`): rows of each source.
        rows (`torch.utils.data.Dataset`): the rows; or, with `numbers`, who makes those of a window.
        numbers (`np.ndarray` of shape `(rows,)`, *optional*): number of each row in the text, if rows are made anew in
            each epoch.
        empty (`int`): rows that were skipped because a side is empty.
        fingerprint (`dict[str, Any]`): more that must not change when a run is resumed; JSON-serializable.
    """

    lengths: np.ndarray
    counts: list[int]
    rows: torch.utils.data.Dataset[Any]
    numbers: np.ndarray | None = None
    empty: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskData(ABC):
    """
    The text of a run for one family of tasks, which is a subclass.

    Attributes:
        sources (`Sequence[Source]`): sources of the training text and its evaluation sets, not read yet.
        sets (`Sequence[Source]`): more evaluation sets, which have names.
        vocabulary ([`VocabularySettings`]): the vocabulary.
        streaming (`bool`): whether to read the training text on demand, without a cache.
        stream_window (`int`): rows that are encoded and shuffled together where text is not encoded once for all.
        num_proc (`int`, *optional*): processes that encode the training text and look for held-out text in it.
        data_workers (`int`, *optional*): processes that prepare batches; by default, those that the device needs.
        max_length (`int`, *optional*): most tokens that the model accepts, which only learned positions limit.
    """

    sources: Sequence[Source]
    sets: Sequence[Source] = ()
    vocabulary: VocabularySettings = VocabularySettings()
    streaming: bool = False
    stream_window: int = 100_000
    num_proc: int | None = None
    data_workers: int | None = None
    max_length: int | None = None

    contents = "text"
    stream_columns = ("source", "target")

    @property
    def longest_row(self) -> int | None:
        """Most tokens of the rows into which a text is cut; `None` if it is not cut."""
        return None

    # ---- Reading -------------------------------------------------------------------------------------------------

    def read(self) -> list[Source]:
        """
        Reads all sources.

        Returns:
            `list[Source]`: in their order; every split has text.

        Raises:
            ValueError: a split is empty or cannot be read; the message has file and line.
            FileNotFoundError: a file or dataset does not exist.
        """
        return [self._checked(self._with_training_text(number)) for number in range(len(self.sources))]

    def read_sets(self) -> list[Source]:
        """
        Reads the validation and test sets that have names.

        Returns:
            `list[Source]`: in their order, without training text.

        Raises:
            ValueError: a set has no text, cannot be read, or does not fit the training text.
            FileNotFoundError: a file or dataset does not exist.
        """
        sets = [self._loaded(source.only("validation", "test")) for source in self.sets]
        for source in sets:
            if not source.splits:
                raise ValueError(
                    f"validation_sets.{source.name} has no text: set its validation_files, its test_files or its "
                    "dataset."
                )
            self._checked(source)
        return sets

    def read_training(self, number: int) -> Source:
        """Reads the training text of one source alone; raises the errors of [`TaskData.read`]."""
        return self._with_training_text(number, "train")

    def read_evaluation(self) -> list[Source]:
        """
        Reads the validation and test sets without the training text.

        Returns:
            `list[Source]`: in the order of the sources, the sets that have names last.

        Raises:
            ValueError: a set that has a name is empty, or a set cannot be read.
            FileNotFoundError: a file or dataset does not exist.
        """
        return [*(self._loaded(source.only("validation", "test")) for source in self.sources), *self.read_sets()]

    def _loaded(self, source: Source) -> Source:
        return replace(source, splits=load_splits(source, self.streaming))

    def _with_training_text(self, number: int, *only: str) -> Source:
        source = self.sources[number]
        source = self._loaded(source.only(*only) if only else source)
        if "train" not in source.splits:
            section = "more_data" if number else "data"
            of = f" for {source.name}" if len(self.sources) > 1 else ""
            raise ValueError(f"There is no training text{of}: set {section}.train_files or {section}.dataset.")
        return source

    def _checked(self, source: Source) -> Source:
        for split in source.splits:
            if not self.has_text(source, split):
                origin = " and ".join(source.origin(split))
                raise ValueError(
                    f"The {split} set of {source.name} is empty: there is no {self.contents} in {origin}."
                )
            self.check_split(source, split)
        return source

    def has_text(self, source: Source, split: str) -> bool:
        """Returns whether a split has any text."""
        return next(source.batches(split), None) is not None

    def check_split(self, source: Source, split: str) -> None:
        """Raises a `ValueError` if the text of a split cannot be used for the task."""
        return

    def label_names(self, sources: Sequence[Source]) -> list[str]:
        """Returns the labels of the training text, each once; tasks without labels have none."""
        return []

    def check(
        self, sources: Sequence[Source], labels: Sequence[str], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Raises a `ValueError` if the text does not fit the labels of the model, or the task its vocabulary."""
        return

    def count_held_out(self, sources: Sequence[Source]) -> list[dict[str, int] | None]:
        """Counts test and validation pairs that also occur in the training text; `None` for tasks without pairs."""
        return [None] * len(sources)

    # ---- The vocabulary ------------------------------------------------------------------------------------------

    def make_tokenizer(self, sources: Sequence[Source]) -> PreTrainedTokenizerBase:
        """
        Loads the tokenizer that is named, or trains one on the training text of all sources. It has the language tags
        of the sources, and an entry for each prefix of the form `<bt>`.

        Args:
            sources (`Sequence[Source]`): result of [`TaskData.read`]. Only the first million rows of a stream are
                used.

        Returns:
            [`PreTrainedTokenizerBase`].

        Raises:
            ValueError: the vocabulary is too small, or the tokenizer cannot be used.
        """
        settings = self.vocabulary
        # Each once, in the order of the sources.
        tags = [*dict.fromkeys(source.tag for source in sources if source.tag is not None), *prefix_tags(sources)]
        if settings.path is not None:
            tokenizer = load_tokenizer(settings.path)
            self.check_tokenizer(tokenizer, sources)
            add_tags(tokenizer, tags)
        else:
            sentences = (
                sentence
                for source in sources
                for batch in _batches_of_vocabulary(source)
                for sentence in self.sentences(source, batch)
            )
            size = max(1, settings.size - len(self.extra_tokens()))
            tokenizer = train_tokenizer(
                sentences, size, settings.kind, prefixes=tags, split_digits=settings.split_digits
            )
        self.set_up_tokenizer(tokenizer)
        tokenizer.model_max_length = settings.max_length
        return tokenizer

    def extra_tokens(self) -> list[str]:
        """Returns the entries that the task needs in the vocabulary."""
        return []

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source]) -> None:
        """Raises a `ValueError` if the tokenizer that is named does not fit the text."""
        return

    def set_up_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Adds what the task needs, in place: entries, and special tokens around a text."""
        return

    @abstractmethod
    def sentences(self, source: Source, batch: Mapping[str, list[Any]]) -> Iterable[str]:
        """Returns the sentences of some rows, for the training of a tokenizer."""

    # ---- Updates -------------------------------------------------------------------------------------------------

    def build_updates(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        order: BatchOrder,
        labels: Sequence[str] = (),
        window_workers: int = 0,
        exchange: Exchange | None = None,
    ) -> Updates:
        """
        Encodes the training text and groups it into updates.

        Args:
            sources (`Sequence[Source]`): result of [`TaskData.read`].
            tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
            order ([`BatchOrder`]): token budget, seed and processes.
            labels (`Sequence[str]`): names of the labels, by id.
            window_workers (`int`): default of `data_workers` for text that is encoded while the model trains.
            exchange (`Exchange`, *optional*): lets all processes encode such text together.

        Returns:
            [`Updates`].

        Raises:
            ValueError: nothing fits the token budget, a label is unknown, or the vocabulary lacks what the task needs.
        """
        if self.longest_row is not None and self.longest_row > order.tokens_per_batch:
            raise ValueError(
                f"training.tokens_per_update leaves batches of {order.tokens_per_batch} tokens to "
                f"{order.num_processes} processes, fewer than objective.block_length ({self.longest_row}): raise it, "
                "or start fewer processes."
            )
        collator = PairCollator(tokenizer.pad_token_id, self.row_columns(tokenizer), order)
        updates: Updates
        windows: dict[str, Any] = {
            "size": self.stream_window,
            "order": order,
            "collator": collator,
            "num_workers": window_workers if self.data_workers is None else self.data_workers,
            "exchange": exchange,
        }
        if self.streaming:
            encoder = self.window_encoder(tokenizer, order.seed)
            updates = StreamUpdates(sources=sources, columns=self.stream_columns, encoder=encoder, **windows)
        else:
            text = self.encode_training(sources, tokenizer, labels, order.seed)
            weights = [(count, source.weight) for count, source in zip(text.counts, sources, strict=True)]
            sampler = TokenBudgetBatchSampler(text.lengths, order, weights)
            if text.empty or sampler.skipped:
                logger.warning(f"Skipped: {order.describe_skipped(text.empty, sampler.skipped)}")
            if text.numbers is None:
                updates = EpochUpdates(text.rows, sampler, collator, self.data_workers or 0)
            else:
                updates = RenewedUpdates(numbers=text.numbers, sampler=sampler, encoder=text.rows, **windows)
            updates.fingerprint = updates.fingerprint | text.fingerprint
        prefixes = [source.prefix for source in sources]
        # Text without prefixes has the fingerprint that earlier versions gave it.
        if any(prefix is not None for prefix in prefixes):
            updates.fingerprint = updates.fingerprint | {"prefixes": prefixes}
        return updates

    def row_columns(self, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        """Returns the columns of encoded rows for [`PairCollator`]."""
        return ()

    @abstractmethod
    def encode_training(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], seed: int
    ) -> TrainingRows:
        """Encodes the training text of sources that are not streams."""

    def window_encoder(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.utils.data.Dataset[Any]:
        """Returns the encoder of windows of a stream, as [`WindowUpdates`] needs it."""
        raise NotImplementedError

    # ---- Evaluation sets -----------------------------------------------------------------------------------------

    def encode_sets(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] = ()
    ) -> dict[str, list[EvaluationSet]]:
        """
        Encodes the validation and test sets.

        Args:
            sources (`Sequence[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].
            tokenizer ([`PreTrainedTokenizerBase`]), labels (`Sequence[str]`): as in [`TaskData.build_updates`].

        Returns:
            `dict[str, list[EvaluationSet]]`: the sets of all sources, by split ("validation" or "test").

        Raises:
            ValueError: the model accepts no text as long as this, or lacks a label or an entry of the vocabulary.
        """
        sets: dict[str, list[EvaluationSet]] = {}
        for split in ("validation", "test"):
            for source, name in named_sets(sources, split):
                encoded = self.encode_set(source, split, tokenizer, labels)
                sets.setdefault(split, []).append(replace(encoded, name=name))
        return sets

    @abstractmethod
    def encode_set(
        self, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]
    ) -> EvaluationSet:
        """Encodes one split of a source."""


def with_prefix(sentences: Sequence[str], source_prefix: str | None) -> list[str]:
    """Puts a language tag or prefix in front of the sentences that are not blank."""
    before = "" if source_prefix is None else f"{source_prefix} "
    return [before + sentence if sentence.strip() else "" for sentence in sentences]


def prefix_tags(sources: Sequence[Source]) -> list[str]:
    """Returns the prefixes of sources that are one entry of the vocabulary, such as `"<bt>"`, each once."""
    prefixes = dict.fromkeys(source.prefix for source in sources)
    return [prefix for prefix in prefixes if prefix is not None and is_tag(prefix)]


def _batches_of_vocabulary(source: Source) -> Iterator[dict[str, list[Any]]]:
    """Reads the training text that a vocabulary is trained on, in parts of 1000 rows."""
    is_stream = isinstance(source.splits["train"], IterableDataset)
    return islice(source.batches("train"), VOCABULARY_ROWS // 1000 if is_stream else None)


def named_sets(sources: Sequence[Source], split: str) -> list[tuple[Source, str]]:
    """
    Names the sets of a split.

    Args:
        sources (`Sequence[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].
        split (`str`): "validation" or "test".

    Returns:
        `list[tuple[Source, str]]`: the sources that have this split, in their order, and the names of their sets. A
        further set of the direction en-de is called en-de.2.
    """
    sets: list[tuple[Source, str]] = []
    for source in sources:
        if split in source.splits:
            same = sum(name.split(".")[0] == source.name for _, name in sets)
            sets.append((source, f"{source.name}.{same + 1}" if same else source.name))
    return sets
