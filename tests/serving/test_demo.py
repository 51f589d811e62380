"""The demo: what it shows, and the page served on loopback."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_vaswani import alignments
from hf_vaswani.translation.alignment import Alignment

from ..children import free_port
from .served import make_pipeline

TEXT = "abc cab. Ab ca."


@pytest.fixture(scope="module")
def demo() -> Any:
    """The module of the page, whose library takes seconds to import."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    return importlib.import_module("hf_vaswani.serving.demo")


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return make_pipeline()


@pytest.fixture(scope="module")
def translator(demo, pipeline) -> Any:
    return demo.DemoTranslator(pipeline.model, pipeline.tokenizer)


def alignment(source: str, target: str, links: list[tuple[int, int]]) -> Alignment:
    def spans(text: str) -> list[tuple[int, int]]:
        return [(text.index(word), text.index(word) + len(word)) for word in text.split()]

    probabilities = torch.zeros(len(target.split()), len(source.split()))
    for i, j in links:
        probabilities[j, i] = 1
    return Alignment(source.split(), target.split(), probabilities, spans(source), spans(target))


def test_words_that_belong_together_have_one_colour(demo) -> None:
    aligned = [
        alignment("one two three", "a b c", [(2, 0), (0, 1), (0, 2)]),
        alignment("four five", "d e", [(0, 0), (0, 1)]).moved(15, 6),
    ]
    source, target = demo.coloured("one two three  four five", "a b c d e", aligned)
    assert source == [("one", "0"), (" two ", None), ("three", "1"), ("  ", None), ("four", "2"), (" five", None)]
    assert [part for part in target if part[1] is not None] == list(zip("abcde", "10022", strict=True))


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12))
def test_parts_make_up_the_text(demo, links) -> None:
    source, target = "abcdefghijkl", "mnopqrstuvwx"
    last = {j: (i, j) for i, j in links}
    both = [alignment(" ".join(source), " ".join(target), list(last.values()))]
    parts = demo.coloured(" ".join(source), " ".join(target), both)
    assert ["".join(text for text, _ in side) for side in parts] == [" ".join(source), " ".join(target)]
    colours = [dict(side) for side in parts]
    for i, j in last.values():
        assert colours[0][source[i]] == colours[1][target[j]] is not None
        assert int(colours[0][source[i]]) < len(demo.COLOURS)


def test_each_sentence_is_translated_and_aligned(translator, pipeline) -> None:
    answer = translator.answer(TEXT, None, 4, 0.6, 3)
    expected = pipeline(TEXT, split_sentences=True, num_beams=4, length_penalty=0.6, num_return_sequences=3)
    assert answer.translations == [each["translation_text"] for each in expected]
    assert "".join(text for text, _ in answer.source) == TEXT
    assert "".join(text for text, _ in answer.target) == answer.translations[0]
    first = pipeline("abc cab.", num_beams=4, length_penalty=0.6)[0]["translation_text"]
    (aligned,) = alignments(pipeline.model, pipeline.tokenizer, ["abc cab."], [first])
    words = [aligned.source[i] for i in sorted({i for i, _ in aligned.links()})]
    assert [text for text, number in answer.source if number is not None][: len(words)] == words


def test_few_beams_have_few_translations_and_no_text_has_none(translator) -> None:
    assert len(translator.answer(TEXT, None, 2, 0.6, 5).translations) == 2
    assert len(translator.answer(TEXT, None, 1, 0.6, 5).translations) == 1
    assert translator.answer(" \n", None, 2, 0.6, 5).translations == []
    assert translator.explorer(" ", None, 2, 0.6) == ""


def test_what_a_page_does_not_ask_for_is_refused_at_once(demo, translator, monkeypatch) -> None:
    """Programs are not held by the limits of the browser."""
    monkeypatch.setattr(demo, "sentence_spans", lambda _: pytest.fail("splits it"))
    for call in (translator.answer, translator.explorer):
        with pytest.raises(ValueError, match="has 1,000,000 characters, but at most 5,000 are translated"):
            call("cat " * 250_000, None, 4, 0.6, *[1][: call == translator.answer])
    for num_beams, count in ((4, 0), (0, 1)):
        with pytest.raises(ValueError, match="At least one translation and one beam are needed"):
            translator.answer(TEXT, None, num_beams, 0.6, count)


def test_text_without_words_is_kept(translator) -> None:
    answer = translator.answer("42\nabc cab.\n★", None, 2, 0.6, 2)
    assert all(text.startswith("42\n") and text.endswith("\n★") for text in answer.translations)
    answer = translator.answer("42", None, 2, 0.6, 1)
    assert (answer.translations, answer.source, answer.target) == (["42"], [("42", "0")], [("42", "0")])


def test_the_language_is_put_in_front(demo) -> None:
    pipeline = make_pipeline(("en", "de"), ("en", "fr"))
    translator = demo.DemoTranslator(pipeline.model, pipeline.tokenizer)
    assert list(translator.tags) == ["de", "fr"]
    answers = {language: translator.answer(TEXT, language, 2, 0.6, 1) for language in ("de", "fr")}
    expected = pipeline(TEXT, split_sentences=True, tgt_lang="fr", num_beams=2)
    assert answers["fr"].translations == [expected[0]["translation_text"]]
    assert "".join(text for text, _ in answers["fr"].source) == TEXT
    # Behind its own tag.
    found = translator.answer(f" <2fr> {TEXT}", "fr", 2, 0.6, 1)
    assert found.translations == answers["fr"].translations
    assert found.source == [(" <2fr> ", None), *answers["fr"].source]
    with pytest.raises(ValueError, match="The target language is 'de', but the text begins with <2fr>"):
        translator.answer(f"<2fr> {TEXT}", "de", 2, 0.6, 1)


def test_a_translation_ends_at_its_deadline(demo, translator, monkeypatch) -> None:
    monkeypatch.setattr(demo, "DEADLINE", 0.0)
    with pytest.raises(demo.OverdueError, match="was not ready within 0 s"):
        translator.answer(TEXT, None, 4, 0.6, 1)


@pytest.fixture(scope="module")
def client(demo, pipeline) -> Iterator[Any]:
    """A client of the page, which is served on loopback."""
    gradio_client = pytest.importorskip("gradio_client")
    page = demo.build_demo(pipeline.model, pipeline.tokenizer, "me/model", ["abc", "cab"])
    yield gradio_client.Client(demo.serve_demo(page, "127.0.0.1", free_port(), block=False), verbose=False)
    page.close()


def test_the_page_is_served(client, translator) -> None:
    answer = translator.answer(TEXT, None, 4, 0.6, 3)
    translation, others, source, _, frame = client.predict(TEXT, None, 4, 0.6, 3, api_name="/translate")
    assert translation == answer.translations[0]
    assert others == "\n".join(f"{i}. {text}" for i, text in enumerate(answer.translations[1:], start=2))
    assert "".join(part["token"] for part in source) == TEXT
    assert frame == ""
    assert "Transformer explorer" in client.predict(TEXT, None, 4, 0.6, api_name="/explore")


@pytest.mark.parametrize(
    ("inputs", "name", "message"),
    [
        # Programs cannot ask for more than the page.
        (("abc " * 2000, None, 4, 0.6, 3), "/translate", "at most 5,000 are translated"),
        (("abc", None, 5000, 0.6, 3), "/translate", "10"),
        (("abc" * 200, None, 4, 0.6), "/explore", "a page shows from 1 to 200: shorten it"),
    ],
    ids=["text", "beams", "page"],
)
def test_what_is_wrong_is_shown(client, inputs, name, message) -> None:
    with pytest.raises(Exception, match=message):
        client.predict(*inputs, api_name=name)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (4, 0.6)),
        ({"length_penalty_type": "power"}, (4, 1.0)),
        ({"length_penalty": 3.0, "num_beams": 2}, (2, 3.0)),
    ],
)
def test_the_search_at_first_is_that_of_the_model(demo, settings, expected) -> None:
    pipeline = make_pipeline()
    pipeline.model.generation_config.update(**settings)
    blocks = demo.build_demo(pipeline.model, pipeline.tokenizer, "me/model").blocks.values()
    values = {getattr(block, "label", None): getattr(block, "value", None) for block in blocks}
    assert (values["Beams"], values["Length penalty α"]) == expected
