"""The words of the built-in corpus and their inflected forms: plurals, persons, participles.

Every form is made from a lexicon entry and a handful of endings. Agreement between words, such as the endings of
articles and adjectives, is the grammar's part, in `pocket_corpus.py`.
"""

from dataclasses import dataclass
from typing import Literal

Case = Literal["nominative", "accusative", "dative"]
Gender = Literal["m", "f", "n", "plural"]  # German articles and adjectives have no gender in the plural


# ---- entries ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phrase:
    """A piece of a sentence in both languages, already inflected."""

    english: str = ""
    german: str = ""


@dataclass(frozen=True)
class Pronoun(Phrase):
    """A pronoun in one case; `person` is the index into a verb's forms: 0 for I, 1 for he or she, 2 for we or they."""

    person: int = 1


@dataclass(frozen=True)
class Adverbial(Phrase):
    """A time or frequency; it goes with some tenses, and `habitual` when it says that something happens repeatedly."""

    tenses: tuple[str, ...] = ()
    habitual: bool = False


@dataclass(frozen=True)
class Noun:
    """A noun; its `kind` is the semantic class by which verbs and adjectives select it.

    `whose` keeps the articles natural: one says "my doctor" and "a doctor" ("anybody"), "the queen" but not "my queen"
    ("nobody"), and "my uncle" or "the uncle", but hardly "an uncle" ("family").
    """

    english: str
    german: str
    gender: Gender
    german_plural: str
    kind: str
    irregular_plural: str = ""
    weak: bool = False
    whose: Literal["anybody", "nobody", "family"] = "anybody"

    @property
    def english_plural(self) -> str:
        """`books`, or the irregular form from the lexicon."""
        return self.irregular_plural or add_s(self.english)

    def inflect(self, case: Case, plural: bool) -> str:
        """The German form: `Kind`, `Kindern`; weak nouns look plural in every case but one, `den Jungen`."""
        if not plural:
            return self.german_plural if self.weak and case != "nominative" else self.german
        return self.german_plural + ("n" if case == "dative" and self.german_plural[-1] not in "ns" else "")


@dataclass(frozen=True)
class Adjective:
    """An adjective for nouns of certain kinds.

    `use` is its use after "is": "graded" (very old), "absolute" (red, but not very red), "state"
    (graded, and it passes: tired today) or "attributive" (only before a noun). Two adjectives that are `about` the
    same quality could contradict each other, so a sentence has at most one of them. `stem` takes the endings.
    """

    english: str
    german: str
    kinds: tuple[str, ...]
    use: Literal["graded", "absolute", "state", "attributive"] = "graded"
    about: str = ""
    irregular_stem: str = ""

    @property
    def stem(self) -> str:
        """The stem that takes the German endings: `rot`, `teur`."""
        return self.irregular_stem or self.german


@dataclass(frozen=True)
class Determiner:
    """A determiner; `pattern` selects its German endings: those of "der", those of "ein", or none ("zwei")."""

    english: str
    german: str
    pattern: Literal["der", "ein", "none"]
    number: Literal["singular", "plural", "both"] = "both"
    definite: bool = True
    english_plural: str = ""


@dataclass(frozen=True)
class Verb:
    """A verb by its principal parts, as dictionaries give them; a regular verb needs only the first.

    `english` is the infinitive, then the participle: "give, given". `german` is the infinitive with a bar after a
    separable particle, then the third person and the participle: "auf|stehen, steht, gestanden".

    `aspect` limits the use of the verb:
        "state": present tense only, without adverbs (know);
        "event": not with "can" or "must" (forget);
        "transfer": not repeated with the same object (give, eat);
        "action" and "activity": no limits; an activity lasts, so it can stand after "while" (sleep).
    """

    english: str
    german: str
    aspect: Literal["state", "event", "transfer", "action", "activity"]
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    case: Case = "accusative"
    auxiliary: Literal["haben", "sein"] = "haben"
    recipient: bool = False
    places: tuple[str, ...] = ()
    company: tuple[str, ...] = ()

    @property
    def english_infinitive(self) -> str:
        """`give`, `look for`."""
        return self.english.split(", ")[0]

    @property
    def infinitive(self) -> str:
        """`geben`, `aufmachen`."""
        return self.german.split(", ")[0].replace("|", "")

    @property
    def particle(self) -> str:
        """`auf` in `aufmachen`; empty for an inseparable verb."""
        return self.german.rpartition("|")[0]

    def english_present(self, person: int) -> str:
        """`opens`, `looks for`: a verb of two words inflects the first."""
        first, *rest = self.english_infinitive.split()
        return " ".join([add_s(first) if person == 1 else first, *rest])

    def english_participle(self) -> str:
        """`opened`, `looked for`, or the irregular form from the lexicon."""
        infinitive, *irregular = self.english.split(", ")
        first, *rest = infinitive.split()
        return irregular[0] if irregular else " ".join([first + ("d" if first.endswith("e") else "ed"), *rest])

    def german_present(self, person: int) -> str:
        """`mache`, `macht`, `machen`: the finite form without its particle."""
        base, *irregular = self.german.rpartition("|")[2].split(", ")
        if base in GERMAN_FINITE:
            return GERMAN_FINITE[base][person]
        stem = base.removesuffix("en")
        return (stem + "e", irregular[0] if irregular else with_t(stem), base)[person]

    def german_participle(self) -> str:
        """`aufgemacht`, `gegeben`; no ge- after an unstressed prefix or in -ieren: `besucht`, `repariert`."""
        base, *irregular = self.german.rpartition("|")[2].split(", ")
        prefix = "" if base.startswith(("be", "ver")) or base.endswith("ieren") else "ge"
        return self.particle + (irregular[1] if irregular else prefix + with_t(base.removesuffix("en")))


def with_t(stem: str) -> str:
    """The German -t of the third person and of regular participles: `kauft`, `arbeitet`."""
    return stem + ("et" if stem.endswith(("t", "d")) else "t")


def add_s(word: str) -> str:
    """The English -s of plurals and of the third person: `books`, `boxes`, `libraries`, `plays`."""
    if word.endswith(("s", "x", "sh", "ch")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


# ---- the tables ---------------------------------------------------------------------------------------------------

PEOPLE = ("adult", "child")
BEINGS = (*PEOPLE, "animal")
COLOURED = ("book", "object", "clothes", "dish", "container", "device", "vehicle", "opening")
SOLID = (*COLOURED, "picture")
THINGS = (*SOLID, "paper")
PLACES = ("indoors", "nature", "town")

NOUNS: dict[str, Noun] = {
    noun.english: noun
    for noun in (
        Noun("teacher", "Lehrer", "m", "Lehrer", "adult"),
        Noun("doctor", "Arzt", "m", "Ärzte", "adult"),
        Noun("neighbour", "Nachbar", "m", "Nachbarn", "adult", weak=True),
        Noun("friend", "Freund", "m", "Freunde", "adult"),
        Noun("man", "Mann", "m", "Männer", "adult", irregular_plural="men", whose="nobody"),
        Noun("woman", "Frau", "f", "Frauen", "adult", irregular_plural="women", whose="nobody"),
        Noun("farmer", "Bauer", "m", "Bauern", "adult", weak=True, whose="nobody"),
        Noun("waitress", "Kellnerin", "f", "Kellnerinnen", "adult", whose="nobody"),
        Noun("queen", "Königin", "f", "Königinnen", "adult", whose="nobody"),
        Noun("child", "Kind", "n", "Kinder", "child", irregular_plural="children"),
        Noun("girl", "Mädchen", "n", "Mädchen", "child", whose="nobody"),
        Noun("boy", "Junge", "m", "Jungen", "child", weak=True, whose="nobody"),
        Noun("uncle", "Onkel", "m", "Onkel", "adult", whose="family"),
        Noun("aunt", "Tante", "f", "Tanten", "adult", whose="family"),
        Noun("brother", "Bruder", "m", "Brüder", "child", whose="family"),
        Noun("sister", "Schwester", "f", "Schwestern", "child", whose="family"),
        Noun("daughter", "Tochter", "f", "Töchter", "child", whose="family"),
        Noun("dog", "Hund", "m", "Hunde", "animal"),
        Noun("cat", "Katze", "f", "Katzen", "animal"),
        Noun("bird", "Vogel", "m", "Vögel", "animal"),
        Noun("horse", "Pferd", "n", "Pferde", "animal"),
        Noun("book", "Buch", "n", "Bücher", "book"),
        Noun("letter", "Brief", "m", "Briefe", "paper"),
        Noun("newspaper", "Zeitung", "f", "Zeitungen", "paper"),
        Noun("picture", "Bild", "n", "Bilder", "picture"),
        Noun("ball", "Ball", "m", "Bälle", "object"),
        Noun("key", "Schlüssel", "m", "Schlüssel", "object"),
        Noun("umbrella", "Regenschirm", "m", "Regenschirme", "object"),
        Noun("doll", "Puppe", "f", "Puppen", "object"),
        Noun("present", "Geschenk", "n", "Geschenke", "object"),
        Noun("apple", "Apfel", "m", "Äpfel", "food"),
        Noun("pear", "Birne", "f", "Birnen", "food"),
        Noun("egg", "Ei", "n", "Eier", "food"),
        Noun("cake", "Kuchen", "m", "Kuchen", "food"),
        Noun("coat", "Mantel", "m", "Mäntel", "clothes"),
        Noun("jacket", "Jacke", "f", "Jacken", "clothes"),
        Noun("shirt", "Hemd", "n", "Hemden", "clothes"),
        Noun("cup", "Tasse", "f", "Tassen", "dish"),
        Noun("plate", "Teller", "m", "Teller", "dish"),
        Noun("glass", "Glas", "n", "Gläser", "dish"),
        Noun("knife", "Messer", "n", "Messer", "dish", irregular_plural="knives"),
        Noun("suitcase", "Koffer", "m", "Koffer", "container"),
        Noun("bag", "Tasche", "f", "Taschen", "container"),
        Noun("box", "Kiste", "f", "Kisten", "container"),
        Noun("window", "Fenster", "n", "Fenster", "opening"),
        Noun("door", "Tür", "f", "Türen", "opening"),
        Noun("car", "Auto", "n", "Autos", "vehicle"),
        Noun("bicycle", "Fahrrad", "n", "Fahrräder", "vehicle"),
        Noun("clock", "Uhr", "f", "Uhren", "device"),
        Noun("lamp", "Lampe", "f", "Lampen", "device"),
        Noun("kitchen", "Küche", "f", "Küchen", "indoors"),
        Noun("library", "Bibliothek", "f", "Bibliotheken", "indoors"),
        Noun("house", "Haus", "n", "Häuser", "indoors"),
        Noun("hotel", "Hotel", "n", "Hotels", "indoors"),
        Noun("garden", "Garten", "m", "Gärten", "nature"),
        Noun("park", "Park", "m", "Parks", "nature"),
        Noun("forest", "Wald", "m", "Wälder", "nature"),
        Noun("town", "Stadt", "f", "Städte", "town"),
        Noun("village", "Dorf", "n", "Dörfer", "town"),
    )
}

ADJECTIVES: dict[str, Adjective] = {
    adjective.english: adjective
    for adjective in (
        Adjective("old", "alt", ("adult", "animal", *THINGS, *PLACES), about="age"),
        Adjective("young", "jung", ("adult", "animal"), about="age"),
        Adjective("little", "klein", ("child", "animal", "food", *SOLID, *PLACES), use="attributive", about="size"),
        Adjective("big", "groß", ("animal", "food", *SOLID, *PLACES), about="size"),
        Adjective("new", "neu", THINGS, use="absolute", about="age"),
        Adjective("red", "rot", COLOURED, use="absolute", about="colour"),
        Adjective("blue", "blau", COLOURED, use="absolute", about="colour"),
        Adjective("black", "schwarz", ("animal", *COLOURED), use="absolute", about="colour"),
        Adjective("white", "weiß", ("animal", *COLOURED), use="absolute", about="colour"),
        Adjective("beautiful", "schön", ("animal", *THINGS, *PLACES)),
        Adjective("expensive", "teuer", ("food", *SOLID), irregular_stem="teur"),
        Adjective("important", "wichtig", ("book", "paper")),
        Adjective("heavy", "schwer", ("book", "container", "device")),
        Adjective("dirty", "schmutzig", ("clothes", "dish", "container", "vehicle", "opening")),
        Adjective("empty", "leer", ("container", *PLACES), use="absolute"),
        Adjective("fresh", "frisch", ("food",)),
        Adjective("famous", "berühmt", ("adult", "picture", "book", "town")),
        Adjective("quiet", "ruhig", PLACES),
        Adjective("friendly", "freundlich", BEINGS, about="friend"),  # not: a friendly friend
        Adjective("clever", "klug", BEINGS),
        Adjective("tired", "müde", BEINGS, use="state", irregular_stem="müd"),
        Adjective("hungry", "hungrig", BEINGS, use="state"),
        Adjective("happy", "glücklich", PEOPLE, use="state"),
        Adjective("sick", "krank", BEINGS, use="state"),
    )
}

# fmt: off
# a table is read by its rows: the formatter would give every cell a line of its own
VERBS: dict[str, Verb] = {
    verb.english_infinitive: verb
    for verb in (
        # somebody, to somebody, something
        Verb("give, given", "geben, gibt, gegeben", "transfer", PEOPLE,
             ("book", "paper", "picture", "object", "food", "dish", "clothes"), recipient=True),
        Verb("show, shown", "zeigen", "action", PEOPLE, ("animal", *THINGS, *PLACES), recipient=True),
        Verb("send, sent", "schicken", "transfer", PEOPLE,
             ("book", "paper", "picture", "object", "clothes"), recipient=True),
        Verb("sell, sold", "verkaufen", "transfer", PEOPLE,
             ("book", "picture", "clothes", "container", "device", "vehicle"), recipient=True),
        Verb("offer", "an|bieten, bietet, geboten", "transfer", PEOPLE,
             ("food", "picture", "vehicle"), recipient=True),
        # somebody and somebody, the second one in the accusative or in the dative
        Verb("see, seen", "sehen, sieht, gesehen", "action", BEINGS, BEINGS, places=("nature", "town")),
        Verb("meet, met", "treffen, trifft, getroffen", "action", PEOPLE, PEOPLE, places=PLACES),
        Verb("visit", "besuchen", "action", PEOPLE, (*PEOPLE, "town")),
        Verb("call", "an|rufen, ruft, gerufen", "action", PEOPLE, PEOPLE),
        Verb("pick up", "ab|holen", "action", PEOPLE, PEOPLE),
        Verb("invite", "ein|laden, lädt, geladen", "action", PEOPLE, PEOPLE),
        Verb("know, known", "kennen, kennt, gekannt", "state", PEOPLE, (*PEOPLE, "town")),
        Verb("help", "helfen, hilft, geholfen", "activity", PEOPLE, PEOPLE, "dative"),
        Verb("follow", "folgen", "action", BEINGS, BEINGS, "dative", "sein"),
        # somebody and something
        Verb("look for", "suchen", "activity", PEOPLE,
             (*BEINGS, "book", "paper", "object", "clothes", "container"), places=PLACES),
        Verb("find, found", "finden, findet, gefunden", "transfer", PEOPLE,
             ("animal", "book", "paper", "picture", "object", "container"), places=PLACES),
        Verb("open", "auf|machen", "action", PEOPLE, ("opening", "container")),
        Verb("close", "zu|machen", "action", PEOPLE, ("opening", "container")),
        Verb("wash", "waschen, wäscht, gewaschen", "activity", PEOPLE, ("clothes", "vehicle")),
        Verb("repair", "reparieren", "activity", PEOPLE, ("device", "vehicle", "opening")),
        Verb("read, read", "lesen, liest, gelesen", "activity", PEOPLE,
             ("book", "paper"), places=("indoors", "nature")),
        Verb("eat, eaten", "essen, isst, gegessen", "transfer", PEOPLE, ("food",), places=("indoors", "nature")),
        Verb("buy, bought", "kaufen", "transfer", PEOPLE,
             ("animal", "food", "book", "picture", "object", "clothes", "dish", "container", "device", "vehicle"),
             places=("town",)),
        Verb("put on, put on", "an|ziehen, zieht, gezogen", "action", PEOPLE, ("clothes",)),
        Verb("forget, forgotten", "vergessen, vergisst, vergessen", "event", PEOPLE,
             ("book", "paper", "object", "clothes", "container")),
        Verb("need", "brauchen", "state", PEOPLE, ("book", "object", "dish", "clothes", "container", "vehicle")),
        # somebody alone
        Verb("sleep, slept", "schlafen, schläft, geschlafen", "activity", BEINGS, places=PLACES),
        Verb("work", "arbeiten", "activity", PEOPLE, places=PLACES, company=PEOPLE),
        Verb("sing, sung", "singen, singt, gesungen", "activity", PEOPLE, places=PLACES, company=PEOPLE),
        Verb("dance", "tanzen", "activity", PEOPLE, places=PLACES, company=PEOPLE),
        Verb("play", "spielen", "activity", ("child", "animal"),
             places=("indoors", "nature"), company=("child", "animal")),
        Verb("get up, got up", "auf|stehen, steht, gestanden", "action", PEOPLE, auxiliary="sein"),
        Verb("fall asleep, fallen asleep", "ein|schlafen, schläft, geschlafen", "event", BEINGS,
             auxiliary="sein", places=PLACES),
        Verb("come back, come back", "zurück|kommen, kommt, gekommen", "action", BEINGS, auxiliary="sein"),
        Verb("disappear", "verschwinden, verschwindet, verschwunden", "event",
             (*BEINGS, "book", "paper", "object", "clothes", "container"), auxiliary="sein",
             places=("nature", "town")),
    )
}
# fmt: on
BE = Verb("be, been", "sein, ist, gewesen", "state", auxiliary="sein")

DETERMINERS: dict[str, Determiner] = {
    determiner.english: determiner
    for determiner in (
        Determiner("the", "d", "der", english_plural="the"),
        Determiner("this", "dies", "der", english_plural="these"),
        Determiner("every", "jed", "der", number="singular"),
        Determiner("a", "ein", "ein", definite=False),  # its plural is no word at all: a book, books
        Determiner("no", "kein", "ein", number="singular", definite=False),
        Determiner("my", "mein", "ein", english_plural="my"),
        Determiner("our", "unser", "ein", english_plural="our"),
        Determiner("two", "zwei", "none", number="plural", definite=False, english_plural="two"),
        Determiner("three", "drei", "none", number="plural", definite=False, english_plural="three"),
    )
}

PRONOUNS = (
    Pronoun("I", "ich", 0),
    Pronoun("I", "ich", 0),
    Pronoun("he", "er", 1),
    Pronoun("she", "sie", 1),
    Pronoun("we", "wir", 2),
)

# what stands first in the sentence
TIMES = (
    Adverbial("today", "heute", ("present", "perfect", "can", "must")),
    Adverbial("this morning", "heute Morgen", ("perfect",)),
    Adverbial("this week", "diese Woche", ("perfect", "must")),
    Adverbial("tomorrow", "morgen", ("will", "can", "must")),
    Adverbial("next week", "nächste Woche", ("will", "can")),
    Adverbial("soon", "bald", ("will",)),
    Adverbial("every morning", "jeden Morgen", ("present", "must"), habitual=True),
    Adverbial("on Sundays", "sonntags", ("present", "can"), habitual=True),
    Adverbial("in the evening", "am Abend", ("present",), habitual=True),
)
# what stands where "not" would stand
ADVERBS = (
    Adverbial("often", "oft", ("present", "perfect"), habitual=True),
    Adverbial("sometimes", "manchmal", ("present",), habitual=True),
    Adverbial("rarely", "selten", ("present",), habitual=True),
    Adverbial("always", "immer", ("present", "must"), habitual=True),
    Adverbial("never", "nie", ("present", "perfect", "will", "can"), habitual=True),
    Adverbial("already", "schon", ("perfect",)),
)

# I, he or she, we or they
ENGLISH_FINITE = {"be": ("am", "is", "are"), "have": ("have", "has", "have"), "do": ("do", "does", "do")}
GERMAN_FINITE = {
    "sein": ("bin", "ist", "sind"),
    "haben": ("habe", "hat", "haben"),
    "werden": ("werde", "wird", "werden"),
    "können": ("kann", "kann", "können"),
    "müssen": ("muss", "muss", "müssen"),
}
MODALS = {"will": "werden", "can": "können", "must": "müssen"}
