"""A corpus translated in batches keeps its order and has the translations of single sentences."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani.data.tokenizer import add_tags, load_tokenizer
from hf_vaswani.model.sentences_vaswani import TIMES
from hf_vaswani.translation import batches, budgets
from hf_vaswani.translation.batches import log_probabilities, to_translate, translate_corpus, translate_n_best


@pytest.fixture
def translator(tiny_run):
    return AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model"), load_tokenizer(str(tiny_run / "model"))


def test_a_corpus_is_translated_in_order_with_any_batches(translator) -> None:
    model, tokenizer = translator
    model.train()
    sentences = ["one two three", "", "nine", "four five six seven eight", "   ", "two"]
    together = translate_corpus(model, tokenizer, sentences, tokens_per_batch=64, max_length=10)
    assert model.training
    model.eval()
    alone = []
    for sentence in sentences:
        ids = tokenizer(sentence, return_tensors="pt")
        output = model.generate(**ids, max_length=10)[0]
        alone.append(tokenizer.decode(output, skip_special_tokens=True) if sentence.strip() else sentence)
    assert together == alone
    assert translate_corpus(model, tokenizer, sentences, tokens_per_batch=1, max_length=10) == alone
    assert translate_corpus(model, tokenizer, [], max_length=10) == []
    hidden = [sentence.replace("e", "\u00ade") for sentence in sentences]
    assert to_translate(tokenizer, hidden) == to_translate(tokenizer, sentences)


def test_batches_keep_to_the_budget_and_dropout_is_off(translator, monkeypatch) -> None:
    model, tokenizer = translator
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


def test_the_mode_of_every_module_is_restored_even_after_an_error(translator, monkeypatch) -> None:
    model, tokenizer = translator
    model.train()
    model.model.encoder.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2

    def modes_now() -> dict[str, bool]:
        return {name: module.training for name, module in model.named_modules()}

    translate_corpus(model, tokenizer, ["one", "two"])
    log_probabilities(model, tokenizer, ["one"], ["two"])
    assert modes_now() == modes
    with pytest.raises(ValueError, match="max_new_tokens"):
        translate_corpus(model, tokenizer, ["one"], max_new_tokens=-1)
    assert modes_now() == modes
    # The second batch is never requested.
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        translate_corpus(model, tokenizer, ["one", "two"], tokens_per_batch=1)
    assert caught.traceback and modes_now() == modes
    monkeypatch.setattr(model, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log_probabilities(model, tokenizer, ["one"], ["two"])
    assert modes_now() == modes


def test_an_unpaired_surrogate_is_refused_with_its_sentence(translator) -> None:
    texts = ["one", "tw\ud800o"]
    for work in (
        lambda: translate_corpus(*translator, texts),
        lambda: translate_n_best(*translator, texts, 2),
        lambda: log_probabilities(*translator, ["one", "two"], texts),
    ):
        with pytest.raises(ValueError, match=r"Sentence 2 has an unpaired UTF-16 surrogate \('\\ud800'\)"):
            work()


def test_one_beam_has_no_scores(translator) -> None:
    with pytest.raises(ValueError, match="need beam search: set num_beams to 2 or more"):
        translate_n_best(*translator, ["one"], 1, num_beams=1)


def test_a_tag_alone_is_not_translated(translator) -> None:
    model, tokenizer = translator
    add_tags(tokenizer, ["<2de>"])
    model.resize_token_embeddings(len(tokenizer))
    # The model would otherwise generate something for any input.
    settings = {"min_new_tokens": 3, "max_new_tokens": 5}
    assert translate_corpus(model, tokenizer, ["", "<2de>", " <2de> ", "<2de> one"], **settings)[:3] == ["", "", ""]
    assert translate_n_best(model, tokenizer, ["<2de>"], 2, num_beams=2, **settings) == [[(0.0, ""), (0.0, "")]]


# ---- Devices -----------------------------------------------------------------------------------------------------

TEXT = ["one two three four"] * 9 + ["one two"] * 20 + ["nine"] * 30


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
# As cuBLAS and MPS say it.
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
MPS = RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB).")


def shapes_of(
    model, monkeypatch, name: str, most_rows: float = float("inf"), error: Exception = CUDA
) -> list[tuple[int, ...]]:
    """Returns the shapes of the sources that a method gets; it has memory for so many rows."""
    compute, shapes = getattr(model, name), []

    def spy(**inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        if len(inputs["input_ids"]) > most_rows:
            raise error
        return compute(**inputs)

    monkeypatch.setattr(model, name, spy)
    return shapes


def test_batches_fill_the_device_within_its_memory(translator, monkeypatch) -> None:
    model, tokenizer = translator
    shapes = shapes_of(model, monkeypatch, "generate")
    expected = translate_corpus(model, tokenizer, TEXT, max_length=5, num_beams=2)
    assert len(shapes) == 1, "on a CPU, 4,096 positions"
    asked = []
    monkeypatch.setitem(TIMES, "cpu", 1 / 16)
    for rows in (None, 7):
        monkeypatch.setattr(batches, "most_positions", lambda *given, rows=rows: asked.append(given) or rows)
        shapes.clear()
        assert translate_corpus(model, tokenizer, TEXT, max_length=5, num_beams=2) == expected
        assert max(height * width for height, width in shapes) <= 256
        assert (max(height for height, _ in shapes) > 7) == (rows is None)
    size = model.config.vocab_size
    assert asked == [(model.device, 2 * size)] * 2
    asked.clear()
    translate_n_best(model, tokenizer, TEXT[:1], 3, num_beams=4, ensemble=[model])
    log_probabilities(model, tokenizer, TEXT[:1], ["eins"])
    settings = copy.deepcopy(model.generation_config)
    settings.num_beams = 5
    translate_corpus(model, tokenizer, TEXT[:1], generation_config=settings)
    assert asked == [(model.device, 4 * 2 * size), (model.device, size), (model.device, 5 * size)]


@pytest.mark.parametrize("error", [CUDA, CUBLAS, MPS], ids=["CUDA", "cuBLAS", "MPS"])
def test_a_batch_that_does_not_fit_into_the_memory_is_computed_in_halves(
    translator, monkeypatch, caplog, error
) -> None:
    model, tokenizer = translator
    caplog.set_level(logging.WARNING)
    freed = []
    monkeypatch.setattr(budgets, "return_unused_memory", lambda: freed.append(True))
    targets = [text.replace("one", "eins") for text in TEXT]
    expected = (
        translate_corpus(model, tokenizer, TEXT, max_length=5),
        [each for each, _ in log_probabilities(model, tokenizer, TEXT, targets)],
    )
    for name, compute in (("generate", translate_corpus), ("forward", log_probabilities)):
        budgets.TOO_LARGE.clear()
        caplog.clear()
        freed.clear()
        with monkeypatch.context() as patch:
            shapes = shapes_of(model, patch, name, most_rows=8, error=error)
            if name == "generate":
                assert compute(model, tokenizer, TEXT, max_length=5) == expected[0]
            else:
                found = [each for each, _ in compute(model, tokenizer, TEXT, targets)]
                assert found == pytest.approx(expected[1], abs=1e-4)
            failed = [height for height, _ in shapes if height > 8]
            assert sum(height for height, _ in shapes if height <= 8) == len(TEXT)
            assert 0 < len(failed) == len(freed) and caplog.text.count("does not fit into the memory") == 1
            # What is too large is known from then on.
            shapes.clear()
            compute(model, tokenizer, TEXT, *([targets] if name == "forward" else []))
            assert len([height for height, _ in shapes if height > 8]) < len(failed)
            assert caplog.text.count("does not fit into the memory") == 1


def test_a_sentence_that_does_not_fit_into_the_memory_is_an_error(translator, monkeypatch) -> None:
    model, tokenizer = translator
    shapes = shapes_of(model, monkeypatch, "generate", most_rows=0)
    with pytest.raises(torch.OutOfMemoryError):
        translate_corpus(model, tokenizer, TEXT[:4])
    assert [height for height, _ in shapes] == [4, 2, 1]
    # No other error is tried again.
    budgets.TOO_LARGE.clear()
    monkeypatch.undo()
    shapes = shapes_of(
        model, monkeypatch, "generate", most_rows=0, error=RuntimeError("CUDA error: an illegal address")
    )
    with pytest.raises(RuntimeError, match="illegal"):
        translate_corpus(model, tokenizer, TEXT[:4])
    assert [height for height, _ in shapes] == [4]
