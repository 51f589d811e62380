"""Which languages a server translates, by which of its models, and in which language a text is."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypedDict

from ..extras import extra
from ..model.pipeline_vaswani import VaswaniTranslationPipeline
from ..model.sentences_vaswani import has_words

with extra("serve"):
    from babel import Locale, UnknownLocaleError
    from babel.core import get_global, parse_locale
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

AUTO = "auto"
# LibreTranslate's own codes, which its programs send.
NICKNAMES = {"pb": "pt-BR", "zt": "zh-Hant"}
# CLDR knows Norwegian by both.
SYNONYMS = {"no": "nb"}
# A text has a language for sure if no other one is more than a fourth as probable.
MIN_RATIO = 4
# A text is in the target language only if this is at least as probable.
MIN_PROBABILITY = 0.01
# Most characters of a text that its language is recognised by, and of a code.
MAX_RECOGNISED, MAX_CODE = 1000, 35
# Most pairs of languages that an error names.
MAX_NAMED = 50


class LanguageError(ValueError):
    """A language, or a pair of them, that no model translates."""


class Guess(TypedDict):
    """The language of a text, by its code, and the probability in percent."""

    language: str
    confidence: float


class Direction(NamedTuple):
    """A model, by its name, and what it calls its source and target language."""

    model: str
    source: str
    target: str


class Directions:
    """
    The pairs of languages that models translate. The first model with a pair has it. Codes are listed in the form of
    BCP 47, such as `pt-BR`, however a model writes them.

    Args:
        pipelines (`Mapping[str, VaswaniTranslationPipeline]`): the models, by their names.
        directions (`Sequence[tuple[str, str]]`): pairs of source and target language of a model whose config names
            none.

    Attributes:
        pairs (`dict[tuple[str, str], Direction]`): who translates each pair of listed codes.
        sources (`list[str]`), targets (`list[str]`), codes (`list[str]`): the languages on either side, and all.

    Raises:
        ValueError: it is unknown which languages a model translates.
    """

    def __init__(
        self, pipelines: Mapping[str, VaswaniTranslationPipeline], directions: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.pairs: dict[tuple[str, str], Direction] = {}
        nameless = []
        for name, pipeline in pipelines.items():
            pairs = getattr(pipeline.model.config, "language_pairs", None)
            if not pairs:
                nameless.append(name)
                pairs = directions
            for source, target in pairs:
                self.pairs.setdefault((listed(source), listed(target)), Direction(name, source, target))
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
        self.codes = list(dict.fromkeys([*self.sources, *self.targets]))
        # Text is recognised among all languages; only those that are served are translated.
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._languages = {label: _meaning(label)[0] for label, _ in self._identifier.rank("")}

    def languages(self) -> list[dict[str, Any]]:
        """
        Returns each language with its code, English name and target languages. The last of these is the language
        itself, whose text is given back.
        """
        targets: dict[str, list[str]] = {code: [] for code in self.codes}
        for source, target in self.pairs:
            if source != target:
                targets[source].append(target)
        return [{"code": code, "name": language_name(code), "targets": [*targets[code], code]} for code in self.codes]

    def find(self, source: str, target: str) -> Direction | None:
        """
        Finds who translates a pair of languages, each by its code or one that means the same: `en-US` is `en` where
        that alone is served, and `zh` is `zh-Hans`.

        Returns:
            [`Direction`], or `None` if both are the same language, whose text is given back.

        Raises:
            LanguageError: no model translates it.
        """
        known = nearest(source, self.sources)
        goal = nearest(target, [to for first, to in self.pairs if first == known])
        if known is not None and goal is not None:
            return self.pairs[known, goal]
        if (same := nearest(source, self.codes)) is not None and same == nearest(target, self.codes):
            return None
        pairs = ["-".join(pair) for pair in self.pairs]
        others = f" and {len(pairs) - MAX_NAMED} others" if len(pairs) > MAX_NAMED else ""
        raise LanguageError(
            f"{source[:20]}-{target[:20]} is not translated here, only {', '.join(pairs[:MAX_NAMED])}{others}."
        )

    def detect(self, text: str) -> Guess:
        """Recognises the language of a text: one that is served, unless another one is more probable than not."""
        probabilities = self._probabilities(text)
        if not probabilities:
            return UNKNOWN
        best = max(probabilities, key=lambda language: probabilities[language])
        if probabilities[best] < 0.5:
            served = [_meaning(code)[0] for code in self.codes]
            best = max(served, key=lambda language: probabilities[language])
        return _guess(nearest(best, self.codes) or best, probabilities[best])

    def recognise(self, texts: Sequence[str], target: str) -> list[Guess]:
        """
        Recognises which language each text has: one of those that are translated into `target`, or that itself. A
        text that is too short for this has the language of all of them.

        Raises:
            LanguageError: nothing is translated into this language.
        """
        goal = nearest(target, self.targets)
        sources = [source for source, to in self.pairs if to == goal and source != goal]
        if goal is None or not sources:
            raise LanguageError(f"Nothing is translated into {target[:20]} here, only into {', '.join(self.targets)}.")
        whole, _ = self._recognise("\n".join(text[:MAX_RECOGNISED] for text in texts), sources, goal)
        each = [self._recognise(text[:MAX_RECOGNISED], sources, goal) for text in texts]
        return [guess if is_sure else whole for guess, is_sure in each]

    def _recognise(self, text: str, sources: Sequence[str], target: str) -> tuple[Guess, bool]:
        """Returns the language of a text, and whether that is sure."""
        probabilities = self._probabilities(text)
        if not probabilities:
            return UNKNOWN, False
        # Variants, such as pt-BR, are not told apart: the first one has the text.
        ranks = {code: probabilities[_meaning(code)[0]] for code in sources}
        best = max(sources, key=lambda source: ranks[source])
        own = probabilities[_meaning(target)[0]]
        if own >= MIN_PROBABILITY and own > MIN_RATIO * ranks[best]:
            return _guess(target, own), True
        others = [own, *(rank for code, rank in ranks.items() if _meaning(code)[0] != _meaning(best)[0])]
        return _guess(best, ranks[best]), ranks[best] > MIN_RATIO * max(others)

    def _probabilities(self, text: str) -> defaultdict[str, float]:
        """Returns the probability of each language that a text may be in; none for a text without words."""
        found: defaultdict[str, float] = defaultdict(float)
        if has_words(text):
            for label, probability in self._identifier.rank(text):
                found[self._languages[label]] += float(probability)
        return found

    def resolve(
        self, texts: Sequence[str], source: str, target: str
    ) -> tuple[list[Direction | None], list[Guess] | None]:
        """
        Finds who translates each text of a request, as [`~Directions.find`], and the languages of the texts if the
        source is `auto`. A text whose language cannot be known is given back.

        Raises:
            LanguageError: no model translates it.
        """
        if source.lower() != AUTO:
            return [self.find(source, target)] * len(texts), None
        guesses = self.recognise(texts, target)
        languages = {guess["language"] for guess in guesses if guess is not UNKNOWN}
        found = {language: self.find(language, target) for language in languages}
        return [None if guess is UNKNOWN else found[guess["language"]] for guess in guesses], guesses


@cache
def language_name(code: str) -> str:
    """Returns the English name of a language, or its code where it has none."""
    try:
        return Locale.parse(code.replace("-", "_")).get_display_name("en") or code
    except (ValueError, TypeError, UnknownLocaleError):
        return code


def listed(code: str) -> str:
    """Returns a code in the form of BCP 47: `pt-BR` for `pt_br` and LibreTranslate's `pb`, `de` for `deu`."""
    language, *others = NICKNAMES.get(code.lower(), code).replace("_", "-").split("-")
    language = language.lower()
    short = get_global("language_aliases").get(language, "")
    forms = {2: str.upper, 4: str.title}
    return "-".join([short if len(short) == 2 else language, *(forms.get(len(each), str)(each) for each in others)])


def nearest(code: str, codes: Collection[str]) -> str | None:
    """
    Returns which of the listed codes is meant: the same one, the one with the same likely script and region, one that
    names no region or only the language, or, for a code that only names the language, any of its variants.
    """
    known, wanted = listed(code[:MAX_CODE]), _meaning(code[:MAX_CODE])
    variants = [each for each in codes if _meaning(each)[0] == wanted[0]]
    tests: list[list[str]] = [
        [each for each in variants if each == known],
        [each for each in variants if _meaning(each) == wanted],
        [each for each in variants if _meaning(each)[:2] == wanted[:2] and len(each.split("-")[-1]) != 2],
        [each for each in variants if "-" not in each],
        variants if "-" not in known else [],
    ]
    return next((found[0] for found in tests if found), None)


@lru_cache(1000)
def _meaning(code: str) -> tuple[str, str, str]:
    """Returns language, script and region of a code, likely ones where it names none."""
    try:
        language, region, script, *_ = parse_locale(listed(code), sep="-")
    except ValueError:
        return code.lower(), "", ""
    alias, _, likely_script = get_global("language_aliases").get(language, language).partition("_")
    return _maximized(SYNONYMS.get(alias, alias), script or likely_script, region or "")


def _maximized(language: str, script: str, region: str) -> tuple[str, str, str]:
    """Adds the likely script and region to what a code says, as CLDR does."""
    likely: Mapping[str, str] = get_global("likely_subtags")
    for parts in ((language, script, region), (language, region), (language, script), (language,)):
        if all(parts) and (found := likely.get("_".join(parts))) is not None:
            _, likely_region, likely_script, *_ = parse_locale(found)
            return language, script or likely_script or "", region or likely_region or ""
    return language, script, region


def _guess(language: str, probability: float) -> Guess:
    return {"language": language, "confidence": round(100 * float(probability), 1)}


# LibreTranslate's answer where the language cannot be known.
UNKNOWN = _guess("en", 0.0)
