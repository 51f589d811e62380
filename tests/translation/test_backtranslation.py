"""Back-translation: blocks with seeds of their own, directions, and the pairs."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.data.tokenizer import add_tags
from hf_vaswani.translation.backtranslation import (
    Backtranslator,
    check_direction,
    count_pairs,
    model_digest,
    sentences_of,
    set_search,
)
from hf_vaswani.translation.batches import translate_corpus
from hf_vaswani.translation.loading import load_translator

SENTENCES = ["one two three", "nine", "four five six", "seven seven eight", "two"] * 4


def sources_of(lines: list[str]) -> list[str]:
    return [line.split("\t")[0] for line in lines]


@pytest.fixture
def loaded(tiny_run):
    folder = tiny_run / "model"
    return AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_a_block_is_drawn_by_its_number_and_the_seed_alone(loaded) -> None:
    model, tokenizer = loaded
    set_search(model, "sampling")
    first = Backtranslator(model, tokenizer, "", seed=1)
    drawn = [first(block, SENTENCES) for block in (0, 1)]
    assert [line.split("\t")[1] for line in drawn[0]] == SENTENCES
    assert drawn[0] != drawn[1]
    torch.manual_seed(77)
    torch.rand(5)
    assert Backtranslator(model, tokenizer, "", seed=1)(1, SENTENCES) == drawn[1]
    assert Backtranslator(model, tokenizer, "", seed=2)(1, SENTENCES) != drawn[1]


def test_sampling_is_unrestricted_unless_it_is_restricted(loaded) -> None:
    model, tokenizer = loaded
    greedy = translate_corpus(model, tokenizer, SENTENCES, num_beams=1, length_penalty=None, early_stopping=None)
    found = {}
    for top_k, temperature in ((None, 1.0), (1, 1.0), (None, 1e-4)):
        set_search(model, "sampling", top_k, temperature)
        found[top_k, temperature] = sources_of(Backtranslator(model, tokenizer, "", seed=1)(0, SENTENCES))
    # The most probable entry is the only one that is drawn with either restriction.
    assert found[1, 1.0] == found[None, 1e-4] == [" ".join(text.split()) for text in greedy]
    assert found[None, 1.0] != found[1, 1.0]
    # Where all entries are nearly as probable, far more of them are drawn than the 50 of transformers' default.
    with torch.no_grad():
        model.lm_head.weight.normal_(std=1e-3)
    set_search(model, "sampling")
    inputs = tokenizer(SENTENCES * 10, return_tensors="pt", padding=True)
    assert len(model.generate(**inputs).unique()) > 150


def test_beam_search_is_that_of_generate(loaded) -> None:
    model, tokenizer = loaded
    expected = translate_corpus(model, tokenizer, SENTENCES, num_beams=3)
    set_search(model, "beam", num_beams=3)
    found = sources_of(Backtranslator(model, tokenizer, "", seed=1)(0, SENTENCES))
    assert found == [" ".join(text.split()) for text in expected]


def test_a_model_of_another_direction_is_refused(loaded) -> None:
    model, tokenizer = loaded
    assert model.config.language_pairs == [["en", "de"]]
    named = ("teacher.model", "m", model, tokenizer)
    assert check_direction(*named, "en", "de") == ""
    with pytest.raises(ValueError, match="teacher.model m translates en-de, but .* it must translate de-en: give"):
        check_direction(*named, "de", "en")
    model.config.language_pairs = None
    assert check_direction(*named, "de", "en") == "", "it says nothing"
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    assert check_direction(*named, "en", "de") == "<2de>"
    with pytest.raises(ValueError, match="no tag for the target language 'es', only for de, fr"):
        check_direction(*named, "en", "es")


def test_the_digest_is_that_of_weights_architecture_and_vocabulary(loaded) -> None:
    model, tokenizer = loaded
    before = model_digest(model, tokenizer)
    set_search(model, "sampling")
    tokenizer(["one"], padding="max_length", max_length=9, truncation=True)
    assert model_digest(model, tokenizer) == before
    add_tags(tokenizer, ["<2de>"])
    assert model_digest(model, tokenizer) != before
    before = model_digest(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[5, 3] += 1e-3
    assert model_digest(model, tokenizer) != before
    before = model_digest(model, tokenizer)
    model.config.scale_embedding = False
    assert model_digest(model, tokenizer) != before


def test_lines_become_cells() -> None:
    lines = ["one\ttwo", "", "  \u2028 ", ' "three"\x85four ', "five\r"]
    assert list(sentences_of(lines)) == ["one two", '"three" four', "five"]


def test_pairs_without_a_source_are_counted(tmp_path) -> None:
    (tmp_path / "pairs.tsv").write_text("en\tde\none\teins\n\tzwei\nthree\tdrei\n\tvier\n", encoding="utf-8")
    assert count_pairs(tmp_path / "pairs.tsv") == (4, 2)


def test_the_digest_reads_weights_of_8_bits(tiny_run) -> None:
    """A layer with such weights has its matrix and its bias in one entry."""
    model, tokenizer = load_translator(tiny_run / "model")
    before = model_digest(model, tokenizer)
    with warnings.catch_warnings():
        # torch deprecates such tensors, of which its own layers are made.
        warnings.simplefilter("ignore")
        matrix = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    found = []
    for bias in (torch.zeros(2), torch.ones(2), None):
        quantized = SimpleNamespace(config=model.config, state_dict=lambda bias=bias: {"packed": (matrix, bias)})
        found.append(model_digest(quantized, tokenizer))
    assert len({before, *found}) == 4
