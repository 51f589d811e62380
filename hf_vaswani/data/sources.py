"""The text of a recipe: reads and checks its sources, and makes vocabulary, ids and updates of them."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..recipe import Recipe, SourceRecipe
from .batching import BatchOrder, EpochUpdates, PairCollator, TokenBudgetBatchSampler, Updates
from .duplicates import HeldOut
from .encoding import EncodedPairs, encode_pairs, pair_lengths
from .reading import load_pairs, named_errors
from .streaming import Stream, StreamUpdates
from .tokenizer import add_language_tags, language_tag, load_tokenizer, train_tokenizer

try:
    from datasets import Dataset, IterableDataset, concatenate_datasets
except ImportError as error:
    raise ImportError(f"Reading training text needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

# Pairs of each stream that the vocabulary is trained on.
VOCABULARY_PAIRS = 1_000_000


@dataclass
class Source:
    """A source of text: the pairs of each split, and the language tag in front of its source sentences."""

    recipe: SourceRecipe
    pairs: dict[str, Dataset | IterableDataset]
    tag: str | None

    @property
    def name(self) -> str:
        """Direction, as in en-de."""
        return f"{self.recipe.source_language}-{self.recipe.target_language}"

    def origin(self, split: str) -> list[str]:
        """Returns the files of a split, or the dataset, for error messages."""
        files = getattr(self.recipe, f"{split}_files")
        paths = [] if files is None else [files] if isinstance(files, str) else list(files.values())
        return paths or [str(self.recipe.dataset)]


@dataclass
class EvaluationSet:
    """A validation or test set: its direction, as in en-de, its text, and the ids of both sides."""

    name: str
    source: list[str]
    target: list[str]
    encoded: Dataset


def read_sources(recipe: Recipe) -> list[Source]:
    """
    Reads the text of a recipe.

    Args:
        recipe ([`Recipe`]): its sections `data` and `more_data`.

    Returns:
        `list[Source]`: in the order of the recipe.

    Raises:
        ValueError: a set is empty or cannot be read; the message has file and line.
        FileNotFoundError: a file or dataset does not exist.
    """
    sources = []
    for part in (recipe.data, *recipe.more_data):
        settings = {name: value for name, value in asdict(part).items() if name in SourceRecipe.__dataclass_fields__}
        del settings["weight"], settings["license"]
        pairs = load_pairs(**settings, seed=recipe.seed, streaming=recipe.data.streaming)
        tag = language_tag(part.target_language) if recipe.data.target_tag else None
        sources.append(Source(part, pairs, tag))
        for split in dict.fromkeys(("train", *pairs)):
            if split not in pairs or not _has_text(pairs[split], sources[-1].origin(split)):
                if split == "train" and not (recipe.more_data or part.dataset or part.train_files):
                    raise ValueError("There is no training text: set data.train_files or data.dataset.")
                of = f" of {sources[-1].name}" if recipe.more_data else ""
                section = "more_data" if sources[:-1] else "data"
                raise ValueError(
                    f"The {split} set{of} is empty: the {section} section of the recipe gives no pairs of text for it."
                )
    targets = dict.fromkeys(source.recipe.target_language for source in sources)
    if len(targets) > 1 and not recipe.data.target_tag:
        logger.warning(
            f"The target languages are {', '.join(targets)}, but the source sentences have no tag for them: set "
            "data.target_tag, unless the text itself names the target language"
        )
    return sources


def _has_text(pairs: Dataset | IterableDataset, origin: list[str]) -> bool:
    batches = named_errors(pairs.iter(1000), origin)
    rows = (row for batch in batches for row in zip(batch["source"], batch["target"], strict=True))
    return any(source.strip() and target.strip() for source, target in rows)


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


def count_held_out(sources: list[Source]) -> list[dict[str, int] | None]:
    """
    Counts the validation and test pairs that have their source or their target in the training text, too.

    Args:
        sources (`list[Source]`): result of [`read_sources`].

    Returns:
        `list[dict[str, int] | None]`: for each source, the number by split; `None` for all if a training text is
        streamed, because it would have to be read once more.
    """
    if any(isinstance(source.pairs["train"], IterableDataset) for source in sources):
        return [None] * len(sources)
    held_out = held_out_text(sources)
    for source in sources:
        for batch in source.pairs["train"].iter(1000):
            held_out.find(batch["source"], batch["target"])
    found: list[dict[str, int] | None] = [{} for _ in sources]
    for (i, split), (_, count) in held_out.counts().items():
        found[i] = (found[i] or {}) | {split: count}
    return found


def make_tokenizer(recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer that a recipe names, or trains one on the training text of all sources.

    Args:
        recipe ([`Recipe`]): its tokenizer section.
        sources (`list[Source]`): result of [`read_sources`]. Only the first million pairs of a stream are used.

    Returns:
        [`PreTrainedTokenizerBase`] with a tag for each target language if `data.target_tag` is set. Its
        `model_max_length` is `max_position_embeddings` of the model.

    Raises:
        ValueError: the tokenizer does not end sentences with `</s>`.
    """
    # Each once, in the order of the sources.
    languages = list(dict.fromkeys(source.recipe.target_language for source in sources if source.tag is not None))
    if recipe.tokenizer.path is not None:
        tokenizer = load_tokenizer(recipe.tokenizer.path)
        if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
            raise ValueError(
                f"The tokenizer {recipe.tokenizer.path} (tokenizer.path) does not put {tokenizer.eos_token} after a "
                "sentence, so a model would never learn where to end: give it a post-processor that does."
            )
        add_language_tags(tokenizer, languages)
    else:
        sentences = (sentence for source in sources for sentence in _sentences(source))
        tokenizer = train_tokenizer(sentences, recipe.tokenizer.vocab_size, recipe.tokenizer.kind, languages)
    # The limit at which `translate` splits a line and `truncation=True` truncates. Training has limits of its own.
    tokenizer.model_max_length = recipe.model.max_position_embeddings
    return tokenizer


def _sentences(source: Source) -> Iterator[str]:
    pairs = source.pairs["train"]
    batches = named_errors(pairs.iter(1000), source.origin("train"))
    if isinstance(pairs, IterableDataset):
        batches = islice(batches, VOCABULARY_PAIRS // 1000)
    for batch in batches:
        yield from batch["source"]
        yield from batch["target"]


def encode_evaluation_sets(
    recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[EvaluationSet]]:
    """
    Encodes the validation and test sets.

    Args:
        recipe ([`Recipe`]): the experiment.
        sources (`list[Source]`): result of [`read_sources`].
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.

    Returns:
        `dict[str, list[EvaluationSet]]`: the sets of all sources, by split ("validation" or "test"). Their source
        sentences have the language tags in front.

    Raises:
        ValueError: a sentence is longer than the model accepts.
    """
    sets: dict[str, list[EvaluationSet]] = {}
    limit = _positions(recipe)
    for source in sources:
        for split, pairs in source.pairs.items():
            if split == "train":
                continue
            encoded = encode_pairs(pairs, tokenizer, source.tag)
            if limit is not None and len(encoded) and (longest := int(pair_lengths(encoded).max())) > limit:
                raise ValueError(
                    f"The {split} set has a side of {longest} tokens, but model.max_position_embeddings is {limit}."
                )
            if empty := len(pairs) - len(encoded):
                logger.warning(f"The {split} set has {empty} pairs with an empty side, which count in its BLEU")
            front = "" if source.tag is None else f"{source.tag} "
            sentences = [front + sentence if sentence.strip() else "" for sentence in pairs["source"]]
            same = sum(other.name.split(".")[0] == source.name for other in sets.setdefault(split, []))
            name = f"{source.name}.{same + 1}" if same else source.name
            sets[split].append(EvaluationSet(name, sentences, list(pairs["target"]), encoded))
    return sets


def build_updates(
    recipe: Recipe,
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    num_processes: int = 1,
    process_index: int = 0,
) -> Updates:
    """
    Encodes the training pairs and groups them into updates.

    Args:
        recipe ([`Recipe`]): token budget, accumulation, seed, workers.
        sources (`list[Source]`): result of [`read_sources`].
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        num_processes (`int`): number of processes that share the updates.
        process_index (`int`): index of this process.

    Returns:
        [`Updates`].

    Raises:
        ValueError: no pair fits the token budget.
    """
    training, collator = recipe.training, PairCollator(tokenizer.pad_token_id)
    order = BatchOrder(
        training.tokens_per_batch,
        recipe.seed,
        training.accumulation_steps,
        num_processes,
        process_index,
        max_length=_positions(recipe),
    )
    if recipe.data.streaming:
        streams = [
            Stream(
                source.pairs["train"],
                source.name,
                source.recipe.weight,
                source.tag,
                _description(source),
                source.origin("train"),
            )
            for source in sources
        ]
        return StreamUpdates(streams, tokenizer, recipe.data.stream_window, order, collator, training.data_workers)
    parts, first = [], 1
    for source in sources:
        pairs = source.pairs["train"]
        parts.append(encode_pairs(pairs, tokenizer, source.tag, first, recipe.data.num_proc))
        first += len(pairs)
    encoded = concatenate_datasets(parts)
    weights = [(len(part), source.recipe.weight) for part, source in zip(parts, sources, strict=True)]
    sampler = TokenBudgetBatchSampler(pair_lengths(encoded), order, weights)
    _report(sampler, first - 1 - len(encoded))
    return EpochUpdates(EncodedPairs(encoded), sampler, collator, training.data_workers)


def _report(sampler: TokenBudgetBatchSampler, empty: int) -> None:
    source_tokens, target_tokens = sampler.lengths.sum(axis=0)
    count = len(sampler.lengths)
    logger.info(f"{count:,} training pairs, {source_tokens:,} source and {target_tokens:,} target tokens")
    if empty or sampler.skipped:
        logger.warning(f"Skipped: {sampler.order.describe_skipped(empty, sampler.skipped)}")


def _description(source: Source) -> dict[str, Any]:
    """Describes a stream without reading it: names, and the sizes of local files."""
    recipe = source.recipe
    if recipe.train_files is not None:
        return {"files": [[Path(path).name, Path(path).stat().st_size] for path in source.origin("train")]}
    return {"dataset": recipe.dataset, "config": recipe.dataset_config, "split": recipe.train_split}


def _positions(recipe: Recipe) -> int | None:
    """Returns the most tokens that the model accepts, which only learned positions limit."""
    return recipe.model.max_position_embeddings if recipe.model.position_encoding == "learned" else None
