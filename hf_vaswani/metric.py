"""Corpus BLEU by sacreBLEU as an `evaluate` metric. It stands here, not on the Hub, so that it needs no network."""

from typing import Any

try:
    import datasets
    import evaluate
    from sacrebleu.metrics import BLEU
except ImportError as error:
    raise ImportError(f"Scoring needs {error.name}: pip install 'hf_vaswani[train]'") from error


class SacreBleu(evaluate.Metric):
    """`SacreBleu().compute(predictions=..., references=..., tokenize="13a", lowercase=False)`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU by sacreBLEU, with the signature that makes it comparable.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(
        self, predictions: list[str], references: list[str], tokenize: str = "13a", lowercase: bool = False
    ) -> dict[str, Any]:
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"sacreBLEU has no tokenizer {tokenize!r}; it has {', '.join(sorted(BLEU.TOKENIZERS))}.")
        # `force`: text that looks tokenised is only a warning there, and test sets of one sentence are common.
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
        return {"bleu": bleu.corpus_score(predictions, [references]).score, "signature": str(bleu.get_signature())}
