"""A model to compare with translates as `hf-vaswani evaluate` does, with its own tags and limits."""

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.data.tokenizer import add_language_tags, add_tags
from hf_vaswani.translation.baseline import Baseline
from hf_vaswani.translation.batches import translate_corpus

SENTENCES = ["one two", "", "three", "nine nine one two"]


def test_a_baseline_has_its_own_search_settings(tiny_run) -> None:
    folder = tiny_run / "model"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.num_beams == 2
    assert Baseline(folder, "cpu")(SENTENCES) == translate_corpus(model, tokenizer, SENTENCES)


def test_a_sentence_gets_the_baselines_own_tag(tiny_run, tmp_path) -> None:
    assert Baseline(tiny_run / "model", "cpu").tagged(SENTENCES, "de") == SENTENCES, "it has no tags"
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    add_language_tags(tokenizer, ["de", "fr"])
    model.resize_token_embeddings(len(tokenizer))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    baseline = Baseline(tmp_path, "cpu")
    assert baseline.tagged(["one", "", "<2fr> two"], "de") == ["<2de> one", "", "<2fr> two"]
    assert baseline.tagged(["one"], "es") == ["one"]
    # A prefix that is a tag is only read by a vocabulary that has it.
    assert baseline.tagged(["one", ""], "de", "to German:") == ["<2de> to German: one", ""]
    assert baseline.tagged(["one"], "de", "<bt>") == ["<2de> one"]
    add_tags(tokenizer, ["<bt>"])
    model.resize_token_embeddings(len(tokenizer))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    assert Baseline(tmp_path, "cpu").tagged(["one"], "de", "<bt>") == ["<2de> <bt> one"]


def test_a_sentence_that_is_too_long_is_translated_in_pieces(tiny_run, monkeypatch) -> None:
    baseline = Baseline(tiny_run / "model", "cpu")
    baseline.translator.longest = 8
    (long,) = baseline(["one two three. Four five six. Seven eight nine."])
    assert isinstance(long, str) and baseline.translator.lines_split == 1


def test_a_model_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Baseline(tmp_path / "nowhere", "cpu")
