"""sacreBLEU's metrics as metrics of `evaluate`. They stand here, not on the Hub, so that they need no network."""

from collections.abc import Callable, Sequence
from typing import Any

try:
    import datasets
    import evaluate
    from sacrebleu.metrics import BLEU, CHRF, TER
    from sacrebleu.metrics.base import Metric
except ImportError as error:
    raise ImportError(f"Scoring needs {error.name}: pip install 'hf_vaswani[train]'") from error

TEXT = datasets.Value("string")


class SacreMetric(evaluate.Metric):
    """
    What the metrics have in common: `Bleu(keep_in_memory=True).compute(predictions=..., references=...)`, of each
    sentence one reference, or a list of them.
    """

    key: str
    # Takes the settings of `compute`, and makes sacreBLEU's own.
    metric: Callable[..., Metric]

    def _info(self) -> evaluate.MetricInfo:
        kinds = (TEXT, datasets.Sequence(TEXT))
        return evaluate.MetricInfo(
            description=f"{self.key} of a corpus by sacreBLEU, with the signature that makes it comparable.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
            features=[datasets.Features({"predictions": TEXT, "references": kind}) for kind in kinds],
        )

    def _compute(
        self, predictions: list[str], references: list[str] | list[list[str]], **settings: Any
    ) -> dict[str, Any]:
        metric = self.metric(**settings)
        scored = metric.corpus_score(predictions, streams(references))
        return {self.key: scored.score, "signature": str(metric.get_signature())}


class Bleu(SacreMetric):
    """BLEU (Papineni et al., 2002), 0 to 100. `tokenize="13a"` is sacreBLEU's tokenizer, `lowercase` ignores case."""

    key = "bleu"

    def metric(self, tokenize: str = "13a", lowercase: bool = False, effective_order: bool = False) -> Metric:
        """With `effective_order` n-grams that a sentence is too short for do not count, as is usual for one alone."""
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"sacreBLEU has no tokenizer {tokenize!r}; it has {', '.join(sorted(BLEU.TOKENIZERS))}.")
        try:
            # `force`: text that looks tokenised is only a warning there, and test sets of one sentence are common.
            return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=effective_order, force=True)
        # What it raises where a language's own tokenizer is not installed.
        except RuntimeError as error:
            raise ValueError(f"sacreBLEU cannot use the tokenizer {tokenize!r}: {error}") from error


class ChrF(SacreMetric):
    """chrF2 (Popović, 2016), 0 to 100: n-grams of characters. `lowercase` ignores case."""

    key = "chrf"

    def metric(self, lowercase: bool = False) -> Metric:
        """As it is on the command line of sacreBLEU."""
        return CHRF(lowercase=lowercase)


class Ter(SacreMetric):
    """TER (Snover et al., 2006), from 0: edits for 100 words of reference, less is better. It ignores case."""

    key = "ter"

    def metric(self) -> Metric:
        """As it is on the command line of sacreBLEU."""
        return TER()


def streams(references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """From the references of each sentence, sacreBLEU's order: the first of all sentences, the second of all, ..."""
    rows = [[each] if isinstance(each, str) else list(each) for each in references]
    for number, row in enumerate(rows, start=1):
        if not row or len(row) != len(rows[0]):
            raise ValueError(
                f"All sentences need as many references, and at least one: sentence 1 has {len(rows[0])}, and "
                f"sentence {number} has {len(row)}."
            )
    return [list(stream) for stream in zip(*rows, strict=True)]
