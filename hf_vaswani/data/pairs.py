"""Sentence pairs, from all sources of a run."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..corpus.duplicates import HeldOut
from ..extras import extra
from ..model.sentences_vaswani import LanguageTags
from .augmentation import TextAugmenter, altered_set
from .encoding import EncodedRows, encode_pairs, pair_lengths
from .reading import Source
from .task_data import (
    EvaluationSet,
    EvaluationText,
    TaskData,
    TrainingRows,
    named_sets,
    prefix_tags,
    with_prefix,
)
from .tokenizer import has_tag, is_tag
from .windows import WindowEncoder

with extra("train"):
    from datasets import Dataset, IterableDataset, concatenate_datasets
    from datasets.fingerprint import Hasher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PairData(TaskData):
    """
    Sentence pairs.

    Attributes:
        alterations (`Mapping[str, float]`): probabilities of [`TextAugmenter`].
        bpe_dropout (`float`): probability of each merge to be skipped.
        altered (`Sequence[str]`): alterations of the test sets that the model must be able to read.
        has_own_vocabulary (`bool`): whether the vocabulary is learned from this text. That of another model may have
            more tags than the text has languages.
    """

    alterations: Mapping[str, float] = field(default_factory=dict)
    bpe_dropout: float = 0.0
    altered: Sequence[str] = ()
    has_own_vocabulary: bool = True

    contents = "pair with text on both sides"

    def read(self) -> list[Source]:
        """Reads the text, see [`TaskData.read`], and warns if nothing tells two target languages apart."""
        sources = super().read()
        targets = dict.fromkeys(str(source.target_language) for source in sources)
        is_told = all(source.source_prefix is not None for source in sources)
        if len(targets) > 1 and not is_told:
            logger.warning(
                f"The target languages are {', '.join(targets)}, but the source sentences have no tag for them: set "
                "data.target_tag, unless the text itself names the target language"
            )
        return sources

    def read_sets(self) -> list[Source]:
        """Reads the named sets, see [`TaskData.read_sets`]; the model must have their language tags and prefixes."""
        sets = super().read_sets()
        if not self.has_own_vocabulary:
            return sets
        trained = sorted({str(source.target_language) for source in self.sources})
        prefixes = {source.prefix for source in self.sources}
        for source in sets:
            if source.tag is not None and source.target_language not in trained:
                raise ValueError(
                    f"validation_sets.{source.name} has the target language {source.target_language!r}, for which the "
                    f"model has no tag (data.target_tag): its training text has {', '.join(trained)}."
                )
            if source.prefix is not None and is_tag(source.prefix) and source.prefix not in prefixes:
                raise ValueError(
                    f"validation_sets.{source.name}.prefix is {source.prefix!r}, for which the model has no entry: no "
                    "training text has this prefix."
                )
        return sets

    def has_text(self, source: Source, split: str) -> bool:
        """Returns whether a split has a pair with text on both sides."""
        pairs = (
            pair for batch in source.batches(split) for pair in zip(batch["source"], batch["target"], strict=True)
        )
        return any(ours.strip() and theirs.strip() for ours, theirs in pairs)

    def count_held_out(self, sources: Sequence[Source]) -> list[dict[str, int] | None]:
        """
        Counts the validation and test pairs that have their source or their target in the training text, too.

        Args:
            sources (`Sequence[Source]`): results of [`TaskData.read`] and [`TaskData.read_sets`].

        Returns:
            `list[dict[str, int] | None]`: for each source, the number by split; `None` for all if a training text is
            streamed, because it would have to be read once more.
        """
        training = [source.splits["train"] for source in sources if "train" in source.splits]
        if any(isinstance(pairs, IterableDataset) for pairs in training):
            return [None] * len(sources)
        held_out = held_out_text(sources)
        for pairs in training:
            found_in = pairs.filter(
                held_out.find,
                input_columns=["source", "target"],
                batched=True,
                num_proc=self.num_proc,
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

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source]) -> None:
        """Checks that sentences end with `</s>`, and that prefixes are no special tokens."""
        if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
            raise ValueError(
                f"The tokenizer {self.vocabulary.path} (tokenizer.path) does not put {tokenizer.eos_token} after a "
                "sentence, so a model would never learn where to end: give it a post-processor that does."
            )
        if special := [prefix for prefix in prefix_tags(sources) if prefix in tokenizer.all_special_tokens]:
            raise ValueError(
                f"The prefix {special[0]!r} is a special token of the tokenizer {self.vocabulary.path} "
                "(tokenizer.path): choose another word."
            )

    def sentences(self, source: Source, batch: Mapping[str, list[Any]]) -> Iterator[str]:
        """Yields both sides of pairs."""
        prefix = source.prefix
        # A prefix of plain text is part of the text, as it is encoded; a tag has an entry without being learned.
        yield from batch["source"] if prefix is None or is_tag(prefix) else with_prefix(batch["source"], prefix)
        yield from batch["target"]

    def encode_training(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], seed: int
    ) -> TrainingRows:
        """Encodes the training text, see [`TaskData.encode_training`]."""
        augmenter = self.augmenter(tokenizer, seed)
        parts, first = [], 1
        for source in sources:
            pairs = source.splits["train"]
            parts.append(encode_pairs(pairs, tokenizer, source.source_prefix, first, self.num_proc))
            first += len(pairs)
        encoded, counts = concatenate_datasets(parts), [len(part) for part in parts]
        lengths, empty = pair_lengths(encoded), first - 1 - len(encoded)
        source_tokens, target_tokens = lengths.sum(axis=0)
        logger.info(f"{len(encoded):,} training pairs, {source_tokens:,} source and {target_tokens:,} target tokens")
        if augmenter is None:
            return TrainingRows(lengths, counts, EncodedRows(encoded), empty=empty)
        numbers = encoded.with_format("numpy")["number"][:]
        return TrainingRows(lengths, counts, WindowEncoder(tokenizer, augmenter, sources), numbers, empty)

    def augmenter(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> TextAugmenter | None:
        """Returns what alters the training text, or `None` if nothing does; raises the errors of its class."""
        if not self.bpe_dropout and not any(self.alterations.values()):
            return None
        return TextAugmenter(tokenizer, seed, self.alterations, self.bpe_dropout)

    def window_encoder(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> WindowEncoder:
        """Returns the encoder of windows of a stream."""
        return WindowEncoder(tokenizer, self.augmenter(tokenizer, seed))

    def encode_sets(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] = ()
    ) -> dict[str, list[EvaluationSet]]:
        """Encodes the sets, see [`TaskData.encode_sets`]; tags and prefixes are in front of their source sentences."""
        for source in sources:
            if source.tag is not None:
                LanguageTags(tokenizer).find(str(source.target_language))
        for prefix in prefix_tags(sources):
            if not has_tag(tokenizer, prefix):
                raise ValueError(
                    f"The vocabulary has no entry for the prefix {prefix!r}: give it to a source of training text, or "
                    "set initialize.add_tokens."
                )
        return super().encode_sets(sources, tokenizer, labels)

    def encode_set(
        self, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]
    ) -> EvaluationSet:
        """Encodes a set, and checks that the model can read it, altered too if it is to be scored so."""
        pairs, limit = source.splits[split], self.max_length
        encoded = encode_pairs(pairs, tokenizer, source.source_prefix)
        parts = {split: encoded}
        if limit is not None and split == "test":
            for kind in self.altered:
                parts[f"altered {split} ({kind})"] = encode_pairs(
                    _altered(pairs, kind), tokenizer, source.source_prefix
                )
        for kind, part in parts.items():
            if limit is not None and len(part) and (longest := int(pair_lengths(part).max())) > limit:
                raise ValueError(
                    f"The {kind} set has a side of {longest} tokens, but model.max_position_embeddings is {limit}."
                )
        if empty := len(pairs) - len(encoded):
            logger.warning(f"The {split} set has {empty} pairs with an empty side, which count in its BLEU")
        return EvaluationSet(**vars(_evaluation_text(source, split, source.name)), encoded=encoded)


def held_out_text(sources: Sequence[Source]) -> HeldOut[tuple[int, str]]:
    """Returns the validation and test text of each source, named by its place among the sources and the split."""
    return HeldOut(
        {
            (i, split): ((row["source"], row["target"]) for row in source.splits[split])
            for i, source in enumerate(sources)
            for split in source.splits
            if split != "train"
        }
    )


def evaluation_texts(sources: Sequence[Source], split: str) -> list[EvaluationText]:
    """
    Puts language tags and prefixes in front of the source sentences of sets.

    Args:
        sources (`Sequence[Source]`), split (`str`): as in [`named_sets`].

    Returns:
        `list[EvaluationText]`: the sets of the sources that have this split, in their order.
    """
    return [_evaluation_text(source, split, name) for source, name in named_sets(sources, split)]


def _evaluation_text(source: Source, split: str, name: str) -> EvaluationText:
    pairs, before = source.splits[split], source.source_prefix
    sentences, language = with_prefix(pairs["source"], before), str(source.target_language)
    return EvaluationText(name, sentences, list(pairs["target"]), before, source.prefix, language)


def _altered(pairs: Dataset, alteration: str) -> Dataset:
    sources, references = altered_set(pairs["source"], [[target] for target in pairs["target"]], alteration)
    return Dataset.from_dict({"source": sources, "target": [target for (target,) in references]})
