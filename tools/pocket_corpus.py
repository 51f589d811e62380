"""The built-in English-German parallel corpus: a synchronous grammar that writes both sides of a sentence at once.

    python -m tools.pocket_corpus

This writes the corpus into the package, as a file that `hf_vaswani.data.pocket_corpus` reads. A first training needs
no download, and a test gets sentences that have exactly one right translation. The grammar reads top down: the noun
phrase, the clause, and at the end the drawing of random sentences. The words are in `pocket_lexicon.py`.

Beyond word-for-word replacement, German needs: three genders and three cases in articles and adjectives, the
verb second after a fronted phrase, separable verbs, participles and infinitives at the end, the verb last in relative
and "während" clauses, "kein" against "nicht", and the place of definite and indefinite objects around them.
Each English sentence has exactly one German translation, and vice versa. The grammar also knows which words of the two
belong together: the gold standard of a word alignment.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from random import Random
from typing import NamedTuple, TypeVar

from hf_vaswani.data.pocket_corpus import FILE

from .pocket_lexicon import (
    ADJECTIVES,
    ADVERBS,
    BE,
    BEINGS,
    DETERMINERS,
    ENGLISH_FINITE,
    GERMAN_FINITE,
    MODALS,
    NOUNS,
    PEOPLE,
    PLACES,
    PRONOUNS,
    THINGS,
    TIMES,
    VERBS,
    Adjective,
    Adverbial,
    Case,
    Determiner,
    Gender,
    Noun,
    Phrase,
    Pronoun,
    Verb,
)

T = TypeVar("T")

SIZES = {"test": 500, "validation": 500, "train": 20_000}


class Word(NamedTuple):
    """A word, and the parts of the sentence that it expresses; words of both languages that share one are linked."""

    text: str
    parts: tuple[str, ...] = ()


def words_of(text: str, *parts: str) -> list[Word]:
    """Splits a text at spaces; each word expresses all of the parts. A comma counts as a word, and expresses none."""
    return list(_words_of(text, parts))


# A lexicon of a few hundred words is inflected for twenty thousand sentences.
@cache
def _words_of(text: str, parts: tuple[str, ...]) -> tuple[Word, ...]:
    return tuple(Word(word, () if word == "," else parts) for word in text.replace(",", " ,").split())


@dataclass(frozen=True)
class LinkedPhrase(Phrase):
    """A phrase whose words are linked by their own parts."""

    english_words: tuple[Word, ...] = ()
    german_words: tuple[Word, ...] = ()


def phrase_words(phrase: Phrase, part: str = "") -> tuple[list[Word], list[Word]]:
    """
    Returns the English and the German words of a phrase. Unless it has links of its own, the first is linked to the
    first, and so on; if one side has more words than the other, each is linked to all.

    Args:
        phrase (`Phrase`): the phrase.
        part (`str`): the part of the sentence that it is, by default itself.
    """
    if isinstance(phrase, LinkedPhrase):
        return list(phrase.english_words), list(phrase.german_words)
    english, german = _sides_of(phrase.english, phrase.german, part or phrase.english)
    return list(english), list(german)


@cache
def _sides_of(english: str, german: str, part: str) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    sides = _words_of(english, (part,)), _words_of(german, (part,))
    if len(sides[0]) != len(sides[1]):
        return sides
    first, second = (tuple(Word(word.text, (f"{part}, {i}",)) for i, word in enumerate(side)) for side in sides)
    return first, second


# the endings of "dieser"; an adjective takes them too, when no article before it shows them
STRONG: dict[Gender, dict[Case, str]] = {
    "m": {"nominative": "er", "accusative": "en", "dative": "em"},
    "f": {"nominative": "e", "accusative": "e", "dative": "er"},
    "n": {"nominative": "es", "accusative": "es", "dative": "em"},
    "plural": {"nominative": "e", "accusative": "e", "dative": "en"},
}


# ---- the noun phrase ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NounPhrase:
    """A determiner, perhaps an adjective, a noun; a relative clause comes after it and is not part of its forms."""

    determiner: Determiner
    noun: Noun
    adjective: Adjective | None = None
    plural: bool = False
    relative: Clause | None = None

    @property
    def person(self) -> int:
        """Index into a verb's forms: 1 for one, 2 for several."""
        return 2 if self.plural else 1

    @property
    def gender(self) -> Gender:
        """The gender that selects the German endings; the plural has none of its own."""
        return "plural" if self.plural else self.noun.gender

    @property
    def english(self) -> str:
        """The English form, with "an" before a vowel: `the old teacher`, `an apple`, `two red books`."""
        return join(self.english_words())

    def english_words(self) -> list[Word]:
        """The words of `english`."""
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = words_of(self.adjective.english, self.adjective.english) if self.adjective else []
        words += words_of(noun, self.noun.english)
        determiner = self.determiner.english_plural if self.plural else self.determiner.english
        if determiner == "a" and words[0].text[0] in "aeiou":
            determiner = "an"
        return words_of(determiner, self.determined) + words

    @property
    def determined(self) -> str:
        """The part of the sentence that the determiner is."""
        return f"determiner of {self.noun.english}"

    def german(self, case: Case) -> str:
        """The German form, e.g. in the dative: `dem kleinen Mädchen`, `einer alten Frau`, `zwei roten Büchern`."""
        return join(self.german_words(case))

    def german_words(self, case: Case) -> list[Word]:
        """The words of `german`."""
        determiner, shows_case = self._german_determiner(case)
        words = words_of(determiner, self.determined)
        if self.adjective:
            # the case is shown once: by the article, or else by the adjective
            ending = weak_ending(self.gender, case) if shows_case else STRONG[self.gender][case]
            words += words_of(self.adjective.stem + ending, self.adjective.english)
        return words + words_of(self.noun.inflect(case, self.plural), self.noun.english)

    def _german_determiner(self, case: Case) -> tuple[str, bool]:
        stem, ending = self.determiner.german, STRONG[self.gender][case]
        if self.determiner.english == "the":
            return definite_article(self.gender, case), True
        if self.determiner.pattern == "none":
            return stem, False
        if self.determiner.english == "a" and self.plural:
            return "", False
        if self.determiner.pattern == "ein" and (self.gender, case) in ENDINGLESS:
            return stem, False
        return stem + ending, True


# "ein" has no ending here: ein Mann, ein Kind
ENDINGLESS: tuple[tuple[Gender, Case], ...] = (("m", "nominative"), ("n", "nominative"), ("n", "accusative"))


def definite_article(gender: Gender, case: Case) -> str:
    """`der`, `die`, `das`, `den`, `dem`: the endings of "dieser", but -ie for -e and -as for -es."""
    ending = STRONG[gender][case]
    return "d" + {"e": "ie", "es": "as"}.get(ending, ending)


def weak_ending(gender: Gender, case: Case) -> str:
    """The ending of an adjective after an article that shows the case: -e where it looks nominative, otherwise -en."""
    looks_nominative = case == "nominative" or (case == "accusative" and gender in ("f", "n"))
    return "e" if looks_nominative and gender != "plural" else "en"


def relative_pronoun(head: NounPhrase, case: Case) -> Pronoun:
    """`who` or `which` for a noun phrase, and `der`, `die`, `das`, `den` in the given case (no dative)."""
    english = "who" if head.noun.kind in PEOPLE else "which"
    return Pronoun(english, definite_article(head.gender, case), head.person)


def prepositional(english: str, german: str, phrase: NounPhrase) -> LinkedPhrase:
    """A preposition and a noun phrase in the dative, with `in dem` drawn together: `im Garten`."""
    part = f"{english} {phrase.noun.english}"
    before, after = words_of(english, part) + phrase.english_words(), phrase.german_words("dative")
    if (german, after[0].text) == ("in", "dem"):
        after[0] = Word("im", (part, *after[0].parts))
    else:
        after = words_of(german, part) + after
    return LinkedPhrase(join(before), join(after), tuple(before), tuple(after))


# ---- the clause ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clause:
    """A subject, a verb and what belongs to it; `english` and `german` put the same parts into two orders.

    Args:
        subject (`NounPhrase` or `Pronoun`): in a relative clause about its subject, the relative pronoun.
        tense (`str`): "present", "perfect", "will", "can" or "must".
        recipient (`NounPhrase`, *optional*): the indirect object.
        object (`NounPhrase`, *optional*): the direct object; its relative clause ends the sentence.
        adverb (`Phrase`): an adverb of frequency, in the place of "not".
        tail (`Phrase`): the place, the company, or the adjective after "is".
        front (`Phrase`): a time, place, clause or relative pronoun before the subject in English.
    """

    subject: NounPhrase | Pronoun
    verb: Verb
    tense: str = "present"
    recipient: NounPhrase | None = None
    object: NounPhrase | None = None
    negated: bool = False
    adverb: Phrase = Phrase()
    tail: Phrase = Phrase()
    front: Phrase = Phrase()

    def english(self) -> str:
        """The English clause: subject, auxiliary, "not" or adverb, verb, recipient, object, place."""
        return join(self.english_words())

    def english_words(self) -> list[Word]:
        """The words of `english`."""
        auxiliary, verb = self._english_verb()
        # "Does" says nothing that German says; "is" alone is the verb.
        part = () if auxiliary.startswith("do") else (self._auxiliary if verb else self._verb,)
        words = phrase_words(self.front)[0] + self._subject("nominative")[0] + relative_clause(self.subject)[0]
        if self.negated and auxiliary == "can":
            words += words_of("cannot", *part, self._negation)
        else:
            words += words_of(auxiliary, *part) + words_of("not" if self.negated else "", self._negation)
        words += phrase_words(self.adverb)[0] + words_of(verb, self._verb)
        words += self.recipient.english_words() if self.recipient else []
        words += self.object.english_words() + relative_clause(self.object)[0] if self.object else []
        return words + phrase_words(self.tail)[0]

    def german(self, verb_last: bool = False) -> str:
        """The German clause: the finite verb is second in a main clause and last in a subordinate one."""
        return join(self.german_words(verb_last))

    def german_words(self, verb_last: bool = False) -> list[Word]:
        """The words of `german`."""
        finite, end = self._german_verb()
        second = words_of(finite, self._verb if self.tense == "present" else self._auxiliary)
        last = words_of(end, self._verb)
        front = phrase_words(self.front)[1]
        first = self._subject("nominative")[1] + relative_clause(self.subject)[1]
        middle, relative = self._german_middle(), relative_clause(self.object)[1]
        if verb_last:
            # a particle grows together with its verb: aufmacht; anything else stays a word of its own: gegeben hat
            verb = words_of(end + finite, self._verb) if self.tense == "present" else last + second
            return front + first + middle + verb + relative
        if front:
            return front + second + first + middle + last + relative
        return first + second + middle + last + relative

    @property
    def _verb(self) -> str:
        """The part of the sentence that the verb is; "be" may be in it twice."""
        return f"{self.verb.english_infinitive} {self.tail.english}"

    @property
    def _auxiliary(self) -> str:
        return f"auxiliary of {self._verb}"

    @property
    def _negation(self) -> str:
        return f"negation of {self._verb}"

    def _subject(self, case: Case) -> tuple[list[Word], list[Word]]:
        if isinstance(self.subject, Pronoun):
            return phrase_words(self.subject, f"subject of {self._verb}")
        return self.subject.english_words(), self.subject.german_words(case)

    def _english_verb(self) -> tuple[str, str]:
        person = self.subject.person
        if self.tense in MODALS:
            return self.tense, self.verb.english_infinitive
        if self.tense == "perfect":
            return ENGLISH_FINITE["have"][person], self.verb.english_participle()
        if self.verb is BE:
            return ENGLISH_FINITE["be"][person], ""
        if self.negated:
            return ENGLISH_FINITE["do"][person], self.verb.english_infinitive
        return "", self.verb.english_present(person)

    def _german_verb(self) -> tuple[str, str]:
        """The two brackets around the middle of a German clause: `macht ... auf`, `hat ... aufgemacht`."""
        person = self.subject.person
        if self.tense in MODALS:
            return GERMAN_FINITE[MODALS[self.tense]][person], self.verb.infinitive
        if self.tense == "perfect":
            return GERMAN_FINITE[self.verb.auxiliary][person], self.verb.german_participle()
        return self.verb.german_present(person), self.verb.particle

    def _german_middle(self) -> list[Word]:
        """Puts known information before "nicht" and new information after it, where "nicht" and "ein" make "kein"."""
        known: list[Word] = []
        new: list[Word] = []
        negation = words_of("nicht" if self.negated else "", self._negation)
        if self.object and self.object.determiner.definite:
            known = self.object.german_words(self.verb.case)
        elif self.object and self.negated:
            none, *new = replace(self.object, determiner=DETERMINERS["no"]).german_words(self.verb.case)
            new, negation = [Word(none.text, (self._negation, *none.parts)), *new], []
        elif self.object:
            new = self.object.german_words(self.verb.case)
        recipient = self.recipient.german_words("dative") if self.recipient else []
        return recipient + known + phrase_words(self.adverb)[1] + negation + phrase_words(self.tail)[1] + new


def relative_clause(phrase: NounPhrase | Pronoun | None) -> tuple[list[Word], list[Word]]:
    """The English and the German words of a noun phrase's relative clause, set off by commas in German only."""
    if not isinstance(phrase, NounPhrase) or not phrase.relative:
        return [], []
    comma = words_of(",")
    return phrase.relative.english_words(), comma + phrase.relative.german_words(verb_last=True) + comma


def join(words: Sequence[Word]) -> str:
    """Joins words with spaces, but without one before a comma."""
    return " ".join(word.text for word in words).replace(" ,", ",")


class Sentence(NamedTuple):
    """A main clause, perhaps with another one after "while"."""

    clause: Clause
    meanwhile: Clause | None = None

    def write(self) -> tuple[str, str]:
        """Returns the English and the German sentence."""
        english, german = map(join, self.words())
        # the comma that closes a relative clause is not written before the full stop
        english, german = english.rstrip(","), german.rstrip(",")
        return f"{english[0].upper()}{english[1:]}.", f"{german[0].upper()}{german[1:]}."

    def words(self) -> tuple[list[Word], list[Word]]:
        """Returns the words of both sentences, with commas of their own."""
        english, german = self.clause.english_words(), self.clause.german_words()
        if self.meanwhile:
            english += [*words_of("while", "while"), *self.meanwhile.english_words()]
            german += [*words_of(", während", "while"), *self.meanwhile.german_words(verb_last=True)]
        return english, german

    def links(self) -> list[tuple[int, int]]:
        """Returns the pairs of an English and a German word, counted from 0, that belong together."""
        english, german = ([set(word.parts) for word in side if word.text != ","] for side in self.words())
        return [(i, j) for i, left in enumerate(english) for j, right in enumerate(german) if left & right]


# ---- drawing sentences --------------------------------------------------------------------------------------------

# an entry is drawn as often as it is named
ANY = ("the", "the", "the", "a", "a", "this", "my", "our", "two", "three")
KNOWN = ("the", "the", "the", "this", "my", "our")
# a relative clause says which one is meant; "my" and "this" have said so already
HEAD = ("the", "the", "the", "a", "two", "three")
PLACE = ("the", "the", "the", "this", "our")
TENSES = ("present", "present", "present", "present", "perfect", "perfect", "perfect", "will", "will", "can", "must")
# "time" stands first in the sentence; "once" is a time that is not habitual; "now" is a plain present
MAIN_SETTINGS = ("plain", "plain", "plain", "time", "time", "time", "adverb", "negated", "negated", "negated once")
HEAD_SETTINGS = ("plain", "plain", "negated")
SUBORDINATE_SETTINGS = ("plain", "plain", "plain", "adverb", "negated")
SHORTEST, LONGEST = 4, 20  # words


def pick(rng: Random, options: Sequence[T]) -> T:
    """Draws one of the options by `Random.random`, the only method that is the same in every Python version."""
    return options[int(rng.random() * len(options))]


@cache
def nouns_of(kinds: tuple[str, ...]) -> tuple[Noun, ...]:
    """The nouns of these kinds, in the order of the table."""
    return tuple(noun for noun in NOUNS.values() if noun.kind in kinds)


@cache
def adjectives_for(kind: str, after_is: bool = False) -> tuple[Adjective, ...]:
    """The adjectives that suit a noun of this kind, before it or after "is"."""
    suitable = (adjective for adjective in ADJECTIVES.values() if kind in adjective.kinds)
    return tuple(adjective for adjective in suitable if not (after_is and adjective.use == "attributive"))


@cache
def verbs_with(subject: str = "", object: str = "") -> tuple[Verb, ...]:
    """The verbs that take a subject of this kind, and an object of this kind (empty: any)."""
    verbs = (verb for verb in VERBS.values() if not subject or subject in verb.subjects)
    return tuple(verb for verb in verbs if not object or object in verb.objects)


def draw_noun_phrase(
    rng: Random, kinds: tuple[str, ...], determiners: Sequence[str], plurals: bool = True
) -> NounPhrase:
    """Draws a noun phrase of one of these kinds, with one of these determiners; every other one has an adjective."""
    noun = pick(rng, nouns_of(kinds))
    determiner = DETERMINERS[pick(rng, determiners)]
    if noun.whose == "nobody" and determiner.english in ("my", "our"):
        determiner = DETERMINERS["the"]
    if noun.whose == "family" and determiner.english in ("a", "this", "no", "every"):
        determiner = DETERMINERS["my" if "my" in determiners else "the"]
    # only things have a plural without an article: one buys apples, but visits two friends, or the friends
    countable = determiner.number == "both" and (determiner.definite or noun.kind in ("food", *THINGS))
    plural = determiner.number == "plural" or (plurals and countable and rng.random() < 0.35)
    adjective = pick(rng, adjectives_for(noun.kind)) if rng.random() < 0.5 else None
    return NounPhrase(determiner, noun, adjective, plural)


def draw_subject(rng: Random, kinds: tuple[str, ...], determiners: Sequence[str]) -> NounPhrase | Pronoun:
    """Draws the subject of a clause: a pronoun one time in five, otherwise a noun phrase."""
    if rng.random() < 0.2:
        return pick(rng, PRONOUNS)
    phrase = draw_noun_phrase(rng, kinds, determiners)
    # keys can be bought, but hardly disappear, without an article
    return replace(phrase, plural=False) if phrase.determiner.english == "a" else phrase


def draw_setting(rng: Random, settings: Sequence[str], aspect: str) -> tuple[str, bool, Phrase, Phrase, bool]:
    """Draws tense, negation, time and adverb of a clause.

    Returns:
        `(tense, negated, time, adverb, habitual)`, compatible with each other and with the verb's aspect.
    """
    setting = pick(rng, settings)
    negated, time, adverb = "negated" in setting, Adverbial(), Adverbial()
    if aspect == "state" or setting == "now":
        return "present", negated, time, adverb, False
    tenses = [tense for tense in TENSES if aspect != "event" or tense not in ("can", "must")]
    if negated:
        # "must not" is not the negation of "must"
        tenses = [tense for tense in tenses if tense != "must"]
    tense = pick(rng, tenses)
    if setting == "adverb":
        adverb = pick(rng, [adverb for adverb in ADVERBS if tense in adverb.tenses])
    elif setting == "time" or "once" in setting:
        times = [time for time in TIMES if tense in time.tenses and (setting == "time" or not time.habitual)]
        time = pick(rng, times)
    return tense, negated, time, adverb, time.habitual or adverb.habitual


def draw_clause(
    rng: Random,
    verb: Verb,
    subject: NounPhrase | Pronoun | None = None,
    settings: Sequence[str] = MAIN_SETTINGS,
    tail: bool = True,
) -> Clause:
    """Draws a clause with this verb, and with this subject if one is given.

    Args:
        rng (`Random`): random numbers.
        verb (`Verb`): the verb of the clause.
        subject (`NounPhrase` or `Pronoun`, *optional*): its subject; drawn if not given.
        settings (sequence of `str`): times, adverbs and negations to draw from.
        tail (`bool`): whether a place or company may be drawn.

    Returns:
        `Clause`: without relative clauses, except the one of the given subject.
    """
    tense, negated, time, adverb, habitual = draw_setting(rng, settings, verb.aspect)
    # "every" and numerals beside "not" or "often" would be ambiguous in both languages
    plain = not negated and not adverb.english
    if subject is None:
        nobody = ("no",) if plain and settings is MAIN_SETTINGS and tense in ("present", "perfect") else ()
        subject = draw_subject(rng, verb.subjects, (*ANY, "every", *nobody) if plain else KNOWN)
    plain = plain and not (isinstance(subject, NounPhrase) and subject.determiner.english in ("no", "every"))
    recipient = draw_noun_phrase(rng, PEOPLE, (*ANY, "every") if plain else KNOWN) if verb.recipient else None
    object = None
    if verb.objects:
        determiners: tuple[str, ...] = ANY if plain else (*KNOWN, "a", "a", "a")
        if verb.aspect == "transfer":
            determiners = ("a",) if habitual else determiners
        elif plain and not time.english:
            determiners = (*determiners, "every")
        object = draw_noun_phrase(rng, verb.objects, determiners)
    clause = Clause(subject, verb, tense, recipient, object, negated, adverb, front=time)
    if not (tail and verb.places and rng.random() < 0.45):
        return clause
    if verb.company and rng.random() < 0.5:
        company = draw_noun_phrase(rng, verb.company, ANY if plain else KNOWN)
        return replace(clause, tail=prepositional("with", "mit", company))
    room = draw_noun_phrase(rng, verb.places, (*PLACE, "a") if plain else PLACE, plurals=False)
    place = prepositional("in", "in", room)
    if settings is MAIN_SETTINGS and not time.english and rng.random() < 0.4:
        return replace(clause, front=place)
    return replace(clause, tail=place)


def draw_description(
    rng: Random, subject: NounPhrase | Pronoun, kind: str, settings: Sequence[str] = MAIN_SETTINGS
) -> Clause:
    """Draws a clause with "is" and an adjective that suits a subject of this kind."""
    adjective = pick(rng, adjectives_for(kind, after_is=True))
    tense, negated, time, adverb, _ = draw_setting(rng, settings, "event" if adjective.use == "state" else "state")
    predicate = Phrase(adjective.english, adjective.german)
    if adjective.use != "absolute" and rng.random() < 0.4:
        predicate = Phrase(f"very {adjective.english}", f"sehr {adjective.german}")
    return Clause(subject, BE, tense, negated=negated, adverb=adverb, tail=predicate, front=time)


def draw_relative(rng: Random, head: NounPhrase) -> NounPhrase:
    """Adds a relative clause to a noun phrase: beings are its subject, things its object."""
    kind = head.noun.kind
    if kind not in BEINGS:
        clause = draw_clause(rng, pick(rng, verbs_with(object=kind)), settings=("plain", "negated"), tail=False)
        return replace(head, relative=replace(clause, object=None, front=relative_pronoun(head, "accusative")))
    pronoun = relative_pronoun(head, "nominative")
    if rng.random() < 0.15:
        return replace(head, relative=draw_description(rng, pronoun, kind, SUBORDINATE_SETTINGS))
    while True:
        clause = draw_clause(rng, pick(rng, verbs_with(subject=kind)), pronoun, SUBORDINATE_SETTINGS)
        if clause.verb.auxiliary == "sein" and not clause.object:
            # verbs of change: the cat which has disappeared, not the cat which disappears
            clause = replace(clause, tense="perfect", adverb=Phrase())
        # "die Frau, die das Kind sieht": in German, either could see the other
        rival = clause.object if clause.object and clause.object.noun.kind in BEINGS else None
        if not rival or head.gender == "m" or rival.german("nominative") != rival.german(clause.verb.case):
            return replace(head, relative=clause)


def draw_meanwhile(rng: Random) -> Sentence:
    """Draws two simultaneous actions; the clause with "while" comes first or last."""
    verb = pick(rng, [verb for verb in VERBS.values() if verb.aspect != "state"])
    clause = draw_clause(rng, verb, settings=("now",))
    lasting = pick(rng, [verb for verb in VERBS.values() if verb.aspect == "activity"])
    meanwhile = draw_clause(rng, lasting, draw_noun_phrase(rng, lasting.subjects, KNOWN), ("now",))
    if rng.random() < 0.5:
        return Sentence(clause, meanwhile)
    comma = words_of(",")
    english = words_of("while", "while") + meanwhile.english_words() + comma
    german = words_of("während", "while") + meanwhile.german_words(verb_last=True) + comma
    return Sentence(replace(clause, front=LinkedPhrase(join(english), join(german), tuple(english), tuple(german))))


def draw_sentence(rng: Random) -> Sentence:
    """Draws a sentence in both languages, in one of the five constructions."""
    construction = rng.random()
    if construction < 0.14:
        kinds = pick(rng, (BEINGS, ("food", *THINGS), ("food", *THINGS), PLACES))
        subject = draw_subject(rng, kinds, KNOWN) if kinds is BEINGS else draw_noun_phrase(rng, kinds, KNOWN)
        kind = subject.noun.kind if isinstance(subject, NounPhrase) else "adult"
        return Sentence(draw_description(rng, subject, kind))
    if construction < 0.25:
        # The boy who opens the window is happy.
        if rng.random() < 0.5:
            head = draw_relative(rng, draw_noun_phrase(rng, (*BEINGS, "food", *THINGS), ("the",)))
            return Sentence(draw_description(rng, head, head.noun.kind, HEAD_SETTINGS))
        head = draw_relative(rng, draw_noun_phrase(rng, BEINGS, HEAD))
        return Sentence(draw_clause(rng, pick(rng, verbs_with(subject=head.noun.kind)), head, HEAD_SETTINGS))
    if construction < 0.38:
        # The aunt invites the boy who opens the window.
        verb = pick(rng, [verb for verb in VERBS.values() if verb.objects])
        clause = draw_clause(rng, verb, settings=(*HEAD_SETTINGS, "once"), tail=False)
        head = draw_noun_phrase(rng, verb.objects, ("the",) if clause.negated else HEAD)
        return Sentence(replace(clause, object=draw_relative(rng, head)))
    if construction < 0.48:
        return draw_meanwhile(rng)
    return Sentence(draw_clause(rng, pick(rng, tuple(VERBS.values()))))


@cache
def content_words() -> dict[str, str]:
    """Maps each English content word to its entry; a good sentence uses an entry once."""
    words: dict[str, str] = {}
    for noun in NOUNS.values():
        words |= dict.fromkeys((noun.english, noun.english_plural), noun.english)
    for verb in VERBS.values():
        forms = (verb.english_infinitive, verb.english_present(1), verb.english_participle())
        words |= dict.fromkeys((form.split()[0] for form in forms), verb.english)
    words |= {name: adjective.about or name for name, adjective in ADJECTIVES.items()}
    words |= {adverb.english: adverb.english for adverb in ADVERBS}
    return words | {"every": "every"} | dict.fromkeys(("not", "cannot", "never"), "not")


def reads_well(english: str) -> bool:
    """Returns whether a sentence has a good length and repeats no content word, as "a man sees the men" does."""
    words = english.rstrip(".").replace(",", "").lower().split()
    unrepeated = content_words()
    entries = [unrepeated[word] for word in words if word in unrepeated]
    return SHORTEST <= len(words) <= LONGEST and len(entries) == len(set(entries))


def sentence_stream(rng: Random) -> Iterator[tuple[tuple[str, str], Sentence]]:
    """Yields pairs without end, and how they came about; no English and no German sentence occurs twice."""
    seen_english: set[str] = set()
    seen_german: set[str] = set()
    while True:
        sentence = draw_sentence(rng)
        english, german = sentence.write()
        if english not in seen_english and german not in seen_german and reads_well(english):
            seen_english.add(english)
            seen_german.add(german)
            yield (english, german), sentence


def draw_rows(count: int) -> Iterator[tuple[str, str, str]]:
    """
    Draws distinct sentence pairs, the same on every machine; a larger count only continues the list of a smaller one.

    Yields:
        `(English, German, links)`: no English and no German sentence occurs twice. The links are the pairs of an
        English and a German word that belong together, counted from 0 and written as in `0-0 1-2`. Words are what
        stands between spaces. "Does" is linked to no word.
    """
    for (english, german), sentence in islice(sentence_stream(Random(1)), count):
        yield english, german, " ".join(f"{i}-{j}" for i, j in sentence.links())


def corpus_text() -> str:
    """Returns the rows of the file: split, English, German and links, separated by tabs."""
    # The held-out sets are drawn first: results stay comparable if there are more training pairs one day.
    splits = [split for split, size in SIZES.items() for _ in range(size)]
    rows = draw_rows(len(splits))
    return "".join("\t".join((split, *row)) + "\n" for split, row in zip(splits, rows, strict=True))


if __name__ == "__main__":
    FILE.write_bytes(lzma.compress(corpus_text().encode(), preset=9))
