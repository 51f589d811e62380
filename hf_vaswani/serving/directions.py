"""Which languages a server translates, by which of its models, and in which language a text is."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypedDict

from ..extras import extra
from ..model.pipeline_vaswani import VaswaniTranslationPipeline

with extra("serve"):
    from babel import Locale, UnknownLocaleError
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

AUTO = "auto"


class LanguageError(ValueError):
    """A language, or a pair of them, that no model translates."""


class Guess(TypedDict):
    """The language of a text, by its code, and the probability in percent."""

    language: str
    confidence: float


class Directions:
    """
    The pairs of languages that models translate. The first model with a pair has it.

    Args:
        pipelines (`Mapping[str, VaswaniTranslationPipeline]`): the models, by their names.
        directions (`Sequence[tuple[str, str]]`): pairs of source and target language of a model whose config names
            none.

    Attributes:
        pairs (`dict[tuple[str, str], str]`): the name of the model of each pair.
        sources (`list[str]`), targets (`list[str]`): the languages.

    Raises:
        ValueError: it is unknown which languages a model translates.
    """

    def __init__(
        self, pipelines: Mapping[str, VaswaniTranslationPipeline], directions: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.pairs: dict[tuple[str, str], str] = {}
        nameless = []
        for name, pipeline in pipelines.items():
            pairs = getattr(pipeline.model.config, "language_pairs", None)
            if not pairs:
                nameless.append(name)
                pairs = directions
            for source, target in pairs:
                self.pairs.setdefault((source, target), name)
        if nameless and not directions:
            raise ValueError(
                f"The config of {nameless[0]} names no languages: say what it translates, as in --direction en-de."
            )
        if len(nameless) > 1:
            raise ValueError(
                f"The configs of {nameless[0]} and {nameless[1]} name no languages: --direction serves one such model."
            )
        if directions and not nameless:
            raise ValueError("--direction is for a model whose config names no languages, but all of them do.")
        self.sources = list(dict.fromkeys(source for source, _ in self.pairs))
        self.targets = list(dict.fromkeys(target for _, target in self.pairs))
        # Text is recognised among all languages; only those that are served are translated.
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def languages(self) -> list[dict[str, Any]]:
        """Returns each source language with its code, English name and target languages."""
        return [
            {
                "code": source,
                "name": language_name(source),
                "targets": [target for first, target in self.pairs if first == source],
            }
            for source in self.sources
        ]

    def find(self, source: str, target: str) -> tuple[str, str, str]:
        """
        Finds the model of a pair of languages; `en-US` is `en` where that alone is served.

        Returns:
            Name of the model, source and target language, each as the model names it.

        Raises:
            LanguageError: no model translates it.
        """
        found_source = _served(source, self.sources)
        found_target = _served(target, self.targets)
        if found_source is None or found_target is None or (found_source, found_target) not in self.pairs:
            known = ", ".join("-".join(pair) for pair in self.pairs)
            raise LanguageError(f"{source[:20]}-{target[:20]} is not translated here, only {known}.")
        return self.pairs[found_source, found_target], found_source, found_target

    def detect(self, text: str) -> Guess | None:
        """Recognises the language of a text; returns `None` for a text without a letter."""
        if not any(letter.isalpha() for letter in text):
            return None
        language, probability = self._identifier.rank(text)[0]
        return _guess(language, probability)

    def source_of(self, texts: Sequence[str], target: str) -> Guess:
        """
        Recognises which of the languages that are translated into `target` texts have.

        Raises:
            LanguageError: nothing is translated into this language.
        """
        found_target = _served(target, self.targets)
        sources = [source for source, other in self.pairs if other == found_target]
        if not sources:
            raise LanguageError(f"Nothing is translated into {target[:20]} here, only into {', '.join(self.targets)}.")
        ranks = dict(self._identifier.rank("\n".join(texts)))
        # Their variants, such as pt-BR, are not told apart.
        best = max(sources, key=lambda source: ranks.get(_primary(source), 0.0))
        return _guess(best, ranks.get(_primary(best), 0.0))

    def resolve(self, texts: Sequence[str], source: str, target: str) -> tuple[tuple[str, str, str], Guess | None]:
        """
        Finds the model of a request, as [`~Directions.find`], and the language of its texts if the source is `auto`.

        Raises:
            LanguageError: no model translates it.
        """
        guess = self.source_of(texts, target) if source.lower() == AUTO else None
        return self.find(source if guess is None else guess["language"], target), guess


@cache
def language_name(code: str) -> str:
    """Returns the English name of a language, or its code where it has none."""
    try:
        return Locale.parse(code.replace("-", "_")).get_display_name("en") or code
    except (ValueError, TypeError, UnknownLocaleError):
        return code


def _guess(language: str, probability: float) -> Guess:
    return {"language": language, "confidence": round(100 * float(probability), 1)}


def _primary(code: str) -> str:
    return code.replace("_", "-").split("-")[0].lower()


def _served(code: str, codes: Sequence[str]) -> str | None:
    """Returns which of the codes is meant."""
    by_key = {known.replace("_", "-").lower(): known for known in codes}
    return by_key.get(code.replace("_", "-").lower()) or by_key.get(_primary(code))
