"""Translates a corpus, and scores it: BLEU by sacreBLEU, through the interface of `evaluate`, with its signature."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def score(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """
    Scores a translated corpus.

    Args:
        hypotheses (`Sequence[str]`): translations.
        references (`Sequence[str]`): the right ones, in the same order.
        tokenize (`str`): sacreBLEU's tokenizer.
        lowercase (`bool`): whether case is ignored.

    Returns:
        `dict[str, Any]`: `bleu` (0 to 100) and `signature`.

    Raises:
        ValueError: the two have different lengths, or an unknown tokenizer.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"There are {len(hypotheses)} translations for {len(references)} references.")
    # Imported here, because translating does without it, and without what it needs.
    from .metric import SacreBleu

    try:
        scored: dict[str, Any] = SacreBleu(keep_in_memory=True).compute(
            predictions=list(hypotheses), references=list(references), tokenize=tokenize, lowercase=lowercase
        )
    # What sacreBLEU raises where a language's own tokenizer is not installed.
    except RuntimeError as error:
        raise ValueError(f"sacreBLEU cannot use the tokenizer {tokenize!r}: {error}") from error
    return scored


@torch.inference_mode()
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
    """
    # A tokenizer does not take an empty list.
    ids = tokenizer(list(sentences))["input_ids"] if sentences else []
    order = sorted((i for i, text in enumerate(sentences) if text.strip()), key=lambda i: len(ids[i]), reverse=True)
    translations = [""] * len(sentences)
    was_training = model.training
    model.eval()
    with tqdm(total=len(order), desc="Translating", unit=" sentences", leave=False, disable=not progress) as bar:
        while order:
            rows = max(1, tokens_per_batch // len(ids[order[0]]))
            batch, order = order[:rows], order[rows:]
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            outputs = model.generate(**inputs, **generate_kwargs)
            for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
                translations[i] = text
            bar.update(len(batch))
    model.train(was_training)
    return translations
