"""Languages that a server translates."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("babel", reason="the extra `serve` is not installed")
pytest.importorskip("py3langid", reason="the extra `serve` is not installed")

from hf_vaswani.serving.directions import Directions, LanguageError, language_name


def model_of(*pairs: tuple[str, str]) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(language_pairs=[list(pair) for pair in pairs]))
    )


def test_the_first_model_with_a_pair_has_it() -> None:
    found = Directions({"one": model_of(("en", "de")), "two": model_of(("en", "de"), ("fr", "de"), ("de", "pt-BR"))})
    assert found.find("en", "de") == ("one", "en", "de")
    assert found.find("FR", "de-AT") == ("two", "fr", "de")
    assert found.find("de", "pt_br") == ("two", "de", "pt-BR")
    assert found.languages() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "fr", "name": "French", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": ["pt-BR"]},
    ]
    for pair in (("de", "en"), ("en", "pt-BR"), ("xx", "de"), ("", "")):
        with pytest.raises(LanguageError, match="is not translated here, only en-de, fr-de, de-pt-BR"):
            found.find(*pair)


def test_text_is_recognised_among_the_sources() -> None:
    found = Directions({"one": model_of(("en", "de"), ("fr", "de"), ("de", "en"))})
    english, french = "The weather is fine today.", "Il fait beau aujourd'hui."
    assert found.source_of([english], "de")["language"] == "en"
    assert found.source_of([french], "de-DE")["language"] == "fr"
    # Only German is translated into English.
    assert found.source_of([french], "en")["language"] == "de"
    with pytest.raises(LanguageError, match="Nothing is translated into xx here, only into de, en"):
        found.source_of([english], "xx")


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
