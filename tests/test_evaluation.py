"""Scores are sacreBLEU's own; a corpus is translated in order, in batches, as if sentence by sentence."""

import pytest
import sacrebleu
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani.evaluation import score, translate_corpus
from hf_vaswani.tokenizer import load_tokenizer

HYPOTHESES = ["The cat sat on the mat.", "A dog runs quickly!", "Nothing here"]
REFERENCES = ["The cat sat on a mat.", "A dog runs fast!", "nothing here at all"]


@pytest.mark.parametrize("settings", [{}, {"lowercase": True}, {"tokenize": "none"}, {"tokenize": "char"}])
def test_score_is_sacrebleus_with_its_signature(settings) -> None:
    bleu = sacrebleu.metrics.BLEU(**settings)
    result = score(HYPOTHESES, REFERENCES, **settings)
    assert result["bleu"] == bleu.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert result["signature"] == str(bleu.get_signature())
    assert f"version:{sacrebleu.__version__}" in result["signature"]


def test_equal_text_scores_100() -> None:
    assert score(REFERENCES, REFERENCES)["bleu"] == pytest.approx(100)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="2 translations for 3"):
        score(HYPOTHESES[:2], REFERENCES)
    with pytest.raises(ValueError, match="'14b'.*13a"):
        score(HYPOTHESES, REFERENCES, tokenize="14b")


def test_a_corpus_is_translated_in_order_whatever_the_batches(tiny_run) -> None:
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model"),
        load_tokenizer(str(tiny_run / "model")),
    )
    model.train()
    sentences = ["one two three", "", "nine", "four five six seven eight", "   ", "two"]
    together = translate_corpus(model, tokenizer, sentences, tokens_per_batch=64, max_length=10)
    assert model.training
    model.eval()
    alone = []
    for sentence in sentences:
        ids = tokenizer(sentence, return_tensors="pt")
        output = model.generate(**ids, max_length=10)[0]
        alone.append(tokenizer.decode(output, skip_special_tokens=True) if sentence.strip() else "")
    assert together == alone
    assert translate_corpus(model, tokenizer, sentences, tokens_per_batch=1, max_length=10) == alone
    assert translate_corpus(model, tokenizer, [], max_length=10) == []


def test_batches_keep_to_the_budget_and_dropout_is_off(tiny_run, monkeypatch) -> None:
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model"),
        load_tokenizer(str(tiny_run / "model")),
    )
    generate, shapes = model.generate, []

    def spy(**inputs):
        assert not model.training
        shapes.append(tuple(inputs["input_ids"].shape))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", spy)
    model.train()
    translate_corpus(model, tokenizer, ["one two three four"] * 5 + ["one"] * 20, tokens_per_batch=30, max_length=5)
    assert all(rows * width <= 30 for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) == 25
    assert max(rows for rows, _ in shapes) > 5
