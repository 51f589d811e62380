"""The measures of all tasks: names, formats, and how translations are scored; significance tests between systems."""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import regex

from .extras import extra

logger = logging.getLogger(__name__)

# One reference per sentence, or several.
References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measure:
    """
    A measure of a model. Those without a scorer are computed from predictions, by `training/tasks.py`.

    Attributes:
        name (`str`): its name in recipes, records and JSON.
        title (`str`): its name in messages, tables and cards.
        is_higher_better (`bool`): whether higher values are better.
        decimals (`int`): number of decimals that are shown.
        is_known_to_hub (`bool`): whether it is in the metadata `metrics` of a model card.
        scorer (`Callable`, *optional*): builds an object with the interface of sacreBLEU's metrics (`corpus_score`,
            `sentence_score`, `get_signature`) from `tokenize`, `lowercase` and `is_sentence`, which is true if
            sentences are scored one by one.
        needs_sources (`bool`): whether the scorer takes the source text, too, as `sources` or `source`.
        is_slow (`bool`): whether only the final test is scored with it, and no validation.
        task (`str`, *optional*): the only task whose texts are scored with it; such a measure has no signature.
    """

    name: str
    title: str
    is_higher_better: bool = True
    decimals: int = 4
    is_known_to_hub: bool = False
    scorer: Callable[[str, bool, bool], Any] | None = None
    needs_sources: bool = False
    is_slow: bool = False
    task: str | None = None

    def shown(self, value: float | None) -> str:
        """Returns a value as messages and tables show it."""
        return "not finite" if value is None or not math.isfinite(value) else f"{value:,.{self.decimals}f}"


# ---- Tokenizers --------------------------------------------------------------------------------------------------

# sacreBLEU's tokenizers of languages, by the first part of a language code. `zh` also splits Chinese other than
# Mandarin into characters.
TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "lzh", "wuu", "nan", "hak", "gan", "hsn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}
# Those that take what stands between spaces for words, and letters of scripts without spaces.
BY_SPACES = ("13a", "intl", "none")
UNSPACED = regex.compile(
    r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]&&\p{L}]", regex.V1
)
# Letters of a word in these scripts, on average.
MAX_WORD = 5


def tokenizer_of(tokenize: str, language: str | None) -> str:
    """
    Returns the name of sacreBLEU's tokenizer for text in a language.

    Args:
        tokenize (`str`): name of a tokenizer, which is returned as it is, or `auto` for that of the language: `zh`,
            `ja-mecab` or `ko-mecab` for Chinese, Japanese or Korean, and `13a` for any other.
        language (`str`, *optional*): code of the language, as in `zh`, `zh-TW`, `zho_Hans` or `cmn`; `None` if it is
            not known.
    """
    if tokenize != "auto":
        return tokenize
    return TOKENIZERS.get(re.split(r"[^a-z]", (language or "").lower())[0], "13a")


@cache
def _warn_of_spaces(tokenize: str) -> None:
    logger.warning(
        f"BLEU by the tokenizer {tokenize} takes a whole sentence for a word where text has no spaces between words, "
        "so an almost right translation has 0: choose zh for Chinese, ja-mecab for Japanese, or char "
        "(evaluation.tokenize, --tokenize)"
    )


def _has_spaces(references: References) -> bool:
    """Returns whether words are told apart by spaces, as far as scripts without spaces are concerned."""
    texts = [text for each in references for text in ([each] if isinstance(each, str) else each)]
    return sum(len(UNSPACED.findall(text)) for text in texts) <= MAX_WORD * sum(len(text.split()) for text in texts)


# ---- The measures ------------------------------------------------------------------------------------------------


def _bleu(tokenize: str, lowercase: bool, is_sentence: bool) -> Any:
    with extra("train"):
        from sacrebleu.metrics import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"sacreBLEU has no tokenizer {tokenize!r}; choose from {', '.join(sorted(BLEU.TOKENIZERS))}.")
    try:
        # A single sentence may have no 4-grams. `force` suppresses the warning about tokenized text, which test sets
        # of one sentence trigger easily.
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=is_sentence, force=True)
    # A missing package, a file that cannot be downloaded, or a dictionary of the user's own.
    except (RuntimeError, ImportError, OSError, AssertionError) as error:
        why, advice = " ".join(str(error).split()).rstrip("."), ""
        if found := re.search(r"pip install (\S+)$", why):
            why, advice = "a package is missing", f"pip install '{found[1]}', or "
        raise ValueError(
            f"sacreBLEU cannot use the tokenizer {tokenize!r}, because {why}: {advice}choose another one, such as "
            "char (--evaluation.tokenize char; with evaluate, --tokenize char)."
        ) from error


def _chrf(tokenize: str, lowercase: bool, is_sentence: bool) -> Any:
    with extra("train"):
        from sacrebleu.metrics import CHRF

    return CHRF(lowercase=lowercase)


def _ter(tokenize: str, lowercase: bool, is_sentence: bool) -> Any:
    with extra("train"):
        from sacrebleu.metrics import TER

    # Where the tokenizer of BLEU splits text without spaces, so does that of TER: Chinese into characters.
    is_unspaced = tokenize in ("zh", "ja-mecab")
    return TER(normalized=is_unspaced, asian_support=is_unspaced)


class _ExactMatch:
    """The share of texts that equal a reference, but for runs of white space and, if asked for, case."""

    def __init__(self, tokenize: str, lowercase: bool, is_sentence: bool) -> None:
        self.lowercase = lowercase

    def _words(self, text: str) -> list[str]:
        return (text.lower() if self.lowercase else text).split()

    def sentence_score(self, text: str, references: Sequence[str]) -> Any:
        return SimpleNamespace(score=float(self._words(text) in map(self._words, references)))

    def corpus_score(self, texts: Sequence[str], streams: Sequence[Sequence[str]]) -> Any:
        rows = zip(texts, zip(*streams, strict=True), strict=True)
        return SimpleNamespace(score=sum(self.sentence_score(*row).score for row in rows) / len(texts))


# In the order of tables. BLEU: Papineni et al., 2002; chrF2: Popović, 2016; TER, in edits per 100 words, which always
# ignores case: Snover et al., 2006.
_MEASURES = (
    Measure("loss", "loss", is_higher_better=False),
    Measure("perplexity", "perplexity", is_higher_better=False, decimals=2, is_known_to_hub=True),
    Measure("word_perplexity", "word perplexity", is_higher_better=False, decimals=2),
    Measure("byte_perplexity", "byte perplexity", is_higher_better=False, decimals=2),
    Measure("accuracy", "accuracy", is_known_to_hub=True),
    Measure("f1", "F1", is_known_to_hub=True),
    Measure("next_sentence_accuracy", "next sentence accuracy"),
    Measure("bleu", "BLEU", decimals=2, is_known_to_hub=True, scorer=_bleu),
    Measure("chrf", "chrF2", decimals=2, is_known_to_hub=True, scorer=_chrf),
    Measure("ter", "TER", False, decimals=2, is_known_to_hub=True, scorer=_ter, is_slow=True),
    Measure("exact_match", "exact match", is_known_to_hub=True, scorer=_ExactMatch, task="text_to_text"),
)
MEASURES = {measure.name: measure for measure in _MEASURES}
# Those that score translations, with a signature.
METRICS = {name: measure for name, measure in MEASURES.items() if measure.scorer and not measure.task}
# The metric by which two systems are compared.
COMPARED_BY = "bleu"
# The metrics of `evaluate` that this module has.
EVALUATE_METRICS = {"Bleu": "bleu", "ChrF": "chrf", "Ter": "ter"}


def measure_of(name: str) -> Measure:
    """Returns the measure of a name; of an unknown one, as another version may have written it, one with defaults."""
    return MEASURES.get(name) or Measure(name, name.replace("_", " "))


def scored_by(task: str, with_slow: bool = True) -> list[str]:
    """Returns the names of the measures that score the texts of a task."""
    found = (measure for measure in MEASURES.values() if measure.scorer and measure.task in (None, task))
    return [measure.name for measure in found if with_slow or not measure.is_slow]


def in_order(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """Sorts scores as tables have them, unknown measures last."""
    names = [*MEASURES, *scores]
    return {name: scores[name] for name in sorted(scores, key=names.index)}


# ---- Scoring -----------------------------------------------------------------------------------------------------


def score(
    hypotheses: Sequence[str],
    references: References,
    tokenize: str = "13a",
    lowercase: bool = False,
    metrics: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
) -> dict[str, Any]:
    """
    Scores a translated corpus, by default with BLEU, chrF and TER.

    Args:
        hypotheses (`Sequence[str]`): the translations.
        references (`Sequence[str]` or `Sequence[Sequence[str]]`): one reference per translation, or several, in the
            same order.
        tokenize (`str`): sacreBLEU's tokenizer for BLEU, see [`tokenizer_of`]. With `zh` and `ja-mecab`, TER splits
            Chinese and Japanese, too.
        lowercase (`bool`): whether BLEU and chrF ignore case. TER always does.
        metrics (`Sequence[str]`, *optional*): names of the measures, by default those of `METRICS`. TER takes a
            hundred times as long as the others.
        sources (`Sequence[str]`, *optional*): the source text, for measures that need it.

    Returns:
        `dict[str, Any]`: `bleu` and `chrf` (0 to 100, higher is better), `ter` (edits per 100 words, lower is better),
        and `signatures`, with sacreBLEU's signature of each metric.

    Raises:
        ValueError: the numbers of translations and references differ, the sentences have different numbers of
            references, or sacreBLEU has no such tokenizer.
    """
    _check_lengths({"translations": hypotheses}, references)
    frozen = tuple(each if isinstance(each, str) else tuple(each) for each in references)
    scores, signatures = {}, {}
    for name in metrics or METRICS:
        text = tuple(sources or ()) if MEASURES[name].needs_sources else None
        scores[name], signature = _corpus_score(name, tuple(hypotheses), frozen, text, tokenize, lowercase)
        if name in METRICS:
            signatures[name] = signature
    return scores | {"signatures": signatures}


# TER of long sentences takes longer than their translation, and the end of a training, which also compares its model
# with others, has several uses for the same scores.
@lru_cache(maxsize=24)
def _corpus_score(
    name: str,
    hypotheses: tuple[str, ...],
    references: tuple[str | tuple[str, ...], ...],
    sources: tuple[str, ...] | None,
    tokenize: str,
    lowercase: bool,
) -> tuple[float, str]:
    """Returns the score of a corpus by one measure, and the signature of that, if it has one."""
    scorer = _scorer(name, tokenize, lowercase)
    if name == COMPARED_BY and tokenize in BY_SPACES and not _has_spaces(references):
        _warn_of_spaces(tokenize)
    more = {} if sources is None else {"sources": sources}
    found = scorer.corpus_score(hypotheses, _reference_streams(references), **more).score
    return found, str(scorer.get_signature()) if name in METRICS else ""


def sentence_scores(
    hypotheses: Sequence[str],
    references: References,
    tokenize: str = "13a",
    lowercase: bool = False,
    sources: Sequence[str] | None = None,
) -> list[dict[str, float]]:
    """
    Scores each sentence separately. Takes the arguments of [`score`] but for `metrics`, and raises its errors.

    Returns:
        `list[dict[str, float]]`: `bleu` (with sacreBLEU's effective order), `chrf` and `ter` of each sentence.
    """
    _check_lengths({"translations": hypotheses}, references)
    scorers = {name: _scorer(name, tokenize, lowercase, is_sentence=True) for name in METRICS}
    found = []
    for i, row in enumerate(zip(hypotheses, zip(*_reference_streams(references), strict=True), strict=True)):
        more = {name: {"source": sources[i]} for name in METRICS if METRICS[name].needs_sources and sources}
        found.append(
            {name: scorer.sentence_score(*row, **more.get(name, {})).score for name, scorer in scorers.items()}
        )
    return found


def sentence_scorer(name: str, tokenize: str = "13a", lowercase: bool = False) -> Callable[[str, str], float]:
    """
    Returns a function of a translation and its reference, which returns the score that [`sentence_scores`] has.

    Args:
        name (`str`): a key of `METRICS`.
        tokenize (`str`), lowercase (`bool`): as in [`score`].
    """
    scorer = _scorer(name, tokenize, lowercase, is_sentence=True)
    return lambda hypothesis, reference: float(scorer.sentence_score(hypothesis, [reference]).score)


def _scorer(name: str, tokenize: str, lowercase: bool, is_sentence: bool = False) -> Any:
    scorer = MEASURES[name].scorer
    if scorer is None:
        raise ValueError(f"{MEASURES[name].title} is no score of a text.")
    return scorer(tokenize, lowercase, is_sentence)


def _reference_streams(references: References) -> list[list[str]]:
    """Transposes the references into sacreBLEU's order: the first reference of every sentence, then the second, ..."""
    rows = [[each] if isinstance(each, str) else list(each) for each in references]
    for number, row in enumerate(rows, start=1):
        if not row or len(row) != len(rows[0]):
            raise ValueError(
                f"All sentences need the same number of references, and at least one, but sentence 1 has "
                f"{len(rows[0])}, and sentence {number} has {len(row)}."
            )
    return [list(stream) for stream in zip(*rows, strict=True)]


def _check_lengths(systems: Mapping[str, Sequence[str]], references: References) -> None:
    for name, texts in systems.items():
        if len(texts) != len(references):
            raise ValueError(f"There are {len(texts)} {name}, but {len(references)} references.")
        if not texts:
            raise ValueError(f"There are no {name} to score.")


# ---- Comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """
    Two models on one test set.

    Attributes:
        before (`dict[str, float]`), after (`dict[str, float]`): `bleu`, `chrf` and `ter` of the earlier model, or of
            the one to compare with, and of this one.
        p (`float`): p-value of the difference in BLEU, by paired bootstrap.
        signature (`str`): sacreBLEU's signature of that test.
    """

    before: dict[str, float]
    after: dict[str, float]
    p: float
    signature: str


class EvaluatedSet(Protocol):
    """A test set with its name and references, and the language of these."""

    name: str
    target: list[str]
    target_language: str

    @property
    def plain(self) -> list[str]:
        """The source text."""


def compare_sets(
    sets: Sequence[EvaluatedSet],
    before: Mapping[str, Sequence[str]],
    after: Mapping[str, Sequence[str]],
    tokenize: str = "auto",
    lowercase: bool = False,
) -> dict[str, Comparison]:
    """
    Scores two models on test sets, and tests whether they differ in BLEU by more than chance.

    Args:
        sets (`Sequence`): test sets, with `name`, source text, `plain`, references, `target`, and `target_language`.
        before (`Mapping[str, Sequence[str]]`): translations of each set by the model to compare with.
        after (`Mapping[str, Sequence[str]]`): translations of each set by the model in question.
        tokenize (`str`), lowercase (`bool`): as in [`score`]; `auto` is the tokenizer of each set's language.

    Returns:
        `dict[str, Comparison]`: by the name of the set.

    Raises:
        ValueError: a set has another number of translations than of references.
    """
    found = {}
    for each in sets:
        texts = before[each.name], after[each.name]
        how = tokenizer_of(tokenize, each.target_language), lowercase
        p, signature = paired_bootstrap(*texts, each.target, *how)
        scores = [score(side, each.target, *how, sources=each.plain) for side in texts]
        sides = [{metric: scored[metric] for metric in METRICS} for scored in scores]
        found[each.name] = Comparison(sides[0], sides[1], p, signature)
    return found


def paired_bootstrap(
    baseline: Sequence[str],
    hypotheses: Sequence[str],
    references: References,
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 1000,
) -> tuple[float, str]:
    """
    Tests whether the BLEU of two systems differs by more than chance, with sacreBLEU's paired bootstrap (Koehn, 2004).
    The environment variable `SACREBLEU_SEED` (12345) is its seed.

    Args:
        baseline (`Sequence[str]`), hypotheses (`Sequence[str]`): translations of one text by either system.
        references, tokenize, lowercase: as in [`score`].
        samples (`int`): number of bootstrap samples.

    Returns:
        `float` and `str`: p-value of the difference, 1 between equal scores, and sacreBLEU's signature of the test.

    Raises:
        ValueError: as in [`score`].
    """
    with extra("train"):
        from sacrebleu.significance import PairedTest

    _check_lengths({"translations of the baseline": baseline, "translations": hypotheses}, references)
    systems = [("baseline", list(baseline)), ("system", list(hypotheses))]
    scorers = {COMPARED_BY: _scorer(COMPARED_BY, tokenize, lowercase)}
    signatures, results = PairedTest(systems, scorers, _reference_streams(references), "bs", samples)()
    (metric, signature), *_ = signatures.items()
    first, second = results[metric]
    # sacreBLEU counts no sample that differs as little as equal systems do, so their p-value would be the lowest.
    return 1.0 if first.score == second.score else float(second.p_value), str(signature)


# ---- Metrics of `evaluate` ---------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """Makes `Bleu`, `ChrF` and `Ter` when they are imported, because importing evaluate takes seconds."""
    if name not in EVALUATE_METRICS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _evaluate_metric(name, MEASURES[EVALUATE_METRICS[name]])


@cache
def _evaluate_metric(class_name: str, measure: Measure) -> Any:
    """
    Returns a metric as a class of `evaluate`: `Bleu(keep_in_memory=True).compute(predictions=..., references=...)`,
    with one reference or a list of references per sentence, and the settings `tokenize` and `lowercase`. Here, because
    `evaluate.load` would download it from the Hub.
    """
    with extra("train"):
        import evaluate
        from datasets import Features, Sequence, Value

    text = Value("string")

    class SacreMetric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(
                description=f"Corpus-level {measure.title} by sacreBLEU, with its signature.",
                citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
                features=[Features({"predictions": text, "references": kind}) for kind in (text, Sequence(text))],
            )

        def _compute(self, predictions: list[str], references: Any, **settings: Any) -> dict[str, Any]:
            scored = score(predictions, references, metrics=[measure.name], **settings)
            return {measure.name: scored[measure.name], "signature": scored["signatures"][measure.name]}

    SacreMetric.__name__ = SacreMetric.__qualname__ = class_name
    return SacreMetric
