"""A corpus is translated in order, in batches, as if sentence by sentence."""

from transformers import AutoModelForSeq2SeqLM

from hf_vaswani.evaluation import translate_corpus
from hf_vaswani.tokenizer import load_tokenizer


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
