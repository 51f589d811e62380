"""A model to compare with: any encoder-decoder model, translating with its own tokenizer and search settings."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..data.tokenizer import has_tag, is_tag
from ..model.sentences_vaswani import LanguageTags
from .lines import LineTranslator
from .loading import load_translator


class Baseline:
    """
    A model to compare with.

    Args:
        name (`str` or `Path`): model folder, or id of a repository on the Hub.
        device (`torch.device`): where it translates.

    Raises:
        ValueError: the model cannot be loaded, or cannot translate.
    """

    def __init__(self, name: str | Path, device: torch.device | str) -> None:
        model, tokenizer = load_translator(name)
        settings = model.generation_config
        if (settings.num_beams or 1) == 1:
            # They have no effect on greedy search, and transformers would warn about each.
            settings.length_penalty = settings.early_stopping = None
        self.translator = LineTranslator([model.to(device)], tokenizer)

    def tagged(self, sentences: Sequence[str], target_language: str, prefix: str | None = None) -> list[str]:
        """
        Puts in front of sentences what the model has learned to read there: its tag of the target language, if it has
        one, unless they have a tag; and their prefix, unless it is a tag that the vocabulary lacks.
        """
        tags = LanguageTags(self.translator.tokenizer)
        tag = tags.by_language.get(target_language)
        if prefix is not None and is_tag(prefix) and not has_tag(self.translator.tokenizer, prefix):
            prefix = None

        def fronted(text: str) -> str:
            fronts = (None if tags.split(text)[0] else tag, prefix)
            return " ".join(part for part in (*fronts, text) if part is not None)

        return [fronted(text) if text.strip() else text for text in sentences]

    def __call__(self, sentences: list[str]) -> list[str]:
        """Translates sentences; those that are longer than the model accepts are translated in pieces."""
        return [" ".join(best[0][1].splitlines()) for best in self.translator(sentences)]
