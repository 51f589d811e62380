"""The grammar of the built-in corpus: right German, right English, one translation each way, and the shipped file."""

from __future__ import annotations

import lzma
import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from hf_vaswani.data.pocket_corpus import FILE, PocketPair, read_pocket_corpus
from tools.pocket_corpus import (
    ADJECTIVES,
    ADVERBS,
    BE,
    DETERMINERS,
    NOUNS,
    PRONOUNS,
    TIMES,
    VERBS,
    Case,
    Clause,
    NounPhrase,
    Phrase,
    Pronoun,
    Sentence,
    corpus_text,
    draw_sentence,
    prepositional,
    relative_pronoun,
)

from .test_pocket_lexicon import CONJUGATIONS

# ---- building sentences by hand -----------------------------------------------------------------------------------


def phrase(text: str, relative: Clause | None = None) -> NounPhrase:
    """Look up "the old teacher" word by word; without a determiner it is the plural of "a"."""
    *before, last = text.split()
    plurals = {noun.english_plural: noun for noun in NOUNS.values()}
    noun = NOUNS.get(last) or plurals[last]
    determiners = {entry.english: entry for entry in DETERMINERS.values()}
    determiners |= {"an": DETERMINERS["a"], "these": DETERMINERS["this"]}
    determiner = determiners[before.pop(0)] if before and before[0] in determiners else DETERMINERS["a"]
    adjective = ADJECTIVES[before[0]] if before else None
    return NounPhrase(determiner, noun, adjective, plural=last in plurals, relative=relative)


def subject_of(text: str) -> NounPhrase | Pronoun:
    return next((pronoun for pronoun in PRONOUNS if pronoun.english == text), None) or phrase(text)


def time(text: str) -> Phrase:
    return next(entry for entry in TIMES if entry.english == text)


def adverb(text: str) -> Phrase:
    return next(entry for entry in ADVERBS if entry.english == text)


def inside(text: str) -> Phrase:
    return prepositional("in", "in", phrase(text))


def together_with(text: str) -> Phrase:
    return prepositional("with", "mit", phrase(text))


def clause(
    subject: str | NounPhrase | Pronoun, verb: str, object: str | NounPhrase = "", to: str = "", **rest: Any
) -> Clause:
    return Clause(
        subject_of(subject) if isinstance(subject, str) else subject,
        BE if verb == "be" else VERBS[verb],
        recipient=phrase(to) if to else None,
        object=(phrase(object) if isinstance(object, str) else object) if object else None,
        **rest,
    )


def who(head: str, verb: str, object: str = "", **rest: Any) -> NounPhrase:
    """`head` with a relative clause in which it is the subject."""
    pronoun = relative_pronoun(phrase(head), "nominative")
    return phrase(head, relative=clause(pronoun, verb, object, **rest))


def which(head: str, subject: str, verb: str, **rest: Any) -> NounPhrase:
    """`head` with a relative clause in which it is the object."""
    pronoun = relative_pronoun(phrase(head), "accusative")
    return phrase(head, relative=clause(subject, verb, front=pronoun, **rest))


def while_clause(inner: Clause) -> Phrase:
    return Phrase(f"while {inner.english()},", f"während {inner.german(verb_last=True)},")


SENTENCES = {
    "The old teacher gives the little girl a red book.": (  # three genders, three cases
        clause("the old teacher", "give", "a red book", to="the little girl"),
        "Der alte Lehrer gibt dem kleinen Mädchen ein rotes Buch.",
    ),
    "Today the old teacher gives the little girl a red book.": (  # verb second after a time
        clause("the old teacher", "give", "a red book", to="the little girl", front=time("today")),
        "Heute gibt der alte Lehrer dem kleinen Mädchen ein rotes Buch.",
    ),
    "In the garden the child finds a red ball.": (  # verb second after a place, and in dem = im
        clause("the child", "find", "a red ball", front=inside("the garden")),
        "Im Garten findet das Kind einen roten Ball.",
    ),
    "The child has opened the window.": (  # separable verb in the perfect
        clause("the child", "open", "the window", tense="perfect"),
        "Das Kind hat das Fenster aufgemacht.",
    ),
    "The child who opens the window sings.": (  # separable verb in a relative clause is one word
        clause(who("the child", "open", "the window"), "sing"),
        "Das Kind, das das Fenster aufmacht, singt.",
    ),
    "The child does not open the window.": (  # separable verb, negated
        clause("the child", "open", "the window", negated=True),
        "Das Kind macht das Fenster nicht auf.",
    ),
    "The waitress offers our old uncle an apple.": (  # strong separable verb; an before a vowel
        clause("the waitress", "offer", "an apple", to="our old uncle"),
        "Die Kellnerin bietet unserem alten Onkel einen Apfel an.",
    ),
    "The bird has disappeared in the forest.": (  # perfect with sein
        clause("the bird", "disappear", tense="perfect", tail=inside("the forest")),
        "Der Vogel ist im Wald verschwunden.",
    ),
    "We have visited the village.": (  # no ge- after an unstressed prefix
        clause("we", "visit", "the village", tense="perfect"),
        "Wir haben das Dorf besucht.",
    ),
    "He has repaired two bicycles.": (  # no ge- in -ieren
        clause("he", "repair", "two bicycles", tense="perfect"),
        "Er hat zwei Fahrräder repariert.",
    ),
    "The boy does not see a dog.": (  # kein: an indefinite object, negated
        clause("the boy", "see", "a dog", negated=True),
        "Der Junge sieht keinen Hund.",
    ),
    "I will not help a farmer.": (  # kein in the dative
        clause("I", "help", "a farmer", tense="will", negated=True),
        "Ich werde keinem Bauern helfen.",
    ),
    "The boy does not see the dog.": (  # nicht after a definite object
        clause("the boy", "see", "the dog", negated=True),
        "Der Junge sieht den Hund nicht.",
    ),
    "The dog does not sleep in our kitchen.": (  # nicht before a place
        clause("the dog", "sleep", negated=True, tail=inside("our kitchen")),
        "Der Hund schläft nicht in unserer Küche.",
    ),
    "No little girl eats an egg.": (  # kein in the subject
        clause("no little girl", "eat", "an egg"),
        "Kein kleines Mädchen isst ein Ei.",
    ),
    "The aunt often washes the car.": (  # an adverb follows the definite object
        clause("the aunt", "wash", "the car", adverb=adverb("often")),
        "Die Tante wäscht das Auto oft.",
    ),
    "The aunt has never bought a cake.": (  # an adverb comes before the indefinite object
        clause("the aunt", "buy", "a cake", adverb=adverb("never"), tense="perfect"),
        "Die Tante hat nie einen Kuchen gekauft.",
    ),
    "The uncle reads the book in the library.": (  # a definite object comes before the place
        clause("the uncle", "read", "the book", tail=inside("the library")),
        "Der Onkel liest das Buch in der Bibliothek.",
    ),
    "The man has followed an old neighbour.": (  # weak noun in the dative
        clause("the man", "follow", "an old neighbour", tense="perfect"),
        "Der Mann ist einem alten Nachbarn gefolgt.",
    ),
    "The waitress shows two happy women three pictures.": (  # dative plural without an article
        clause("the waitress", "show", "three pictures", to="two happy women"),
        "Die Kellnerin zeigt zwei glücklichen Frauen drei Bilder.",
    ),
    "The girl plays with a big cat.": (  # mit with the dative
        clause("the girl", "play", tail=together_with("a big cat")),
        "Das Mädchen spielt mit einer großen Katze.",
    ),
    "The aunt has read the book which the boy has found.": (  # relative clause about an object ends the sentence
        clause("the aunt", "read", which("the book", "the boy", "find", tense="perfect"), tense="perfect"),
        "Die Tante hat das Buch gelesen, das der Junge gefunden hat.",
    ),
    "The key which I need has disappeared.": (  # relative pronoun in the accusative
        clause(which("the key", "I", "need"), "disappear", tense="perfect"),
        "Der Schlüssel, den ich brauche, ist verschwunden.",
    ),
    "Three dogs which have fallen asleep do not follow the farmer.": (  # relative clause in the plural
        clause(who("three dogs", "fall asleep", tense="perfect"), "follow", "the farmer", negated=True),
        "Drei Hunde, die eingeschlafen sind, folgen dem Bauern nicht.",
    ),
    "While the children work, the teacher opens the door.": (  # while: verb last, then verb second
        clause("the teacher", "open", "the door", front=while_clause(clause("the children", "work"))),
        "Während die Kinder arbeiten, macht der Lehrer die Tür auf.",
    ),
    "This week she has been sick.": (  # perfect of to be
        clause("she", "be", tail=Phrase("sick", "krank"), tense="perfect", front=time("this week")),
        "Diese Woche ist sie krank gewesen.",
    ),
    "She sleeps while he puts on the white coat.": (
        clause("she", "sleep"),
        clause("he", "put on", "the white coat"),
        "Sie schläft, während er den weißen Mantel anzieht.",
    ),
}


@pytest.mark.parametrize("english", SENTENCES)
def test_the_grammar_writes_the_sentence_that_a_native_speaker_writes(english: str) -> None:
    *clauses, german = SENTENCES[english]
    assert Sentence(*clauses).write() == (english, german)


# ---- word alignments, against links made by hand -------------------------------------------------------------------

LINKS = {
    "one word for one word": (
        Sentence(clause("the old teacher", "give", "a red book", to="the little girl", front=time("today"))),
        "Today-Heute the-der old-alte teacher-Lehrer gives-gibt the-dem little-kleinen girl-Mädchen a-ein red-rotes "
        "book.-Buch.",
    ),
    "in dem = im; look for": (
        Sentence(clause("he", "look for", "three dogs", tail=inside("the garden"))),
        "He-Er looks-sucht for-sucht three-drei dogs-Hunde. in-im the-im garden.-Garten",
    ),
    "kein is not and a; does is no word": (
        Sentence(clause("she", "buy", "a ball", negated=True)),
        "She-Sie not-keinen buy-kauft a-keinen ball.-Ball.",
    ),
    "cannot is kann and nicht": (
        Sentence(clause("he", "visit", "the aunt", tense="can", negated=True)),
        "He-Er cannot-kann cannot-nicht visit-besuchen. the-die aunt.-Tante",
    ),
    "a separable verb is two words, the perfect is two words": (
        Sentence(clause("we", "close", "the box"), clause("he", "put on", "a coat", tense="perfect")),
        "We-Wir close-machen close-zu, the-die box-Kiste while-während he-er has-hat. put-angezogen on-angezogen "
        "a-einen coat.-Mantel",
    ),
    "a relative clause": (
        Sentence(clause(who("the child", "be", tail=Phrase("very tired", "sehr müde")), "be", tense="will",
                        tail=Phrase("sick", "krank"))),
        "The-Das child-Kind, who-das is-ist, very-sehr tired-müde will-wird be-sein. sick.-krank",
    ),
    "a phrase of another number of words": (
        Sentence(clause("I", "read", "books", front=time("in the evening"))),
        "In-Am In-Abend the-Am the-Abend evening-Am evening-Abend I-ich read-lese books.-Bücher.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_words_that_belong_together_are_linked(name: str) -> None:
    sentence, expected = LINKS[name]
    english, german = (text.split() for text in sentence.write())
    assert " ".join(f"{english[i]}-{german[j]}" for i, j in sentence.links()) == expected


def test_every_word_but_does_is_linked(pairs: list[PocketPair]) -> None:
    for english, german, links in pairs:
        linked = [tuple(map(int, link.split("-"))) for link in links.split()]
        left = {word for i, word in enumerate(english.split()) if i not in {link[0] for link in linked}}
        assert left <= {"do", "does"}
        assert {link[1] for link in linked} == set(range(len(german.split())))


# ---- forms, against tables written by hand ------------------------------------------------------------------------

CASES: tuple[Case, ...] = ("nominative", "accusative", "dative")
DECLENSIONS = {
    "the old man": ("der alte Mann", "den alten Mann", "dem alten Mann"),
    "the old woman": ("die alte Frau", "die alte Frau", "der alten Frau"),
    "the little child": ("das kleine Kind", "das kleine Kind", "dem kleinen Kind"),
    "the old men": ("die alten Männer", "die alten Männer", "den alten Männern"),
    "this clever boy": ("dieser kluge Junge", "diesen klugen Jungen", "diesem klugen Jungen"),
    "these old windows": ("diese alten Fenster", "diese alten Fenster", "diesen alten Fenstern"),
    "every tired farmer": ("jeder müde Bauer", "jeden müden Bauern", "jedem müden Bauern"),
    "an old man": ("ein alter Mann", "einen alten Mann", "einem alten Mann"),
    "an expensive lamp": ("eine teure Lampe", "eine teure Lampe", "einer teuren Lampe"),
    "a red book": ("ein rotes Buch", "ein rotes Buch", "einem roten Buch"),
    "red books": ("rote Bücher", "rote Bücher", "roten Büchern"),
    "no fresh egg": ("kein frisches Ei", "kein frisches Ei", "keinem frischen Ei"),
    "my sick friend": ("mein kranker Freund", "meinen kranken Freund", "meinem kranken Freund"),
    "our clever daughters": ("unsere klugen Töchter", "unsere klugen Töchter", "unseren klugen Töchtern"),
    "our red bicycle": ("unser rotes Fahrrad", "unser rotes Fahrrad", "unserem roten Fahrrad"),
    "two black cars": ("zwei schwarze Autos", "zwei schwarze Autos", "zwei schwarzen Autos"),
    "three doctors": ("drei Ärzte", "drei Ärzte", "drei Ärzten"),
}


@pytest.mark.parametrize("english", DECLENSIONS)
def test_declension(english: str) -> None:
    assert tuple(phrase(english).german(case) for case in CASES) == DECLENSIONS[english]


# ---- what is drawn ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> list[PocketPair]:
    return [pair for split in read_pocket_corpus().values() for pair in split]


def test_the_package_has_what_the_grammar_writes() -> None:
    assert corpus_text() == lzma.decompress(FILE.read_bytes()).decode()


@pytest.mark.slow
def test_each_sentence_has_one_translation_in_both_directions() -> None:
    # the drawing itself drops second occurrences, so this looks at the sentences before that
    rng = Random(11)
    german_of: dict[str, str] = {}
    english_of: dict[str, str] = {}
    for _ in range(30_000):
        english, german = draw_sentence(rng).write()
        assert german_of.setdefault(english, german) == german
        assert english_of.setdefault(german, english) == english


def test_the_whole_lexicon_is_used(pairs: list[PocketPair]) -> None:
    words = {word for english, *_ in pairs for word in re.findall(r"\w+", english)}
    for noun in NOUNS.values():
        assert {noun.english, noun.english_plural} <= words
    assert set(ADJECTIVES) <= words
    for verb in VERBS:
        assert verb.split()[0] in words


# ---- the drawn sentences, checked without the grammar -------------------------------------------------------------

# nouns whose singular is not also a plural
GENDERS = {
    "m": "Arzt Freund Mann Bruder Hund Vogel Brief Ball Regenschirm Apfel Mantel Garten Park Wald",
    "f": "Tante Frau Kellnerin Königin Schwester Tochter Katze Zeitung Puppe Birne Jacke Tasse Tasche Kiste Tür Uhr "
    "Lampe Küche Bibliothek Stadt",
    "n": "Kind Pferd Buch Bild Geschenk Ei Hemd Glas Auto Fahrrad Haus Hotel Dorf",
}
# the articles that such a noun can have, and the ending of the adjective between them
AGREEMENT = {
    "m": "(der|dieser|jeder) e|(den|diesen|jeden|EINen) en|(dem|diesem|jedem|EINem|im) en|EIN er",
    "f": "(die|diese|jede|EINe) e|(der|dieser|jeder|EINer) en",
    "n": "(das|dieses|jedes) e|(dem|diesem|jedem|EINem|im) en|EIN es",
}
ARTICLE = r"der|die|das|den|dem|im|dies\w+|jed\w+|(?:k?ein|mein|unser)\w*"
AUXILIARIES = {"bin", "ist", "sind", "habe", "hat", "haben", "werde", "wird", "werden", "kann", "können"}
AUXILIARIES |= {"muss", "müssen"}
PRESENT = [form for line in CONJUGATIONS.strip().splitlines() for form in line.split("; ")[1].split(", ")[:3]]
SECOND = AUXILIARIES | {form.split()[0] for form in PRESENT}
LAST = AUXILIARIES | {"".join(reversed(form.split())) for form in PRESENT}
NOUN_PHRASE = r"(?:[a-zäöüß]+ ){0,2}[A-ZÄÖÜ]\w+"
FIRST = (
    "heute Morgen|heute|diese Woche|morgen|nächste Woche|bald|jeden Morgen|sonntags|am Abend|während [^,]+,"
    rf"|(?:im|in) {NOUN_PHRASE}|ich|er|sie|wir|{NOUN_PHRASE}(?:, (?:der|die|das|den) [^,]+,)?"
)


def uncapitalised(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def test_spelling(pairs: list[PocketPair]) -> None:
    for pair in pairs:
        for sentence in pair[:2]:
            assert re.fullmatch(r"[A-ZÄÖÜ]\w*(,? [\wäöüß]+)+\.", sentence), sentence


def test_a_and_an(pairs: list[PocketPair]) -> None:
    for english, *_ in pairs:
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", english), english


def test_english_agreement(pairs: list[PocketPair]) -> None:
    infinitives = {verb.split()[0] for verb in VERBS} | {"be"}
    for english, *_ in pairs:
        for after in re.findall(r"\b(?:two|three|these) (.*)", english, re.IGNORECASE):
            assert re.match(r"(\w+ )?(\w+s|men|women|children)\b", after), english
        for verb in re.findall(r"\b(?:do not|does not|cannot|will|must|can) (?:not |always |never )?(\w+)", english):
            assert verb in infinitives, english
        assert not re.search(r"\bI (?!always|sometimes)\w+s\b|\b([Hh]e|[Ss]he) (have|are|am|do)\b", english), english
        assert not re.search(r"\b[Ww]e (has|is|am|does)\b", english), english
        assert not re.match(r"(The|These|Two|Three) (\w+ )?(girls|boys|men|women) (has|is|does)\b", english), english


def test_articles_and_adjectives_agree_with_the_noun(pairs: list[PocketPair]) -> None:
    gender_of = {noun: gender for gender, nouns in GENDERS.items() for noun in nouns.split()}
    checked: Counter[str] = Counter()
    for _, german, _ in pairs:
        without_relative_pronouns = re.sub(", (der|die|das|den) ", ", ", uncapitalised(german))
        for article, adjective, noun in re.findall(
            rf"\b({ARTICLE}) (?:([a-zäöüß]+) )?([A-ZÄÖÜ]\w*)", without_relative_pronouns
        ):
            if noun in gender_of:
                pattern = AGREEMENT[gender_of[noun]].replace("EIN", "(kein|ein|mein|unser)")
                endings = (adjective[-2:], adjective[-1]) if adjective else ("e", "en", "er", "es")
                assert any(re.fullmatch(pattern, f"{article} {ending}") for ending in endings), german
                checked[gender_of[noun]] += 1
    assert min(checked.values()) > 2_000


def test_the_finite_verb_is_second(pairs: list[PocketPair]) -> None:
    begin = re.compile(rf"(?:{FIRST}) (?:{'|'.join(sorted(SECOND))})\b")
    for _, german, _ in pairs:
        assert begin.match(uncapitalised(german)), german


def test_the_finite_verb_is_last_in_subordinate_clauses(pairs: list[PocketPair]) -> None:
    checked: Counter[str] = Counter()
    for _, german, _ in pairs:
        for word, rest in re.findall(r"(, (?:der|die|das|den)|während) ([^,.]+)[,.]", uncapitalised(german)):
            assert rest.split()[-1] in LAST, german
            checked[word] += 1
    assert min(checked.values()) > 200


def test_an_indefinite_object_is_negated_with_kein_and_a_definite_one_with_nicht(pairs: list[PocketPair]) -> None:
    for english, german, _ in pairs:
        # "ein" before a full stop or comma is the particle of einladen or einschlafen
        assert not re.search(r"\bnicht ein(e|en|em|er|)\b(?![.,])", german), german
        negations = len(re.findall(r"\b(?:nicht|kein\w*)\b", german, re.IGNORECASE))
        assert negations == len(re.findall(r"\b(?:not|cannot|no)\b", english, re.IGNORECASE)), german
