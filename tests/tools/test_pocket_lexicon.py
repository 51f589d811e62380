"""The lexicon's forms against tables written by hand: English plurals, German noun forms, conjugations."""

from collections import Counter

import pytest

from tools.pocket_lexicon import (
    ADJECTIVES,
    ADVERBS,
    DETERMINERS,
    NOUNS,
    PRONOUNS,
    TIMES,
    VERBS,
    add_s,
    with_t,
)

# she ..., she has ...; ich ..., er ..., wir ..., Perfekt
CONJUGATIONS = """
gives, given; gebe, gibt, geben, hat gegeben
shows, shown; zeige, zeigt, zeigen, hat gezeigt
sends, sent; schicke, schickt, schicken, hat geschickt
sells, sold; verkaufe, verkauft, verkaufen, hat verkauft
offers, offered; biete an, bietet an, bieten an, hat angeboten
sees, seen; sehe, sieht, sehen, hat gesehen
meets, met; treffe, trifft, treffen, hat getroffen
visits, visited; besuche, besucht, besuchen, hat besucht
calls, called; rufe an, ruft an, rufen an, hat angerufen
picks up, picked up; hole ab, holt ab, holen ab, hat abgeholt
invites, invited; lade ein, lädt ein, laden ein, hat eingeladen
knows, known; kenne, kennt, kennen, hat gekannt
helps, helped; helfe, hilft, helfen, hat geholfen
follows, followed; folge, folgt, folgen, ist gefolgt
looks for, looked for; suche, sucht, suchen, hat gesucht
finds, found; finde, findet, finden, hat gefunden
opens, opened; mache auf, macht auf, machen auf, hat aufgemacht
closes, closed; mache zu, macht zu, machen zu, hat zugemacht
washes, washed; wasche, wäscht, waschen, hat gewaschen
repairs, repaired; repariere, repariert, reparieren, hat repariert
reads, read; lese, liest, lesen, hat gelesen
eats, eaten; esse, isst, essen, hat gegessen
buys, bought; kaufe, kauft, kaufen, hat gekauft
puts on, put on; ziehe an, zieht an, ziehen an, hat angezogen
forgets, forgotten; vergesse, vergisst, vergessen, hat vergessen
needs, needed; brauche, braucht, brauchen, hat gebraucht
sleeps, slept; schlafe, schläft, schlafen, hat geschlafen
works, worked; arbeite, arbeitet, arbeiten, hat gearbeitet
sings, sung; singe, singt, singen, hat gesungen
dances, danced; tanze, tanzt, tanzen, hat getanzt
plays, played; spiele, spielt, spielen, hat gespielt
gets up, got up; stehe auf, steht auf, stehen auf, ist aufgestanden
falls asleep, fallen asleep; schlafe ein, schläft ein, schlafen ein, ist eingeschlafen
comes back, come back; komme zurück, kommt zurück, kommen zurück, ist zurückgekommen
disappears, disappeared; verschwinde, verschwindet, verschwinden, ist verschwunden
"""

# English plural; German singular in the accusative, plural in the dative
NOUN_FORMS = {
    "teacher": ("teachers", "Lehrer", "Lehrern"),
    "boy": ("boys", "Jungen", "Jungen"),
    "neighbour": ("neighbours", "Nachbarn", "Nachbarn"),
    "child": ("children", "Kind", "Kindern"),
    "library": ("libraries", "Bibliothek", "Bibliotheken"),
    "box": ("boxes", "Kiste", "Kisten"),
    "knife": ("knives", "Messer", "Messern"),
    "car": ("cars", "Auto", "Autos"),
    "apple": ("apples", "Apfel", "Äpfeln"),
}


@pytest.mark.parametrize("english", NOUN_FORMS)
def test_noun_forms(english: str) -> None:
    noun = NOUNS[english]
    assert noun.inflect("nominative", plural=False) == noun.german
    assert noun.inflect("nominative", plural=True) == noun.german_plural
    forms = noun.english_plural, noun.inflect("accusative", plural=False), noun.inflect("dative", plural=True)
    assert forms == NOUN_FORMS[english]


def test_regular_endings() -> None:
    assert [add_s(word) for word in ("play", "fly", "wash", "fix", "see")] == [
        "plays",
        "flies",
        "washes",
        "fixes",
        "sees",
    ]
    assert [with_t(stem) for stem in ("kauf", "arbeit", "red")] == ["kauft", "arbeitet", "redet"]


def test_the_stem_of_an_adjective_may_differ_from_its_plain_form() -> None:
    assert [ADJECTIVES[name].stem for name in ("red", "expensive", "tired")] == ["rot", "teur", "müd"]


@pytest.mark.parametrize("verb", VERBS)
def test_conjugation(verb: str) -> None:
    entry = VERBS[verb]
    german = [f"{entry.german_present(person)} {entry.particle}".strip() for person in range(3)]
    perfect = f"{'ist' if entry.auxiliary == 'sein' else 'hat'} {entry.german_participle()}"
    forms = f"{entry.english_present(1)}, {entry.english_participle()}; {', '.join([*german, perfect])}"
    assert forms in CONJUGATIONS.splitlines()


def test_no_two_entries_of_the_lexicon_share_a_word() -> None:
    # one sentence with both words is too rare to be drawn by chance, so this looks at the words
    entries = [(noun.english, noun.german) for noun in NOUNS.values()]
    entries += [(adjective.english, adjective.german) for adjective in ADJECTIVES.values()]
    entries += [(verb.english_infinitive, verb.infinitive) for verb in VERBS.values()]
    entries += [(determiner.english, determiner.german) for determiner in DETERMINERS.values()]
    entries += [(one.english, one.german) for one in {*PRONOUNS, *TIMES, *ADVERBS}]
    for side in (0, 1):
        counts = Counter(entry[side] for entry in entries)
        assert [word for word, count in counts.items() if count > 1] == []
