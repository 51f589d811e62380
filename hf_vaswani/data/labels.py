"""Labelled text: its labels, and the rows of ids that classifiers learn from."""

import logging
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from ..recipe import Recipe, SourceRecipe
from .batching import EpochUpdates, PairCollator, TokenBudgetBatchSampler, Updates
from .blocks import plain_tokenizer
from .encoding import EncodedRows, as_lists, pair_lengths
from .objectives import SPACES
from .reading import load_labelled
from .sources import EvaluationSet, Source, TaskData, batch_order, longest_input
from .text_sources import TextSource, text_settings
from .tokenizer import load_tokenizer, put_special_tokens, train_tokenizer

with extra("train"):
    import datasets
    from datasets import Dataset, IterableDataset, concatenate_datasets
    from datasets.fingerprint import Hasher

logger = logging.getLogger(__name__)


class LabelledData(TaskData):
    """Text with labels: one for a text or a pair of texts, or one for each word."""

    source_class = TextSource

    def load(self, recipe: Recipe, part: SourceRecipe) -> dict[str, Dataset | IterableDataset]:
        """Reads the splits that a source names."""
        columns: dict[str, Any] = {"pair_column": part.pair_column, "label_column": part.label_column}
        return dict(load_labelled(**text_settings(part), **columns, is_tagged=recipe.task == "tagging"))

    def check_split(self, recipe: Recipe, source: Source, split: str) -> None:
        """Raises a `ValueError` if a sentence has another number of tags than words."""
        rows: Any = source.pairs[split]
        if "words" not in rows.column_names:
            return
        lengths = (rows.data.column(name).combine_chunks().value_lengths() for name in ("words", "tags"))
        for number, (words, tags) in enumerate(zip(*(each.to_pylist() for each in lengths), strict=True), start=1):
            if words != tags:
                where = " and ".join(source.origin(split))
                raise ValueError(f"{where}, row {number}, has {words} words but {tags} tags: each word needs one tag.")

    def label_names(self, sources: Sequence[Source]) -> list[str]:
        """Collects the labels of the training text: numbers in their order, other labels in that of the alphabet."""
        names = {name for source in sources for row in _labels(source.pairs["train"]) for name in row}
        return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def check(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        labels: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Checks that the model has two labels or more, and each of the text among them."""
        check_labels(labels, sources)
        check_all_known(labels, sources)

    def make_tokenizer(self, recipe: Recipe, sources: list[Source]) -> PreTrainedTokenizerBase:
        """
        Loads or trains the tokenizer, see [`TaskData.make_tokenizer`]. It puts `<s>` in front of a text and `</s>`
        behind it, and behind the second text of a pair.
        """
        if recipe.tokenizer.path is not None:
            tokenizer = load_tokenizer(recipe.tokenizer.path)
        else:
            sentences = chain.from_iterable(texts for source in sources for texts in _texts(source.pairs["train"]))
            tokenizer = train_tokenizer(sentences, recipe.tokenizer.vocab_size, recipe.tokenizer.kind)
        put_special_tokens(tokenizer, recipe.task, has_segments(recipe))
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
        check_labels(labels, sources)
        parts: list[Dataset] = []
        for source in sources:
            first = 1 + sum(map(len, parts))
            where = " and ".join(source.origin("train"))
            rows, longest = source.pairs["train"], recipe.objective.block_length
            parts.append(encode_labelled(rows, tokenizer, labels, longest, where, first, recipe.data.num_proc))
        encoded = concatenate_datasets(parts)
        lengths = pair_lengths(encoded)
        order = batch_order(recipe, num_processes, process_index)
        weights = [(len(part), source.recipe.weight) for part, source in zip(parts, sources, strict=True)]
        sampler = TokenBudgetBatchSampler(lengths, order, weights)
        logger.info(f"{len(encoded):,} labelled texts, {int(lengths[:, 0].sum()):,} tokens, {len(labels)} labels")
        for part, source in zip(parts, sources, strict=True):
            _report_cut(part, source.pairs["train"], recipe.objective.block_length, f"training text of {source.name}")
        collator = PairCollator(tokenizer.pad_token_id, label_columns(recipe, encoded))
        updates = EpochUpdates(EncodedRows(encoded), sampler, collator, recipe.training.data_workers)
        targets = [batch.column("target_ids").values for batch in encoded.data.to_batches()]
        crc = 0
        for values in targets:
            crc = zlib.crc32(values.to_numpy().tobytes(), crc)
        updates.fingerprint = updates.fingerprint | {"labels": list(labels), "crc32_of_labels": crc}
        return updates

    def encode_set(
        self,
        recipe: Recipe,
        source: Source,
        split: str,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
    ) -> EvaluationSet:
        """Encodes a set; its `source` has the texts, and its `target` the labels."""
        rows: Any = source.pairs[split]
        where = " and ".join(source.origin(split))
        # All words count: their sentences are cut only where the model cannot read on.
        longest = longest_input(recipe) if recipe.task == "tagging" else recipe.objective.block_length
        encoded = encode_labelled(rows, tokenizer, labels, longest, where)
        _report_cut(encoded, rows, longest, f"{split} text of {name}")
        texts, names = ["\t".join(each) for each in _texts(rows)], [" ".join(each) for each in _labels(rows)]
        return EvaluationSet(name, texts, names, None, None, source.recipe.source_language, encoded)


def check_labels(labels: Sequence[str], sources: Sequence[Source]) -> None:
    """Raises a `ValueError` if a model of these labels would have nothing to choose from."""
    if len(labels) < 2:
        origin = " and ".join(name for source in sources if "train" in source.pairs for name in source.origin("train"))
        found = f"only {labels[0]!r}" if labels else "none"
        raise ValueError(f"A classifier needs two labels or more, but the training text has {found}: {origin}.")


def check_known(names: Sequence[str], ids: Mapping[str, int], where: str) -> None:
    """Raises a `ValueError` that begins with `where` unless each name is a label of the model, a key of `ids`."""
    if unknown := [name for name in names if name not in ids]:
        raise ValueError(
            f"{where} has the label {unknown[0]!r}, but the model has only {', '.join(map(repr, list(ids)[:20]))}"
            f"{' and more' if len(ids) > 20 else ''}: each label must be in the training text."
        )


def check_all_known(labels: Sequence[str], sources: Sequence[Source]) -> None:
    """Raises a `ValueError` as [`check_known`] does, for all text of these sources."""
    ids = {name: i for i, name in enumerate(labels)}
    for source in sources:
        for split, rows in source.pairs.items():
            where = " and ".join(source.origin(split))
            for number, names in enumerate(_labels(rows), start=1):
                check_known(names, ids, f"{where}, row {number},")


def _labels(rows: Any) -> list[list[str]]:
    """Returns the labels of each row, one or, of words, several."""
    return rows["tags"][:] if "tags" in rows.column_names else [[label] for label in rows["label"]]


def has_segments(recipe: Recipe) -> bool:
    """Returns whether a new model tells the two texts of a pair apart by segments, which a decoder does not have."""
    return recipe.data.pair_column is not None and recipe.objective.stack != "decoder"


def _texts(rows: Any) -> list[tuple[str, ...]]:
    """Returns the text of each row, or both texts of a pair."""
    if "words" in rows.column_names:
        return [(" ".join(words),) for words in rows["words"]]
    return list(zip(*(rows[name] for name in ("text", "pair") if name in rows.column_names), strict=True))


def encode_labelled(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    longest: int | None,
    where: str,
    first_number: int = 1,
    num_proc: int | None = None,
) -> Dataset:
    """
    Encodes labelled text as ids. The result is cached on disk under the fingerprints of the text and the tokenizer.

    Args:
        rows (`Dataset`): columns of [`load_labelled`].
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer.
        labels (`Sequence[str]`): names of the labels, by id.
        longest (`int`, *optional*): most tokens of a text or a pair of texts, special tokens included; longer ones are
            cut.
        where (`str`): name of the text, for error messages.
        first_number (`int`), num_proc (`int`, *optional*): as in [`encode_pairs`].

    Returns:
        `Dataset` with the columns `number`, `source_ids`, `target_ids` and, if the tokenizer has them, `segments`. The
        target of a text is its label; that of a tagged sentence has the label of each word at its first token, and
        -100 elsewhere.

    Raises:
        ValueError: a label is not one of `labels`.
    """
    plain, ids = plain_tokenizer(tokenizer), {name: i for i, name in enumerate(labels)}
    if longest is not None:
        plain.enable_truncation(longest)
    lists = ["source_ids", "target_ids"]
    if "token_type_ids" in tokenizer.model_input_names:
        lists.append("segments")

    def encode(table: pa.Table, indices: list[int]) -> pa.Table:
        # Another process receives the tokenizer without it.
        plain.encode_special_tokens = True
        batch = table.to_pydict()
        if "words" in batch:
            encodings = plain.encode_batch([" ".join(words) for words in batch["words"]])
            names = batch["tags"]
        else:
            pairs = zip(batch["text"], batch["pair"], strict=True) if "pair" in batch else batch["text"]
            encodings = plain.encode_batch(list(pairs))
            names = [[label] for label in batch["label"]]
        found: dict[str, list[Any]] = {name: [] for name in lists}
        for row, (encoding, tags) in enumerate(zip(encodings, names, strict=True)):
            check_known(tags, ids, f"{where}, row {indices[row] + 1},")
            target = [ids[name] for name in tags]
            if "words" in batch:
                target = tag_places(encoding, batch["words"][row], target)
            values = {"source_ids": encoding.ids, "target_ids": target, "segments": encoding.type_ids}
            for name in lists:
                found[name].append(values[name])
        columns = {name: as_lists(values) for name, values in found.items()}
        return pa.table({"number": pa.array([first_number + index for index in indices]), **columns})

    numbers = datasets.List(datasets.Value("int32"))
    encoded = rows.with_format("arrow").map(
        encode,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features({"number": datasets.Value("int64")} | dict.fromkeys(lists, numbers)),
        num_proc=num_proc,
        new_fingerprint=Hasher.hash([rows._fingerprint, plain.to_str(), lists, list(labels), first_number]),
        desc="Encoding",
    )
    return encoded.with_format(None)


def tag_places(encoding: Encoding, words: Sequence[str], tags: Sequence[int]) -> list[int]:
    """
    Puts the tag of each word at its first token.

    Args:
        encoding (`tokenizers.Encoding`): the words, joined by spaces.
        words (`Sequence[str]`), tags (`Sequence[int]`): the words, and an id for each.

    Returns:
        `list[int]`: a tag or -100 for each token. A word without tokens, or beyond the last one, has none.
    """
    found = [-100] * len(encoding.ids)
    place, start = 0, 0
    for word, tag in zip(words, tags, strict=True):
        # A piece may begin with the space in front of its word, or be that space.
        while place < len(found) and (
            encoding.special_tokens_mask[place]
            or encoding.offsets[place][1] <= start
            or encoding.tokens[place] in SPACES
        ):
            place += 1
        end = start + len(word)
        if place < len(found) and encoding.offsets[place][0] < end:
            found[place] = tag
            place += 1
        start = end + 1
    return found


def _report_cut(encoded: Dataset, rows: Dataset, longest: int | None, what: str) -> None:
    """Logs how many texts are cut, and warns of words whose tags are not scored."""
    if longest is not None and (cut := int((pair_lengths(encoded)[:, 0] == longest).sum())):
        logger.info(f"{cut:,} texts of the {what} have {longest} tokens: what was longer is cut")
    if "tags" in rows.column_names:
        words = sum(map(len, rows["tags"]))
        known = sum(tag != -100 for row in encoded["target_ids"] for tag in row)
        if known < words:
            logger.warning(f"{words - known:,} words of the {what} have no token in their text, and do not count")


def label_columns(recipe: Recipe, encoded: Dataset) -> list[str]:
    """Returns the columns of encoded text for [`PairCollator`]."""
    return [*encoded.column_names, *(["label"] if recipe.task == "classification" else [])]
