"""BLEU, chrF and TER by sacreBLEU, as metrics of `evaluate`, and significance tests between systems."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .extras import extra

with extra("train"):
    import datasets
    import evaluate
    from sacrebleu.metrics import BLEU, CHRF, TER
    from sacrebleu.metrics.base import Metric
    from sacrebleu.significance import PairedTest

# One reference per sentence, or several.
References = Sequence[str] | Sequence[Sequence[str]]

# Keys of a result, and the names that tables and model cards show.
METRICS = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}

TEXT = datasets.Value("string")


def exact_match(predictions: Sequence[str], references: Sequence[str], lowercase: bool = False) -> float:
    """Returns the share of texts that equal their reference, but for runs of white space and, if asked for, case."""
    if lowercase:
        predictions, references = ([text.lower() for text in texts] for texts in (predictions, references))
    pairs = zip(predictions, references, strict=True)
    return sum(ours.split() == theirs.split() for ours, theirs in pairs) / len(predictions)


# ---- Metrics of `evaluate` ---------------------------------------------------------------------------------------
# They are defined here, because `evaluate.load` would download them from the Hub.


class SacreMetric(evaluate.Metric):
    """
    Base class of the metrics: `Bleu(keep_in_memory=True).compute(predictions=..., references=...)`, with one reference
    or a list of references per sentence.
    """

    key: str
    # Builds sacreBLEU's metric from the keyword arguments of `compute`.
    metric: Callable[..., Metric]

    def _info(self) -> evaluate.MetricInfo:
        kinds = (TEXT, datasets.Sequence(TEXT))
        return evaluate.MetricInfo(
            description=f"Corpus-level {self.key} by sacreBLEU, with the signature that makes it comparable.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
            features=[datasets.Features({"predictions": TEXT, "references": kind}) for kind in kinds],
        )

    def _compute(
        self, predictions: list[str], references: list[str] | list[list[str]], **settings: Any
    ) -> dict[str, Any]:
        metric = self.metric(**settings)
        scored = metric.corpus_score(predictions, _reference_streams(references))
        return {self.key: scored.score, "signature": str(metric.get_signature())}


class Bleu(SacreMetric):
    """BLEU (Papineni et al., 2002), from 0 to 100. `tokenize` is sacreBLEU's tokenizer; `lowercase` ignores case."""

    key = "bleu"

    def metric(self, tokenize: str = "13a", lowercase: bool = False, effective_order: bool = False) -> Metric:
        """Builds sacreBLEU's metric; `effective_order` is for single sentences, which may have no 4-grams."""
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(
                f"sacreBLEU has no tokenizer {tokenize!r}; choose from {', '.join(sorted(BLEU.TOKENIZERS))}."
            )
        try:
            # `force` suppresses the warning about tokenized text, which test sets of one sentence trigger easily.
            return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True)
        # Raised if the package that a language's tokenizer needs is not installed.
        except RuntimeError as error:
            raise ValueError(f"sacreBLEU cannot use the tokenizer {tokenize!r}: {error}") from error


class ChrF(SacreMetric):
    """chrF2, the character n-gram F-score (Popović, 2016), from 0 to 100. `lowercase` ignores case."""

    key = "chrf"

    def metric(self, lowercase: bool = False) -> Metric:
        """Builds sacreBLEU's metric with the defaults of its command line."""
        return CHRF(lowercase=lowercase)


class Ter(SacreMetric):
    """TER (Snover et al., 2006): edits per 100 words of the reference, lower is better. It always ignores case."""

    key = "ter"

    def metric(self) -> Metric:
        """Builds sacreBLEU's metric with the defaults of its command line."""
        return TER()


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


# ---- Scoring -----------------------------------------------------------------------------------------------------


def score(
    hypotheses: Sequence[str],
    references: References,
    tokenize: str = "13a",
    lowercase: bool = False,
    with_ter: bool = True,
) -> dict[str, Any]:
    """
    Scores a translated corpus with BLEU, chrF and TER.

    Args:
        hypotheses (`Sequence[str]`): the translations.
        references (`Sequence[str]` or `Sequence[Sequence[str]]`): one reference per translation, or several, in the
            same order.
        tokenize (`str`): sacreBLEU's tokenizer for BLEU.
        lowercase (`bool`): whether BLEU and chrF ignore case. TER always does.
        with_ter (`bool`): whether TER is computed, which takes a hundred times as long as the others.

    Returns:
        `dict[str, Any]`: `bleu` and `chrf` (0 to 100, higher is better), `ter` (edits per 100 words, lower is better),
        and `signatures`, with sacreBLEU's signature of each metric.

    Raises:
        ValueError: the numbers of translations and references differ, the sentences have different numbers of
            references, or sacreBLEU has no such tokenizer.
    """
    _check_lengths({"translations": hypotheses}, references)
    frozen = tuple(each if isinstance(each, str) else tuple(each) for each in references)
    scores, signatures = _scores(tuple(hypotheses), frozen, tokenize, lowercase, with_ter)
    return scores | {"signatures": dict(signatures)}


# TER of long sentences takes longer than their translation, and the end of a training, which also compares its model
# with others, has several uses for the same scores.
@lru_cache(maxsize=8)
def _scores(
    hypotheses: tuple[str, ...],
    references: tuple[str | tuple[str, ...], ...],
    tokenize: str,
    lowercase: bool,
    with_ter: bool,
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the scores and the signatures of [`score`] by metric."""
    scores, signatures = {}, {}
    for metric, settings in _metrics(tokenize, lowercase):
        if metric.key == "ter" and not with_ter:
            continue
        result = metric.compute(predictions=list(hypotheses), references=list(references), **settings)
        scores[metric.key], signatures[metric.key] = result[metric.key], result["signature"]
    return scores, signatures


def sentence_scores(
    hypotheses: Sequence[str], references: References, tokenize: str = "13a", lowercase: bool = False
) -> list[dict[str, float]]:
    """
    Scores each sentence separately. Takes the arguments of [`score`], and raises its errors.

    Returns:
        `list[dict[str, float]]`: `bleu` (with sacreBLEU's effective order), `chrf` and `ter` of each sentence.
    """
    _check_lengths({"translations": hypotheses}, references)
    metrics = _sentence_metrics(tokenize, lowercase)
    rows = zip(hypotheses, zip(*_reference_streams(references), strict=True), strict=True)
    return [{key: metric.sentence_score(text, right).score for key, metric in metrics} for text, right in rows]


def sentence_scorer(key: str, tokenize: str = "13a", lowercase: bool = False) -> Callable[[str, str], float]:
    """
    Returns a function of a translation and its reference, which returns the score that [`sentence_scores`] has.

    Args:
        key (`str`): a key of `METRICS`.
        tokenize (`str`), lowercase (`bool`): as in [`score`].
    """
    (scorer,) = [each for name, each in _sentence_metrics(tokenize, lowercase) if name == key]
    return lambda hypothesis, reference: float(scorer.sentence_score(hypothesis, [reference]).score)


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
    _check_lengths({"translations of the baseline": baseline, "translations": hypotheses}, references)
    bleu, settings = _metrics(tokenize, lowercase)[0]
    systems = [("baseline", list(baseline)), ("system", list(hypotheses))]
    test = PairedTest(systems, {bleu.key: bleu.metric(**settings)}, _reference_streams(references), "bs", samples)
    signatures, results = test()
    (metric, signature), *_ = signatures.items()
    first, second = results[metric]
    # sacreBLEU counts no sample that differs as little as equal systems do, so their p-value would be the lowest.
    return 1.0 if first.score == second.score else float(second.p_value), str(signature)


def _metrics(tokenize: str, lowercase: bool) -> list[tuple[Any, dict[str, Any]]]:
    """The metrics, each with its settings."""
    return [
        (Bleu(keep_in_memory=True), {"tokenize": tokenize, "lowercase": lowercase}),
        (ChrF(keep_in_memory=True), {"lowercase": lowercase}),
        (Ter(keep_in_memory=True), {}),
    ]


def _sentence_metrics(tokenize: str, lowercase: bool) -> list[tuple[str, Metric]]:
    """The metrics of sacreBLEU for single sentences, each with its key."""
    return [
        (metric.key, metric.metric(**settings, **({"effective_order": True} if metric.key == "bleu" else {})))
        for metric, settings in _metrics(tokenize, lowercase)
    ]


def _check_lengths(systems: Mapping[str, Sequence[str]], references: References) -> None:
    for name, texts in systems.items():
        if len(texts) != len(references):
            raise ValueError(f"There are {len(texts)} {name}, but {len(references)} references.")
        if not texts:
            raise ValueError(f"There are no {name} to score.")
