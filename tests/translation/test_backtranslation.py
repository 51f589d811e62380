"""Back-translation: blocks with seeds of their own, directions, and pairs that can be interrupted anywhere."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.data.tokenizer import add_language_tags
from hf_vaswani.translation import backtranslation
from hf_vaswani.translation.backtranslation import (
    Backtranslator,
    PairsFile,
    check_direction,
    model_digest,
    sentences_of,
    set_search,
)
from hf_vaswani.translation.batches import translate_corpus

SENTENCES = ["one two three", "nine", "four five six", "seven seven eight", "two"] * 4


@pytest.fixture
def loaded(tiny_run):
    folder = tiny_run / "model"
    return AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_a_block_is_drawn_by_its_number_and_the_seed_alone(loaded) -> None:
    model, tokenizer = loaded
    set_search(model, "sampling")
    first = Backtranslator(model, tokenizer, "", seed=1)
    drawn = [first(block, SENTENCES) for block in (0, 1)]
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
        found[top_k, temperature] = Backtranslator(model, tokenizer, "", seed=1)(0, SENTENCES)
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
    assert Backtranslator(model, tokenizer, "", seed=1)(0, SENTENCES) == [" ".join(t.split()) for t in expected]


def test_a_model_of_another_direction_is_refused(loaded) -> None:
    model, tokenizer = loaded
    assert model.config.language_pairs == [["en", "de"]]
    assert check_direction("m", model, tokenizer, "de", "en") == ""
    with pytest.raises(ValueError, match="backtranslation.model m translates en-de, but .* translations de-en: give"):
        check_direction("m", model, tokenizer, "en", "de")
    model.config.language_pairs = None
    assert check_direction("m", model, tokenizer, "en", "de") == "", "it says nothing"
    add_language_tags(tokenizer, ["de", "fr"])
    assert check_direction("m", model, tokenizer, "de", "en") == "<2de>"
    with pytest.raises(ValueError, match="no tag for the target language 'es', only for de, fr"):
        check_direction("m", model, tokenizer, "es", "en")


def test_the_digest_is_that_of_weights_and_vocabulary(loaded) -> None:
    model, tokenizer = loaded
    before = model_digest(model, tokenizer)
    set_search(model, "sampling")
    tokenizer(["one"], padding="max_length", max_length=9, truncation=True)
    assert model_digest(model, tokenizer) == before
    add_language_tags(tokenizer, ["de"])
    assert model_digest(model, tokenizer) != before
    before = model_digest(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[5, 3] += 1e-3
    assert model_digest(model, tokenizer) != before


def test_lines_become_cells() -> None:
    lines = ["one\ttwo", "", "  \u2028 ", ' "three"\x85four ', "five\r"]
    assert list(sentences_of(lines)) == ["one two", '"three" four', "five"]


# ---- The file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(backtranslation, "BLOCK", 4)


def pairs_file(folder: Path, **settings: object) -> PairsFile:
    return PairsFile(folder / "pairs.tsv", ("en", "de"), {"seed": 1} | settings)


ROWS = [(f"source {i}" if i % 3 else "", f"target {i}") for i in range(10)]


def test_a_file_that_was_cut_anywhere_goes_on_after_its_whole_blocks(tmp_path, small_blocks) -> None:
    pairs = pairs_file(tmp_path)
    assert pairs.begin() == 0 and not pairs.path.exists()
    pairs.write(ROWS)
    content = pairs.partial.read_bytes()
    for length in range(len(content) + 1):
        pairs.partial.write_bytes(content[:length])
        again = pairs_file(tmp_path)
        done = again.begin()
        assert done == max(0, content[:length].count(b"\n") - 1) // 4 * 4
        assert content.startswith(again.partial.read_bytes()), "nothing is lost but the end"
        again.write(ROWS[done:])
        assert again.partial.read_bytes() == content
    again.finish()
    assert again.path.read_bytes() == content and not again.partial.exists()
    assert again.count() == (10, 4)
    assert pairs_file(tmp_path).begin() is None, "it is complete"


def test_pairs_of_other_settings_are_refused_and_kept(tmp_path, small_blocks) -> None:
    pairs = pairs_file(tmp_path)
    pairs.begin()
    pairs.write(ROWS)
    content = pairs.partial.read_bytes()
    with pytest.raises(ValueError, match=r"\.pairs\.tsv\.writing has pairs of other settings: seed was 1 and is 2\."):
        pairs_file(tmp_path, seed=2).begin()
    assert pairs.partial.read_bytes() == content
    pairs.finish()
    with pytest.raises(ValueError, match=r"pairs\.tsv has pairs of other settings: top_k was None and is 5\. Name"):
        pairs_file(tmp_path, top_k=5).begin()
    record = json.loads(pairs.record.read_text())
    pairs.record.write_text(json.dumps(record | {"seed": 3}))
    with pytest.raises(ValueError, match=r"pairs\.tsv\.json was changed or damaged"):
        pairs_file(tmp_path).begin()
    pairs.record.unlink()
    with pytest.raises(ValueError, match=r"pairs\.tsv exists already, without the record of its settings"):
        pairs_file(tmp_path).begin()
    assert pairs.path.read_bytes() == content


def test_a_damaged_file_is_named(tmp_path, small_blocks) -> None:
    pairs = pairs_file(tmp_path)
    pairs.begin()
    pairs.write([("one", "eins"), ("two\tthree", "zwei")])
    with pytest.raises(ValueError, match=r"\.pairs\.tsv\.writing, line 3, is damaged: delete this file to start over"):
        pairs_file(tmp_path).begin()
