"""What is wrong with a pair is named, what may be is not, and limits follow a validation set."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_vaswani.corpus.checking import DIGIT, SPACE, Checker, Limits, Norm, count_characters, script_names

LATIN = frozenset({"LATIN"})
DEFAULT = Limits()
NORM = Norm(1.0, (LATIN, LATIN))
ENGLISH = "The old man is reading a newspaper in the park."
GERMAN = "Der alte Mann liest im Park eine Zeitung."


def reasons(source: str, target: str, limits: Limits = DEFAULT, norm: Norm = NORM) -> list[str]:
    checker = Checker(("en", "de"))
    found = checker.judge(checker.measure([source], [target]), limits, norm)
    return [reason for reason, flags in found.items() if flags[0]]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ENGLISH, GERMAN),
        ("Yes.", "Aber ja doch."),
        ("It costs 2,500.75 dollars at 7:30.", "Es kostet um 7.30 Uhr 2500,75 Dollar."),
        ("In 1984, there were two.", "1984 waren es 2."),
        ("See https://en.wikipedia.org/wiki/Dog.", "Siehe https://de.wikipedia.org/wiki/Hund."),
        ("Press <b>OK</b> to delete {name}.", "Zum Löschen von {name} <b>OK</b> drücken."),
        ("Call :func:`len` with ``x``.", "Rufe mit ``x`` :func:`len` auf."),
        ("New York Rangers", "New York Rangers"),
        ("Angela Merkel, Barack Obama, Emmanuel Macron", "Angela Merkel, Barack Obama, Emmanuel Macron"),
        ("I like Москва.", "Ich mag Москва."),
        ("“ÉTÉ” – he said…", "»ÉTÉ« – sagte er…"),
        ("À «ça»…", "À\u00a0«ça»…"),
        ("MINHA IRMÃ… ATÉ AMANHÃ”", "Meine Schwester… bis morgen»"),
        ("Its volume is 1234 Å³, its side 15 Å².", "Sein Volumen ist 1234 Å³, seine Seite 15 Å²."),
    ],
)
def test_sound_pairs(source, target) -> None:
    assert reasons(source, target) == []


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (ENGLISH, " ", "empty"),
        ("", "", "empty"),
        (ENGLISH, GERMAN.replace("alte", "Ã¤lteste"), "encoding"),
        (ENGLISH, "Der Mann sagt: â€žHallo!â€œ", "encoding"),
        (ENGLISH, "Der \ufffdlteste Mann liest im Park eine Zeitung.", "encoding"),
        (ENGLISH, "Der alte Mann\x07 liest im Park eine Zeitung.", "encoding"),
        (ENGLISH, "Der alte Mann\x0bliest im Park eine Zeitung.", "encoding"),
        (ENGLISH, "Der alte Mann\u2028liest im Park eine Zeitung.", "encoding"),
        (ENGLISH, ENGLISH, "identical"),
        (ENGLISH * 30, GERMAN * 30, "length"),
        ("x" * 5000, "y" * 5000, "length"),
        (ENGLISH, "Ja.", "ratio"),
        ("A man.", GERMAN * 2, "ratio"),
        (ENGLISH, "*** ... !!! --- ((( 12 ))) ==== #### $$$ ,,,", "letters"),
        (ENGLISH, "Старик читает газету в парке под деревом.", "script"),
        ("Call us on 555-1234-999 before the end of 2019.", "Ruf uns doch vor dem Ende des Jahres an.", "numbers"),
        ("See https://a.org/x and http://b.org/y.", "Siehe dort und dort, im Netz.", "urls"),
        ("<b>Hello</b>, <i>you</i>!", "Guten Tag, liebe Leute!", "markup"),
    ],
)
def test_what_is_wrong_is_named(source, target, reason) -> None:
    assert reasons(source, target) == [reason]


@pytest.mark.parametrize(
    "text", "Größe GRÖSSE Straße façade naïve Ærø €5 “so” Łódź namų Ελλάδα Привет \ufeffa".split()
)
def test_whatever_was_misread_is_found(text) -> None:
    misread = text.encode().decode("cp1252", errors="replace")
    assert "encoding" in reasons(f"{ENGLISH} {misread}", GERMAN)
    assert reasons(f"{ENGLISH} {text}", f"{GERMAN} {text}") == []


@pytest.mark.variants(3)
@pytest.mark.parametrize("unit", ["a", "a:", "www.", "/", "%(", "&a", "Ã", "1,", "<a", "{", "`:a"])
def test_no_text_is_long_enough_to_hang_on(unit) -> None:
    # A quadratic search would take hours.
    assert "length" in reasons(unit * 300_000, f"`<{unit}" * 100_000)


def test_limits_are_kept_to() -> None:
    assert reasons(ENGLISH, GERMAN, Limits(max_length=9)) == ["length"]
    assert reasons(ENGLISH, GERMAN, Limits(min_letters=0.99)) == ["letters"]
    assert reasons(ENGLISH, GERMAN, norm=Norm(4.0, NORM.scripts)) == ["ratio"]
    assert reasons(ENGLISH, ENGLISH, Limits(max_identical=20)) == []
    # The same digits in another order are another number.
    strict = Limits(max_numbers=0)
    assert reasons("It was founded here in 1954.", "Es wurde 1945 hier gegründet.", strict) == ["numbers"]
    assert reasons("All 2,500 of them came by 7:30.", "Alle 2.500 kamen um 7.30 Uhr an.", strict) == []


class Identifier:
    """Identifies a language by the first word."""

    labels = ["en", "de"]

    def classify(self, sentence: str) -> tuple[str, float]:
        return ("en" if sentence.startswith("The") else "de", 0.5 if "perhaps" in sentence else 0.95)


class Certain(Identifier):
    """Is always sure."""

    def classify(self, sentence: str) -> tuple[str, float]:
        return super().classify(sentence)[0], 1.0


def test_languages() -> None:
    checker = Checker(("en_US", "de"), Identifier())
    sources = [ENGLISH, GERMAN, ENGLISH, f"{GERMAN} perhaps", "Yes."]
    measures = checker.measure(sources, [GERMAN, ENGLISH, ENGLISH, GERMAN, "Ja."])
    found = checker.judge(measures, Limits(), NORM)["language"]
    # Neither an uncertain one nor a short one is judged.
    assert found.tolist() == [False, True, True, False, False]
    assert checker.judge(measures, Limits(max_foreign=0.99), NORM)["language"].sum() == 0
    # Languages that the identifier does not know are not judged.
    unknown = Checker(("source", "de"), Identifier())
    assert unknown.unknown == ["source"] and unknown.judge(measures, Limits(), NORM)["language"].tolist()[:2] == [
        False,
        True,
    ]
    assert "language" not in Checker(("source", "target"), Identifier()).judge(measures, Limits(), NORM)


def test_one_foreign_line_does_not_allow_all_of_them() -> None:
    checker = Checker(("en", "de"), Certain())
    limits, _ = checker.propose(checker.measure([ENGLISH] * 30, [*[GERMAN] * 29, ENGLISH]))
    measures = checker.measure([ENGLISH, ENGLISH], [GERMAN, ENGLISH])
    assert checker.judge(measures, limits, NORM)["language"].tolist() == [False, True]


def test_real_languages() -> None:
    langid = pytest.importorskip("py3langid.langid", reason="the extra `clean` is not installed")
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    checker = Checker(("en", "de"), identifier)
    french = "Un vieil homme lit un journal dans le parc avec son chien."
    found = checker.judge(checker.measure([ENGLISH] * 3, [GERMAN, french, ENGLISH]), Limits(), NORM)
    assert found["language"].tolist() == [False, True, True]


def test_limits_follow_the_validation_set() -> None:
    checker = Checker(("en", "zh"))
    sources, targets = [ENGLISH] * 50, ["老人在公园里看报纸。"] * 50
    limits, norm = checker.propose(checker.measure(sources, targets))
    assert norm.ratio < 0.4 and norm.scripts == (LATIN, frozenset({"CJK"}))
    # The usual ratio is no matter of length, and neither is the usual script.
    found = checker.judge(checker.measure([ENGLISH] * 2, ["老人在公园里看报纸。", GERMAN]), limits, norm)
    assert [reason for reason, flags in found.items() if flags[0]] == []
    assert {reason for reason, flags in found.items() if flags[1]} == {"ratio", "script"}
    # What the validation set has is allowed, with a margin.
    odd = ["1 2 3 4 5 6 https://a.org https://b.org https://c.org " + "<b> " * 9 + " ".join(["word"] * 300)]
    wide, _ = checker.propose(checker.measure([*sources, *odd], [*targets, "% " * 20]))
    assert wide.max_length >= 600 and wide.max_numbers > 6 and wide.max_urls > 3 and wide.max_markup > 9
    assert wide.min_letters == 0 and wide.max_ratio > limits.max_ratio
    # Without any pair, there is nothing to follow.
    assert checker.propose(checker.measure([""], [""])) == (Limits(), Norm(1.0, (frozenset(), frozenset())))


# ---- Characters ---------------------------------------------------------------------------------------------------


def scripts(sentence: str) -> dict[str, int]:
    (row,) = count_characters([sentence]).scripts
    return {name: int(count) for name, count in zip(script_names(), row, strict=True) if count}


def test_letters_by_script() -> None:
    assert scripts("Łódź, 3 наших файла!") == {"LATIN": 4, "CYRILLIC": 10}
    assert scripts("東京タワーへ") == {"CJK": 6}
    assert scripts("שלום สวัสดี") == {"HEBREW": 4, "THAI": 6}
    # Letters that any text may have say nothing about its script.
    assert scripts("3 µm, 2ª, a\u0301") == {"LATIN": 2}


def test_words_without_spaces_are_counted_by_their_letters() -> None:
    sentences = ["A dog runs.", "", "  ", "東京へ行く。", "Python で"]
    assert count_characters(sentences).words.tolist() == [3, 0, 0, 5, 2]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_the_counts_of_a_sentence_do_not_depend_on_its_neighbours(sentences) -> None:
    together = count_characters(sentences)
    assert together.kinds.sum(axis=1).tolist() == [len(sentence) for sentence in sentences]
    for i, sentence in enumerate(sentences):
        alone = count_characters([sentence])
        assert (alone.kinds[0] == together.kinds[i]).all()
        assert alone.words[0] == together.words[i]
        categories = [unicodedata.category(character) for character in sentence if ord(character) < 0x32000]
        assert alone.kinds[0, DIGIT] == categories.count("Nd")
        spaces = sum(character in "\t\n\r" for character in sentence)
        assert alone.kinds[0, SPACE] == spaces + categories.count("Zs")
        if len(categories) == len(sentence):
            assert alone.letters[0] == sum(category[0] in "LM" for category in categories)
