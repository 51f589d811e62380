"""Translation of a corpus in batches, and log-probabilities of given translations."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..model.sentences_vaswani import LanguageTags, evaluation_mode, kept, length_groups, visible
from .budgets import in_memory, most_positions, tokens_on, vocab_size


def translate_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    tokens_per_batch: int | None = None,
    progress: bool = False,
    **generate_kwargs: Any,
) -> list[str]:
    """
    Translates sentences in batches of similar length.

    Args:
        model ([`PreTrainedModel`]): the model, used in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        sentences (`Sequence[str]`): source sentences. One without words is its own translation.
        tokens_per_batch (`int`, *optional*): maximum of rows times longest source; by default that of the device.
        progress (`bool`): whether to show a progress bar.
        **generate_kwargs: arguments of `generate()`, which override the generation config of the model.

    Returns:
        `list[str]`: translations in the order of `sentences`.

    Raises:
        ValueError: a sentence has an unpaired UTF-16 surrogate.
    """
    # The generation config may ask for several translations, or for scores.
    settings = {"num_return_sequences": 1, "return_dict_in_generate": False} | generate_kwargs
    translations, chosen, ids = to_translate(tokenizer, sentences)
    with closing(_generate(model, tokenizer, chosen, ids, tokens_per_batch, progress, **settings)) as batches:
        for batch, outputs in batches:
            for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
                translations[i] = text
    return translations


def translate_n_best(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    n: int,
    tokens_per_batch: int | None = None,
    **generate_kwargs: Any,
) -> list[list[tuple[float, str]]]:
    """
    Translates each sentence into an n-best list by beam search.

    Args:
        model, tokenizer, sentences, tokens_per_batch, generate_kwargs: as in [`translate_corpus`].
        n (`int`): size of the list, at most the beam size.

    Returns:
        `list[list[tuple[float, str]]]`: for each sentence the scores (as in `sequences_scores`) and translations, best
        first. Those of a sentence without words are the sentence, with score 0.

    Raises:
        ValueError: a sentence has an unpaired UTF-16 surrogate, or the search has a single beam and thus no scores.
    """
    kept, chosen, ids = to_translate(tokenizer, sentences)
    found = [[(0.0, text)] * n for text in kept]
    settings = {"num_return_sequences": n, "return_dict_in_generate": True, "output_scores": True} | generate_kwargs
    if isinstance(model, VaswaniForConditionalGeneration):
        # These models return sequence scores without the scores of every step.
        settings["output_scores"] = False
    with closing(_generate(model, tokenizer, chosen, ids, tokens_per_batch, **settings)) as batches:
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
    chosen: Sequence[int],
    ids: Sequence[list[int]],
    tokens_per_batch: int | None,
    progress: bool = False,
    **generate_kwargs: Any,
) -> Generator[tuple[list[int], Any], None, None]:
    """Yields the indices of a batch of these sentences, of similar length, and the output of `generate()`."""
    most = tokens_per_batch or tokens_on(model.device)
    settings = generate_kwargs.get("generation_config") or model.generation_config
    beams = generate_kwargs.get("num_beams") or settings.num_beams or 1
    copies = max(beams, generate_kwargs["num_return_sequences"]) * (1 + len(generate_kwargs.get("ensemble") or ()))
    rows = most_positions(model.device, copies * vocab_size(model))
    groups = length_groups([len(ids[i]) for i in chosen], most, most, rows)

    def translate(batch: list[int]) -> Any:
        inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        return model.generate(**inputs, **generate_kwargs)

    bar = tqdm(total=len(chosen), desc="Translating", unit=" sentences", leave=False, disable=not progress)
    with bar, evaluation_mode(model):
        batches = [[chosen[place] for place in group] for group in groups]
        for batch, outputs in in_memory(model, batches, list(map(len, ids)), translate):
            yield batch, outputs
            bar.update(len(batch))


def to_translate(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]
) -> tuple[list[str], list[int], list[list[int]]]:
    """
    Finds the sentences that have words, and encodes all.

    Returns:
        `list[str]`: the translations of the sentences without words; nothing for the others.
        `list[int]`, `list[list[int]]`: the indices of the others, and the ids of all sentences.

    Raises:
        ValueError: a sentence has an unpaired UTF-16 surrogate.
    """
    tags = LanguageTags(tokenizer)
    found = [kept(tags.split(sentence)[1]) for sentence in sentences]
    chosen = [i for i, text in enumerate(found) if text is None]
    return [text or "" for text in found], chosen, _encode(tokenizer, list(map(visible, sentences)))


def _encode(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], side: str = "text") -> list[list[int]]:
    """Encodes sentences; raises a `ValueError` for an unpaired UTF-16 surrogate."""
    for number, text in enumerate(sentences, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Sentence {number} has an unpaired UTF-16 surrogate ({text[error.start]!r}): remove it."
            ) from error
    # A tokenizer does not accept an empty list.
    ids: list[list[int]] = tokenizer(**{side: list(sentences)}, verbose=False)["input_ids"] if sentences else []
    return ids


@torch.inference_mode()
def log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    tokens_per_batch: int | None = None,
) -> list[tuple[float, int]]:
    """
    Computes log P(target | source) of given translations: the score of beam search without length penalty.

    Args:
        model ([`PreTrainedModel`]): the model, used in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        sources (`Sequence[str]`): source sentences.
        targets (`Sequence[str]`): their translations.
        tokens_per_batch (`int`, *optional*): maximum of rows times longest source or target; by default that of the
            device.

    Returns:
        `list[tuple[float, int]]`: the log-probability of each translation in nats, and its number of tokens, `</s>`
        included.

    Raises:
        ValueError: `sources` and `targets` have different lengths, or a text has an unpaired UTF-16 surrogate or more
            tokens than the model has positions.
    """
    if len(sources) != len(targets):
        raise ValueError(f"There are {len(targets)} translations for {len(sources)} sentences.")
    source_ids, target_ids = _encode(tokenizer, sources), _encode(tokenizer, targets, "text_target")
    lengths = [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
    _check_positions(model, lengths)
    found = [(0.0, 0)] * len(lengths)
    most = tokens_per_batch or tokens_on(model.device)
    most = min(most, most_positions(model.device, vocab_size(model)) or most)

    def compute(batch: list[int]) -> list[float]:
        inputs = tokenizer.pad({"input_ids": [source_ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        padded = tokenizer.pad({"input_ids": [target_ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        logits = model(**inputs, labels=labels).logits  # [batch, target, vocab_size]
        losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        return losses.sum(dim=1).tolist()

    with evaluation_mode(model):
        for batch, losses in in_memory(model, length_groups(lengths, most, most), lengths, compute):
            for i, loss in zip(batch, losses, strict=True):
                found[i] = (-loss, len(target_ids[i]))
    return found


def _check_positions(model: PreTrainedModel, lengths: Sequence[int]) -> None:
    """Raises a `ValueError` for a pair that is longer than the table of positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or getattr(model.config, "position_encoding", None) == "sinusoidal":
        return
    for number, length in enumerate(lengths, start=1):
        if length > limit:
            raise ValueError(f"Pair {number} has {length} tokens, but the model has only {limit} positions.")
