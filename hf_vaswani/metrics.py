"""How good translations are, by sacreBLEU through `evaluate`: BLEU, chrF, TER, and which of two systems is better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# One reference a sentence, or several.
References = Sequence[str] | Sequence[Sequence[str]]

# By what a result calls them, as people write them.
METRICS = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}


def score(
    hypotheses: Sequence[str], references: References, tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """
    Scores a translated corpus.

    Args:
        hypotheses (`Sequence[str]`): translations.
        references (`Sequence[str]` or `Sequence[Sequence[str]]`): the right ones, in the same order; of each sentence
            one, or several.
        tokenize (`str`): sacreBLEU's tokenizer, for BLEU.
        lowercase (`bool`): whether BLEU and chrF ignore case. TER always does.

    Returns:
        `dict[str, Any]`: `bleu` and `chrf` (0 to 100), `ter` (edits for 100 words, less is better), and `signatures`,
        which has sacreBLEU's for each.

    Raises:
        ValueError: the two have different lengths, not all sentences have as many references, or there is no such
            tokenizer.
    """
    _check_lengths({"translations": hypotheses}, references)
    found: dict[str, Any] = {}
    signatures = {}
    for metric, settings in _metrics(tokenize, lowercase):
        result = metric.compute(predictions=list(hypotheses), references=list(references), **settings)
        found[metric.key], signatures[metric.key] = result[metric.key], result["signature"]
    return found | {"signatures": signatures}


def sentence_scores(
    hypotheses: Sequence[str], references: References, tokenize: str = "13a", lowercase: bool = False
) -> list[dict[str, float]]:
    """
    Scores each sentence by itself: arguments and errors as those of [`score`].

    Returns:
        `list[dict[str, float]]`: `bleu` (its n-grams as long as the sentence has any, sacreBLEU's effective order),
        `chrf` and `ter` of each.
    """
    from .metric import streams

    _check_lengths({"translations": hypotheses}, references)
    metrics = []
    for metric, settings in _metrics(tokenize, lowercase):
        order = {"effective_order": True} if metric.key == "bleu" else {}
        metrics.append((metric.key, metric.metric(**settings, **order)))
    rows = zip(hypotheses, zip(*streams(references), strict=True), strict=True)
    return [{key: metric.sentence_score(text, right).score for key, metric in metrics} for text, right in rows]


@dataclass
class Compared:
    """
    What one metric says of one system, beside the first one.

    Attributes:
        metric (`str`): its name.
        system (`str`): its name.
        score (`float`): of the whole text.
        mean (`float`), interval (`float`): of paired bootstrap's samples the mean, and half of the width of the
            interval that 95 % of them are in.
        p_bootstrap (`float`, *optional*), p_randomization (`float`, *optional*): how probable such a difference to the
            first system is between two that are equally good; of the first one itself there is none.
        signature (`str`): sacreBLEU's.
    """

    metric: str
    system: str
    score: float
    mean: float
    interval: float
    p_bootstrap: float | None
    p_randomization: float | None
    signature: str


def compare(
    systems: Mapping[str, Sequence[str]],
    references: References,
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 1000,
    trials: int = 10_000,
) -> list[Compared]:
    """
    Whether systems differ by more than chance: paired bootstrap (Koehn, 2004) and paired approximate randomization
    (Riezler and Maxwell, 2005), both sacreBLEU's. `SACREBLEU_SEED` (12345) in the environment is their seed.

    Args:
        systems (`Mapping[str, Sequence[str]]`): translations of one text by name; the first is what the others are
            compared with.
        references, tokenize, lowercase: as in [`score`].
        samples (`int`): of bootstrap.
        trials (`int`): of randomization.

    Returns:
        `list[Compared]`: by metric, and then in the order of the systems.

    Raises:
        ValueError: there are fewer than two systems, or as in [`score`].
    """
    if len(systems) < 2:
        raise ValueError(f"It takes two systems to compare, but there are {len(systems)}.")
    _check_lengths({f"translations of {name}": texts for name, texts in systems.items()}, references)
    from sacrebleu.significance import PairedTest

    from .metric import streams

    results, signatures = {}, {}
    for kind, count in (("bs", samples), ("ar", trials)):
        # Each test writes into the signatures of its metrics.
        metrics = {metric.key: metric.metric(**settings) for metric, settings in _metrics(tokenize, lowercase)}
        named = [(name, list(texts)) for name, texts in systems.items()]
        signatures[kind], results[kind] = PairedTest(named, metrics, streams(references), kind, count)()
    rows = []
    for metric, signature in signatures["bs"].items():
        tests = zip(systems, results["bs"][metric], results["ar"][metric], strict=True)
        rows += [
            Compared(
                metric,
                name,
                bs.score,
                float(bs.mean),
                float(bs.ci),
                bs.p_value,
                ar.p_value,
                f"{signature}|ar:{trials}",
            )
            for name, bs, ar in tests
        ]
    return rows


def _metrics(tokenize: str, lowercase: bool) -> list[tuple[Any, dict[str, Any]]]:
    """Each metric with its settings."""
    # Imported here, because translating does without it, and without what it needs.
    from .metric import Bleu, ChrF, Ter

    return [
        (Bleu(keep_in_memory=True), {"tokenize": tokenize, "lowercase": lowercase}),
        (ChrF(keep_in_memory=True), {"lowercase": lowercase}),
        (Ter(keep_in_memory=True), {}),
    ]


def _check_lengths(systems: Mapping[str, Sequence[str]], references: References) -> None:
    for name, texts in systems.items():
        if len(texts) != len(references):
            raise ValueError(f"There are {len(texts)} {name} for {len(references)} references.")
        if not texts:
            raise ValueError(f"There are no {name} to score.")
