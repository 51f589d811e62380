"""Alterations of sentences: in every script, beside every kind of punctuation, and always the same for one seed."""

import random
from collections import Counter
from typing import get_args

import pytest

from hf_vaswani.data.alterations import altered_pair, altered_set, no_final_mark, title, typos, upper
from hf_vaswani.recipe import Alteration, AugmentRecipe

SENTENCES = [
    "Two young, White males are outside near many bushes.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Девушка поднимается в деревянный домик.",
    "Ένα κορίτσι σκαρφαλώνει σε ένα ξύλινο σπιτάκι.",
    "एक छोटी लड़की लकड़ी के घर में चढ़ रही है।",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Die Straße, 3 km.", "DIE STRASSE, 3 KM."),
        ("ein café, ǆ", "EIN CAFÉ, Ǆ"),
        ("走吧。नमस्ते", "走吧。नमस्ते"),
        # A language tag and entities are not words.
        ("<2de> don &apos;t &quot; go", "<2de> DON &apos;T &quot; GO"),
        ("", ""),
    ],
)
def test_upper_is_unicodes(text, expected) -> None:
    assert upper(text) == expected


@pytest.mark.parametrize(
    "kept",
    ["%s", "%(name)s", "%2$d", "{name}", "${home}", "<b>", '<a href="x">', "www.abc.de/x", ":func:`len`", "``a b``"],
)
def test_what_a_program_reads_is_kept(kept) -> None:
    text = f"see {kept} there"
    assert (upper(text), title(text)) == (f"SEE {kept} THERE", f"See {kept} There")
    assert kept in typos(text, random.Random(1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("don't touch my 3rd well-known iPhone", "Don't Touch My 3rd Well-Known IPhone"),
        ("‘hello’ said l’homme", "‘Hello’ Said L’homme"),
        ("it 's n't what &apos;s &quot; said", "It 's N't What &apos;s &quot; Said"),
        # A combining accent does not end a word; the title-case form of ǆ is neither small nor capital.
        ("cafe\u0301s ǆ", "Cafe\u0301s ǅ"),
        ("<2de> die 走吧 ÖBB", "<2de> Die 走吧 ÖBB"),
        ("", ""),
    ],
)
def test_title_has_capitals_at_the_beginning_of_words_alone(text, expected) -> None:
    assert title(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog.", "A dog"),
        ("A dog .", "A dog"),
        ("A dog ?! ", "A dog "),
        ("Wait…", "Wait"),
        ("Wait...", "Wait"),
        ("走吧。", "走吧"),
        ("他说：“走吧。”", "他说：“走吧”"),
        ("「行く。」", "「行く」"),
        ("ماذا؟", "ماذا"),
        ("एक घर।", "एक घर"),
        ("« Bonjour ! »", "« Bonjour »"),
        ('He said "Go."', 'He said "Go"'),
        ("(Yes!).", "(Yes)"),
        ("go . &quot;", "go &quot;"),
        ("No. 5 has none", "No. 5 has none"),
        ("...", "..."),
        ('"?"', '"?"'),
        ("", ""),
    ],
)
def test_a_final_mark_is_removed_in_front_of_what_closes_the_sentence(text, expected) -> None:
    assert no_final_mark(text) == expected


def test_a_line_of_marks_takes_no_time() -> None:
    line = "." * 200_000
    assert no_final_mark(line + "a") == line + "a"
    assert no_final_mark("a" + line) == "a"


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence_gets_a_few_typing_errors(sentence) -> None:
    changes = []
    for seed in range(200):
        made = typos(sentence, random.Random(seed))
        assert made == typos(sentence, random.Random(seed)) != sentence
        words = list(zip(sentence.split(), made.split(), strict=True))
        wrong = [(right, word) for right, word in words if right != word]
        assert all(right[0] == word[0] and abs(len(right) - len(word)) <= 3 for right, word in wrong)
        changes.append(len(wrong))
    assert min(changes) == 1 and max(changes) <= 4
    assert 1 <= sum(changes) / 200 < 1.8


def test_typing_errors_are_of_four_kinds() -> None:
    made = Counter(typos("Wort", random.Random(seed)) for seed in range(4000))
    left_out, swapped, doubled = {"Wrt", "Wot", "Wor"}, {"Wrot", "Wotr"}, {"Woort", "Worrt", "Wortt"}
    # Neighbours of o, r and t on the keyboard.
    replaced = {f"W{key}rt" for key in "ipkl"} | {f"Wo{key}t" for key in "etdf"} | {f"Wor{key}" for key in "ryfg"}
    assert set(made) == left_out | swapped | doubled | replaced
    for kind in (left_out, swapped, doubled, replaced):
        assert sum(made[word] for word in kind) > 500
    assert "WÖRT" not in made and typos("WM", random.Random(3)).isupper()


@pytest.mark.parametrize("text", ["www.example.com 3.5 x_y me@example.com </b>", "<2de> I a", "", "123 .", "&quot;"])
def test_what_is_no_word_has_no_typing_errors(text) -> None:
    assert all(typos(text, random.Random(seed)) == text for seed in range(50))


def test_a_letter_keeps_its_combining_marks() -> None:
    for seed in range(100):
        made = typos("pe\u0301re\u0300", random.Random(seed))
        assert not made.startswith(("p\u0301", "p\u0300")) and "\u0301\u0300" not in made


def test_an_altered_set_is_always_the_same() -> None:
    references = [[text, text.lower()] for text in SENTENCES]
    for name in get_args(Alteration):
        sources, answers = altered_set(SENTENCES, references, name)
        assert (sources, answers) == altered_set(SENTENCES, references, name)
        # Each line by itself, whatever the others are.
        assert altered_set(["?", *SENTENCES[1:]], references, name)[0][1:] == sources[1:]
        assert sum(new != old for new, old in zip(sources, SENTENCES, strict=True)) >= 4
        assert (answers == references) == (name == "typos")
    assert altered_set(SENTENCES, references, "upper")[1][0][1] == SENTENCES[0].upper()


def test_alterations_are_drawn_by_their_probabilities() -> None:
    source, target = SENTENCES[:2]
    always = AugmentRecipe(upper=1, title=1, typos=1, no_final_mark=1)
    made, of_target = altered_pair(source, target, always, random.Random(1))
    assert of_target == target[:-1].upper()
    assert made.isupper() and made not in (source.upper(), source[:-1].upper()) and not made.endswith(".")
    assert altered_pair(source, target, AugmentRecipe(), random.Random(1)) == (source, target)
    draws, found = random.Random(1), Counter()
    for _ in range(2000):
        augment = AugmentRecipe(upper=0.1, title=0.2, typos=0.3, no_final_mark=0.5)
        made, of_target = altered_pair(source, target, augment, draws)
        found["upper"] += made.isupper()
        found["title"] += of_target.istitle()
        found["no_final_mark"] += not made.endswith(".")
        assert made.endswith(".") == of_target.endswith(".") and made.isupper() == of_target.isupper()
        found["typos"] += made.rstrip(".").lower() != source.rstrip(".").lower()
    shares = {name: count / 2000 for name, count in found.items()}
    # A pair in capitals is no title.
    assert shares == pytest.approx({"upper": 0.1, "title": 0.18, "typos": 0.3, "no_final_mark": 0.5}, abs=0.04)
