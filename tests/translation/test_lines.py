"""Lines of a text: long ones are split, and any number of processes keeps their order."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data.tokenizer import add_tags, train_tokenizer
from hf_vaswani.model.sentences_vaswani import LanguageTags, Parts, longest_source
from hf_vaswani.translation.batches import translate_corpus, translate_n_best
from hf_vaswani.translation.lines import LineTranslator, _joined, cut_lines

from ..campaign.verbs import verb
from ..children import run, run_launched


@pytest.fixture(scope="module")
def short_model():
    """A model with 24 learned positions, and its tokenizer with a language tag."""
    words = "one two three four five six seven eight nine ten"
    tokenizer = train_tokenizer([words] * 50, 320)
    add_tags(tokenizer, ["<2de>"])
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    limits = {"position_encoding": "learned", "max_position_embeddings": 24}
    return VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=len(tokenizer), **sizes, **limits)
    ).eval(), tokenizer


SENTENCE = "one two three four five six seven."
LONG = " ".join([SENTENCE] * 4)


def test_long_lines_are_split_and_their_translations_joined(short_model) -> None:
    model, tokenizer = short_model
    assert longest_source([model], tokenizer) == 24
    with pytest.raises(ValueError, match="max_position_embeddings"):
        translate_corpus(model, tokenizer, [LONG])
    translator = LineTranslator([model], tokenizer)
    found = translator(["one", LONG, "", "two"])
    assert translator.lines_split == 1
    one, sentence, two = translate_corpus(model, tokenizer, ["one", SENTENCE, "two"])
    assert [candidates[0][1] for candidates in found] == [one, " ".join([sentence] * 4), "", two]

    model.generation_config.num_beams = 3
    found = LineTranslator([model], tokenizer, n_best=2)([LONG, "two"])
    whole, two = translate_n_best(model, tokenizer, [SENTENCE, "two"], 2)
    assert found[0] == [(pytest.approx(4 * score), " ".join([text] * 4)) for score, text in whole]
    assert found[1] == [(pytest.approx(score), text) for score, text in two]


def test_lines_keep_their_white_space_and_lose_what_is_not_seen(short_model, monkeypatch) -> None:
    model, tokenizer = short_model
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 8)
    translator = LineTranslator([model], tokenizer)
    seen = [SENTENCE, f"  {SENTENCE}\t", SENTENCE.replace("three", "th\u00adree"), f" \u200b {SENTENCE}\u200f"]
    one = translate_corpus(model, tokenizer, [SENTENCE])[0]
    assert [best[0][1] for best in translator(seen)] == [one, f"  {one}\t", one, f" {one}"]
    wordless = ["", "  ", "\t42 ", "\u200b", "\u2028", "★★★\u00ad", "<2de> 42"]
    assert [best[0][1] for best in translator(wordless)] == [*wordless[:-1], "42"]
    long = f"    {SENTENCE}\r{SENTENCE}\u2028  {SENTENCE}\u00a0{SENTENCE} "
    assert translator([long])[0][0][1] == f"    {one}\r{one}\u2028  {one}\u00a0{one} "
    # Links count the words that a line has by itself.
    ((_, text, links),) = translator.aligned([f" \u200b {seen[2]}"])[0]
    assert text == f" {one}" and min(left for left, _, _ in links) >= 1


def test_each_piece_has_the_tag(short_model) -> None:
    _, tokenizer = short_model
    tags = LanguageTags(tokenizer)
    found = [parts.sources for parts in cut_lines([f" <2de> {LONG}", "<2de> one"], tags, 24)]
    assert found == [[f"<2de> {SENTENCE}"] * 4, ["<2de> one"]]
    assert cut_lines([], tags, 24) == []


def test_the_lowest_limit_holds(short_model) -> None:
    model, _ = short_model
    other = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=300, d_model=16, d_ff=32, num_heads=2))
    tokenizer = train_tokenizer(["one two"], 300)
    assert longest_source([other], tokenizer) == 1024 and longest_source([other, model], tokenizer) == 24
    tokenizer.model_max_length = 7
    assert longest_source([other, model], tokenizer) == 7


@pytest.mark.process
def test_two_processes_write_the_output_of_one(tiny_run, tmp_path) -> None:
    words = ["one", "two three", "", "four five six", "nine"]
    text = "".join(f"{words[i % 5]} {words[i % 3]}".strip() + "\n" for i in range(2500))
    (tmp_path / "long.txt").write_text(text + "six " * 1200 + "\nbad\n", encoding="utf-8")
    arguments = ["translate", "--model", str(tiny_run / "model"), str(tmp_path / "long.txt")]
    alone = run(tmp_path / "alone", verb, arguments)
    together = run_launched(tmp_path / "together", verb, arguments)
    assert [alone.code, *(end.code for end in together)] == [0, 0, 0], [alone.err, *(end.err for end in together)]
    found = [alone.out, "".join(end.out for end in together)]
    for said in (alone.err, "".join(end.err for end in together)):
        assert said.count("Split: 1 line is longer than the model's limit of 128 tokens") == 1
    assert found[0] == found[1] and found[0].count("\n") == 2502
    (tmp_path / "long.txt").write_bytes(b"one\ntwo\xff\n")
    failed = run_launched(tmp_path / "failed", verb, arguments)
    assert [end.code for end in failed] == [2, 2]
    assert failed[0].err.count("long.txt, line 2, is not UTF-8") == 1 and failed[1].err == ""
    model, tokenizer = (kind.from_pretrained(tiny_run / "model") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert found[0].splitlines()[:40] == translate_corpus(model, tokenizer, text.splitlines()[:40])


def test_n_best_lists_are_joined_rank_by_rank() -> None:
    one = [[(-1.0, "a"), (-2.0, "b")]]
    assert _joined(Parts("", "A", [(0, 1)]), one) == one[0]
    two = [*one, [(-4.0, "c"), (-8.0, "d")]]
    assert _joined(Parts("", "A C", [(0, 1), (2, 3)]), two) == [(-5.0, "a c"), (-10.0, "b d")]
