"""The pipeline with markup: every kind of input, sentences, languages, engines."""

from typing import Any

import pytest
from torch.utils.data import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Pipeline, pipeline

from hf_vaswani import VaswaniTranslationPipeline, alignments
from hf_vaswani.data.tokenizer import add_tags, train_tokenizer
from hf_vaswani.translation import placement
from hf_vaswani.translation.markup import Segment, parse
from hf_vaswani.translation.placement import restore

from ..conversion.test_ctranslate2 import WORDS, random_model

TEXT = "<p>Du <b>fo ku</b> {n}.</p><p><i>Lai</i> &amp; <code>gu</code> bi</p>"
KEPT = ["<p>", "<b>", "</b>", "{n}", "</p>", "<i>", "</i>", "<code>gu</code>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A random model that translates each sentence otherwise, in words."""
    path = tmp_path_factory.mktemp("random")
    model = random_model(vocab_size=400)
    model.generation_config.min_new_tokens = 4
    model.save_pretrained(path)
    train_tokenizer([" ".join(WORDS)] * 9, 390).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def translator(folder) -> Any:
    return pipeline("translation", model=folder)


def text_of(found: Any) -> str:
    return found[0]["translation_text"]


def test_it_is_the_translation_with_its_markup_restored(translator) -> None:
    text = "<p>Du <b>fo ku</b> bi.</p><p><i>Lai</i> &amp; gu bi</p>"
    segments = [part for part in parse(text, "html") if isinstance(part, Segment)]
    expected = []
    for segment in segments:
        translation = text_of(translator(segment.text))
        found = alignments(translator.model, translator.tokenizer, [segment.text], [translation], unit="pieces")
        expected.append(restore(segment, translation, found, True))
    assert text_of(translator(text, markup="html")) == f"<p>{expected[0]}</p><p>{expected[1]}</p>"


@pytest.mark.variants(6)
@pytest.mark.parametrize("settings", [{"num_return_sequences": 2, "num_beams": 2}, {}, {"split_sentences": True}])
@pytest.mark.parametrize("kept", ["{name}", "%s", "https://a.org/b?c=1", "`f(x)`"])
def test_what_is_not_copied_costs_no_word(translator, kept, settings) -> None:
    """The model never copies: it has not learned to."""
    for text in ("{} Du fo ku bi.", "Du fo {} ku bi.", "Du fo ku bi {}.", "Du fo ku bi. {}", "Du, {}, ku {} bi."):
        bare = text.replace(", {}", "").replace(" {}", "").replace("{} ", "")
        expected = [each["translation_text"] for each in translator(bare, **settings)]
        found = translator(text.replace("{}", kept), markup="placeholders", **settings)
        for each, words in zip(found, expected, strict=True):
            assert each["translation_text"].count(kept) == text.count("{}")
            assert each["translation_text"].replace(kept, " ").split() == words.split()


def test_every_kind_of_input(translator, folder) -> None:
    texts = [TEXT, "du <b>fo</b>", "", "{n}"]
    each = [translator(text, markup="html") for text in texts]
    assert [text_of(found) for found in each[2:]] == ["", "{n}"]
    assert translator(texts, markup="html", batch_size=3) == [found[0] for found in each]
    assert translator([texts[:1], [], texts[1:]], markup="html") == [each[0], [], [found[0] for found in each[1:]]]
    assert list(translator((text for text in texts), markup="html")) == each
    assert pipeline("translation", model=folder, markup="html")(texts) == [found[0] for found in each]
    assert translator([], markup="html") == []


@pytest.mark.parametrize("count", [1, 3])
def test_each_candidate_has_the_markup(translator, count) -> None:
    """Texts without words have as many candidates as others."""
    whole = [[text] * count for text in ("<p></p>", "", "{n}")]
    texts = [TEXT, *(text for text, *_ in whole)]
    settings = {"num_return_sequences": count, "num_beams": count}
    found = [row if count > 1 else [row] for row in translator(texts, markup="html", **settings)]
    candidates, *others = [[each["translation_text"] for each in row] for row in found]
    assert others == whole and len(set(candidates)) == count
    for each in candidates:
        assert [each.count(part) for part in KEPT] == [TEXT.count(part) for part in KEPT]
        assert each.startswith("<p>") and each.endswith("</p>")


def test_tags_may_enclose_several_sentences(translator) -> None:
    text = "Du <b>fo ku. Lai {n}</b> gu."
    found = text_of(translator(text, markup="html", split_sentences=True))
    assert [found.count(part) for part in ("<b>", "</b>", "{n}")] == [1, 1, 1]
    assert found != text_of(translator(text, markup="html"))


def test_signs_that_are_not_seen_change_nothing(translator) -> None:
    found = translator("<p>Du <b>fo ku</b> {n} lai.</p>", markup="html")
    for each in ("&shy;", "\u200b", "&#x2060;"):
        assert translator(f"<p>D{each}u <b>f{each}o k{each}u</b> {{n}} l{each}ai.</p>", markup="html") == found
    assert text_of(translator("Du \u200b:cat:\u200b ku", markup="html")).count(":cat:") == 1


def test_placeholders_alone(translator) -> None:
    found = text_of(translator("du <b> {n} %s", markup="placeholders"))
    assert found.count("{n}") == found.count("%s") == 1 and "&" not in found
    # Tags are text: the model translates them.
    assert (
        text_of(translator("<p>{n}</p>", markup="html"))
        == "<p>{n}</p>"
        != text_of(translator("<p>{n}</p>", markup="placeholders"))
    )


def test_languages_of_a_multilingual_model(folder, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.config.language_pairs = [["en", "de"], ["en", "fr"]]
    translator = VaswaniTranslationPipeline(model, tokenizer)
    german, french = (translator(TEXT, markup="html", tgt_lang=language) for language in ("de", "fr"))
    assert german != french and "<2" not in text_of(german)
    assert translator(f"<2de> {TEXT}", markup="html") == german
    with pytest.raises(ValueError, match="choose one by tgt_lang"):
        translator(TEXT, markup="html")


def test_engines_have_the_same_markup(folder, translator) -> None:
    pytest.importorskip("ctranslate2")
    other = pipeline("translation", model=folder, engine="ctranslate2", num_beams=1)
    assert other(TEXT, markup="html") == translator(TEXT, markup="html", num_beams=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"markup": "xml"}, "markup must be 'html', 'html.attributes' or 'placeholders', but it is 'xml'"),
        ({"markup": "html", "return_tensors": True}, "return_tensors=True is not supported with markup='html'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(translator, settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        translator(TEXT, **settings)


# ---- Texts that are split ----------------------------------------------------------------------------------------

SPLIT = ["Du {n} fo.", "du fo ku", "Bi https://a.org/b fo. Ku bi", "Lai [X5X]\n\n %s gu", "fo <b>bi</b>", "42", ""]
PROTECTED_TEXTS = [text for text in SPLIT if any(each in text for each in ("{n}", "https:", "[X5X]"))]


@pytest.mark.parametrize("count", [1, 2])
def test_split_text_keeps_its_placeholders_in_every_kind_of_input(translator, folder, count, monkeypatch) -> None:
    settings = {"split_sentences": True} | ({"num_return_sequences": count, "num_beams": count} if count > 1 else {})
    expected = [
        translator(text, markup="placeholders", **settings)
        if text in PROTECTED_TEXTS
        else Pipeline.__call__(translator, text, **settings)
        for text in SPLIT
    ]
    as_list = [found[0] for found in expected] if count == 1 else expected
    assert [translator(text, **settings) for text in SPLIT] == expected
    for size in (None, 3):
        assert translator(SPLIT, batch_size=size, **settings) == as_list
        assert list(translator((text for text in SPLIT), batch_size=size, **settings)) == expected
        assert list(translator(Texts(), batch_size=size, **settings)) == expected
    assert translator([SPLIT[:2], SPLIT[2:]], **settings) == [as_list[:2], as_list[2:]]
    assert pipeline("translation", model=folder, split_sentences=True)(SPLIT[0]) == translator(
        SPLIT[0], split_sentences=True
    )
    with pytest.raises(TypeError, match="a sentence is a <class 'int'>"):
        list(translator(iter_of(["fo", 5]), **settings))
    # A text that is one sentence to the caller is not looked at.
    monkeypatch.setattr(placement, "PipelineMarkup", None)
    translator(SPLIT, **settings | {"split_sentences": False})


def test_a_text_to_text_model_need_not_keep_placeholders(folder) -> None:
    """A summary need not have every link of its text."""
    summarizer = pipeline("summarization", model=folder)
    found = summarizer(PROTECTED_TEXTS, split_sentences=True)
    assert found == [each[0] for each in Pipeline.__call__(summarizer, PROTECTED_TEXTS, split_sentences=True)]
    assert found != summarizer(PROTECTED_TEXTS, split_sentences=True, markup="placeholders")


class Texts(Dataset):
    def __len__(self) -> int:
        return len(SPLIT)

    def __getitem__(self, number: int) -> str:
        return SPLIT[number]


def iter_of(texts: list[Any]) -> Any:
    yield from texts


@pytest.mark.parametrize("what", ["long", "model", "tokenizer"])
def test_text_that_cannot_be_aligned_is_translated_as_it_is(translator, monkeypatch, what) -> None:
    expected = Pipeline.__call__(translator, PROTECTED_TEXTS, split_sentences=True)
    whole = [found[0] for found in expected]
    assert translator(PROTECTED_TEXTS, split_sentences=True) != whole
    if what == "long":
        monkeypatch.setattr(placement, "MAX_PROTECTED", 5)
    elif what == "model":
        monkeypatch.setattr(translator.model.config, "model_type", "marian")
    else:
        monkeypatch.setattr(type(translator.tokenizer), "is_fast", False)
    assert translator(PROTECTED_TEXTS, split_sentences=True) == whole
