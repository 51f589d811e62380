"""Languages that a server translates."""

import pytest

pytest.importorskip("babel", reason="the extra `serve` is not installed")
pytest.importorskip("py3langid", reason="the extra `serve` is not installed")

from hf_vaswani.serving.directions import Directions, LanguageError, language_name, listed, nearest

from .served import model_of


def test_the_first_model_with_a_pair_has_it() -> None:
    found = Directions({"one": model_of(("en", "de")), "two": model_of(("en", "de"), ("fr", "de"), ("de", "pt_br"))})
    assert found.find("en", "de") == ("one", "en", "de")
    assert found.find("FR", "de-AT") == ("two", "fr", "de")
    assert found.find("de", "pt_br") == found.find("de", "PT-BR") == ("two", "de", "pt_br")
    assert found.languages() == [
        {"code": "en", "name": "English", "targets": ["de", "en"]},
        {"code": "fr", "name": "French", "targets": ["de", "fr"]},
        {"code": "de", "name": "German", "targets": ["pt-BR", "de"]},
        {"code": "pt-BR", "name": "Portuguese (Brazil)", "targets": ["pt-BR"]},
    ]
    for pair in (("de", "en"), ("en", "pt-BR"), ("xx", "de"), ("xx", "xx"), ("", "")):
        with pytest.raises(LanguageError, match="is not translated here, only en-de, fr-de, de-pt-BR"):
            found.find(*pair)


def test_errors_name_some_of_many_pairs() -> None:
    codes = [f"{first}{second}" for first in "abcdefgh" for second in "xyz"]
    found = Directions({"one": model_of(*((source, target) for source in codes for target in codes))})
    with pytest.raises(LanguageError, match=r"ax-ax, ax-ay, .* and 526 others\.$"):
        found.find("qq", "ax")
    assert len(found.languages()) == 24 and found.languages()[1]["targets"][-1] == "ay"


def test_text_in_the_target_language_is_given_back() -> None:
    found = Directions({"one": model_of(("en", "de"), ("fr", "fr"))})
    for pair in (("en", "en"), ("de", "DE"), ("de-AT", "de"), ("en-US", "en_GB")):
        assert found.find(*pair) is None
    # A model that corrects text, say.
    assert found.find("fr", "fr") == ("one", "fr", "fr")
    assert found.languages()[1] == {"code": "fr", "name": "French", "targets": ["fr"]}


ENGLISH, FRENCH, GERMAN = "The weather is fine today.", "Il fait beau aujourd'hui.", "Die Katze schläft auf dem Tisch."


def languages_of(found: Directions, texts: list[str], target: str) -> list[str]:
    return [guess["language"] for guess in found.recognise(texts, target)]


def test_text_is_recognised_among_the_languages_of_a_target() -> None:
    found = Directions({"one": model_of(("en", "de"), ("fr", "de"), ("de", "en"))})
    assert languages_of(found, [ENGLISH], "de") == ["en"]
    assert languages_of(found, [FRENCH], "de-DE") == ["fr"]
    assert languages_of(found, [GERMAN], "de") == ["de"]
    # Only German is translated into English.
    assert languages_of(found, [FRENCH], "en") == ["de"]
    assert languages_of(found, [ENGLISH], "en") == ["en"]
    # A third language is none of them, however much more it resembles the target.
    for text in ("Kissa nukkuu pöydällä ja näkee unta kaloista.", "Katten sover på bordet och drömmer om fisk."):
        assert languages_of(found, [text], "de") != ["de"]
    with pytest.raises(LanguageError, match="Nothing is translated into xx here, only into de, en"):
        found.recognise([ENGLISH], "xx")
    with pytest.raises(LanguageError, match="Nothing is translated into fr here"):
        found.resolve(["42"], "auto", "fr")


def test_each_text_of_a_list_has_its_language() -> None:
    found = Directions({"one": model_of(("en", "de"), ("fr", "de"))})
    assert languages_of(found, [ENGLISH, FRENCH, GERMAN], "de") == ["en", "fr", "de"]
    directions, guesses = found.resolve([FRENCH, GERMAN, ENGLISH, "42"], "Auto", "de")
    assert directions[:3] == [("one", "fr", "de"), None, ("one", "en", "de")] and guesses is not None
    assert [guess["language"] for guess in guesses[:3]] == ["fr", "de", "en"]
    # Short ones, and those without words, have that of all of them.
    for short in ("OK", "No", "42", "", "★"):
        assert languages_of(found, [FRENCH, short, FRENCH], "de") == ["fr"] * 3
        assert languages_of(found, [short, ENGLISH], "de") == ["en"] * 2
    assert found.resolve(["42", ""], "auto", "de") == ([None, None], [{"language": "en", "confidence": 0.0}] * 2)
    assert found.resolve(["42"], "en", "de") == ([("one", "en", "de")], None)
    assert found.resolve([], "auto", "de") == ([], [])


def test_long_texts_are_recognised_by_their_beginning() -> None:
    found = Directions({"one": model_of(("en", "de"), ("fr", "de"))})
    text = f"{FRENCH} " * 50
    assert languages_of(found, [text], "de") == languages_of(found, [text + f"{ENGLISH} " * 300], "de") == ["fr"]


def test_detection() -> None:
    found = Directions({"one": model_of(("en", "zh_Hans"))})
    assert found.detect(ENGLISH)["language"] == "en" and 0 < found.detect(ENGLISH)["confidence"] <= 100
    # Languages that are not served are recognised, too, if they are sure.
    assert found.detect(FRENCH)["language"] == "fr"
    assert found.detect("OK")["language"] in ("en", "zh-Hans")
    assert found.detect("今天天气很好，我们去公园散步。")["language"] == "zh-Hans"
    for text in ("", "42", "★", "\u200b"):
        assert found.detect(text) == {"language": "en", "confidence": 0.0}


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("en", "en"),
        ("EN_us", "en-US"),
        ("pt_BR", "pt-BR"),
        ("pt-br", "pt-BR"),
        ("zh_hant_tw", "zh-Hant-TW"),
        ("pb", "pt-BR"),
        ("zt", "zh-Hant"),
        ("deu", "de"),
        ("iw", "he"),
        ("tl", "tl"),
        ("es-419", "es-419"),
        ("xx", "xx"),
        ("", ""),
    ],
)
def test_listed_codes(code, form) -> None:
    assert listed(code) == form


@pytest.mark.parametrize(
    ("code", "codes", "found"),
    [
        ("de", ["en", "de"], "de"),
        ("DE_at", ["en", "de"], "de"),
        ("deu", ["de"], "de"),
        ("fr", ["en", "de"], None),
        # Likely scripts and regions.
        ("zh", ["zh-Hant", "zh-Hans"], "zh-Hans"),
        ("zh-CN", ["zh-Hant", "zh-Hans"], "zh-Hans"),
        ("zh_TW", ["zh-Hans", "zh-Hant"], "zh-Hant"),
        ("zh-HK", ["zh-Hans", "zh-Hant"], "zh-Hant"),
        ("zt", ["zh", "zh-Hant"], "zh-Hant"),
        ("zh-Hans", ["zh", "zh-Hant"], "zh"),
        ("zh-Hans", ["zh"], "zh"),
        ("zh-Hant", ["zh-Hans"], None),
        ("pt", ["pt-PT", "pt-BR"], "pt-BR"),
        ("pb", ["pt-PT", "pt"], "pt"),
        ("pt-PT", ["pt-BR"], None),
        ("sr", ["sr-Latn", "sr-Cyrl"], "sr-Cyrl"),
        # The language alone stands for all its variants.
        ("zh-Hant", ["zh"], "zh"),
        ("en-GB", ["en"], "en"),
        ("en", ["en-GB"], "en-GB"),
        ("zh", ["zh-Hant"], "zh-Hant"),
        # Two codes of one language.
        ("no", ["nn", "nb"], "nb"),
        ("nb", ["no"], "no"),
        ("nb-NO", ["no"], "no"),
        ("iw", ["he"], "he"),
        ("fil", ["tl"], "tl"),
        ("sh", ["sr", "sr-Latn"], "sr-Latn"),
        # No codes at all.
        ("", ["en"], None),
        ("en de", ["en"], None),
        ("e" * 100_000, ["en"], None),
        ("\ud800", ["en"], None),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_the_nearest_code(code, codes, found) -> None:
    assert nearest(code, codes) == found


def test_languages_of_a_model_that_names_none() -> None:
    assert Directions({"old": model_of()}, [("en", "de")]).find("en", "de") == ("old", "en", "de")
    with pytest.raises(ValueError, match="The config of old names no languages: .* --direction en-de"):
        Directions({"old": model_of()})
    with pytest.raises(ValueError, match="configs of old and older name no languages"):
        Directions({"old": model_of(), "older": model_of()}, [("en", "de")])
    with pytest.raises(ValueError, match="all of them do"):
        Directions({"new": model_of(("en", "de"))}, [("en", "de")])


@pytest.mark.parametrize(
    ("code", "name"),
    [("pt-BR", "Portuguese (Brazil)"), ("zh_Hant", "Chinese (Traditional)"), ("a b", "a b"), ("xx", "xx")],
)
def test_names(code, name) -> None:
    assert language_name(code) == name
