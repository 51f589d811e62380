"""Translates a corpus; says what a model thinks of translations that exist."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.batching import length_batches
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..model.pipeline_vaswani import evaluation_mode
from ..model.sentences_vaswani import language_tags


def translate_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    tokens_per_batch: int = 4096,
    progress: bool = False,
    **generate_kwargs: Any,
) -> list[str]:
    """
    Translates sentences in batches of like length.

    Args:
        model ([`PreTrainedModel`]): translates; dropout is off meanwhile.
        tokenizer ([`PreTrainedTokenizerBase`]): the model's own.
        sentences (`Sequence[str]`): sources. An empty one has an empty translation.
        tokens_per_batch (`int`): rows times the longest source, at most.
        progress (`bool`): whether to show a bar.
        **generate_kwargs: for `generate()`, over the model's generation config.

    Returns:
        `list[str]`: translations in the order of `sentences`.

    Raises:
        ValueError: a sentence has half a character of UTF-16.
    """
    translations = [""] * len(sentences)
    # A generation config may ask for more than one translation, or for more than translations.
    settings = {"num_return_sequences": 1, "return_dict_in_generate": False} | generate_kwargs
    with closing(_generate(model, tokenizer, sentences, tokens_per_batch, progress, **settings)) as batches:
        for batch, outputs in batches:
            for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
                translations[i] = text
    return translations


def translate_n_best(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    n: int,
    tokens_per_batch: int = 4096,
    **generate_kwargs: Any,
) -> list[list[tuple[float, str]]]:
    """
    The `n` best translations that beam search finds of each sentence.

    Args:
        model, tokenizer, sentences, tokens_per_batch, generate_kwargs: as in [`translate_corpus`].
        n (`int`): how many; at most the beam's size.

    Returns:
        `list[list[tuple[float, str]]]`: scores as in `sequences_scores` and translations, the best first, in the order
        of `sentences`. Of an empty one all are empty, with the score 0.

    Raises:
        ValueError: a sentence has half a character of UTF-16, or the search has only one beam, and so no scores.
    """
    found = [[(0.0, "")] * n for _ in sentences]
    settings = {"num_return_sequences": n, "return_dict_in_generate": True, "output_scores": True} | generate_kwargs
    if isinstance(model, VaswaniForConditionalGeneration):
        # It has these scores also without those of every token at every step.
        settings["output_scores"] = False
    with closing(_generate(model, tokenizer, sentences, tokens_per_batch, **settings)) as batches:
        for batch, outputs in batches:
            if getattr(outputs, "sequences_scores", None) is None:
                raise ValueError("Translations with scores need beam search: set num_beams to 2 or more.")
            texts = tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)
            pairs = list(zip(outputs.sequences_scores.tolist(), texts, strict=True))
            for place, i in enumerate(batch):
                found[i] = pairs[place * n : (place + 1) * n]
    return found


@torch.inference_mode()
def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    tokens_per_batch: int,
    progress: bool = False,
    **generate_kwargs: Any,
) -> Generator[tuple[list[int], Any], None, None]:
    """The places of the sentences of a batch, which are of like length and not empty, and what comes out of it."""
    ids = _encode(tokenizer, sentences)
    # The tag of a language has no more to translate behind it than an empty line.
    tags = set(language_tags(tokenizer).values())
    spoken = (i for i, text in enumerate(sentences) if text.strip() and text.strip() not in tags)
    order = sorted(spoken, key=lambda i: len(ids[i]), reverse=True)
    bar = tqdm(total=len(order), desc="Translating", unit=" sentences", leave=False, disable=not progress)
    with bar, evaluation_mode(model):
        for part in length_batches(np.array([len(ids[i]) for i in order]), tokens_per_batch):
            batch = order[part]
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            yield batch, model.generate(**inputs, **generate_kwargs)
            bar.update(len(batch))


def _encode(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> list[list[int]]:
    """The ids of sentences; raises a `ValueError` for one that cannot be encoded."""
    for number, text in enumerate(sentences, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Sentence {number} has half a character of UTF-16 ({text[error.start]!r}), which no text has."
            ) from error
    # A tokenizer does not take an empty list.
    ids: list[list[int]] = tokenizer(list(sentences), verbose=False)["input_ids"] if sentences else []
    return ids


@torch.inference_mode()
def log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    tokens_per_batch: int = 4096,
) -> list[tuple[float, int]]:
    """
    What a model says of given translations: log P(target | source), the sum that beam search looks for before its
    length penalty.

    Args:
        model ([`PreTrainedModel`]): translates; dropout is off meanwhile.
        tokenizer ([`PreTrainedTokenizerBase`]): the model's own.
        sources (`Sequence[str]`): sentences.
        targets (`Sequence[str]`): a translation of each.
        tokens_per_batch (`int`): rows times the longest source or target, at most.

    Returns:
        `list[tuple[float, int]]`: the log-probability of each translation, in nats, and its tokens, `</s>` included.

    Raises:
        ValueError: the two have different lengths, or a text has half a character of UTF-16 or more tokens than the
            model has positions.
    """
    if len(sources) != len(targets):
        raise ValueError(f"There are {len(targets)} translations for {len(sources)} sentences.")
    source_ids, target_ids = (_encode(tokenizer, side) for side in (sources, targets))
    lengths = [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
    _check_positions(model, lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    found = [(0.0, 0)] * len(order)
    with evaluation_mode(model):
        for part in length_batches(np.array([lengths[i] for i in order]), tokens_per_batch):
            batch = order[part]
            inputs = tokenizer.pad({"input_ids": [source_ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            padded = tokenizer.pad({"input_ids": [target_ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
            logits = model(**inputs, labels=labels).logits  # [batch, target, vocab_size]
            losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
            for i, loss in zip(batch, losses.sum(dim=1).tolist(), strict=True):
                found[i] = (-loss, len(target_ids[i]))
    return found


def _check_positions(model: PreTrainedModel, lengths: Sequence[int]) -> None:
    """Refuses pairs that are longer than a table of positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or getattr(model.config, "position_encoding", None) == "sinusoidal":
        return
    for number, length in enumerate(lengths, start=1):
        if length > limit:
            raise ValueError(f"Pair {number} has {length} tokens, but the model has only {limit} positions.")
