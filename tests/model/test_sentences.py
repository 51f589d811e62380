"""Texts split into sentences, their translations joined, and the tags of target languages in a vocabulary."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_vaswani.model.sentences_vaswani import (
    IN_USE,
    LanguageTags,
    Parts,
    batch_limits,
    cut,
    evaluation_mode,
    fitting_spans,
    has_words,
    kept,
    length_groups,
    longest_source,
    may_be_longer,
    sentence_spans,
    visible,
)

from ..conftest import ROOT
from ..networks import tiny_config


@pytest.mark.parametrize(
    "sentences",
    [
        ["A dog runs.", "Does it?", "It does!", "Well...", "Yes…", "No?!", "End"],
        ["He said: 'No.'", 'She: ("Yes!")', "“Why?”", "And so on."],
        ["Er sagte: „Nein.“", "»Doch!«", "Gut."],
        ["It is e.g. here or … there.", "Not there."],
        ["It costs 3.5 or .5 of it, see No. 5, p. 7 and Fig. 3 there.", "Really."],
        ["Dr. Smith met Mrs. Jones and Prof. J. R. R. Meier, Ph.D., vs. St. Paul.", "They left."],
        ["Das ist z. B. bzw. z.B. am 3. Mai unter Ludwig XIV. König geworden.", "Am 18. Juni 1815.", "Ja."],
        ["Мы тут.", "А. С. Пушкин писал.", "Да."],
        ["¿Qué?", "¡Así!", "¿Y tú?"],
        ["वह आया।", "वह गया।"],
        ["هل جاء؟", "نعم."],
        # What the form does not tell.
        ["He is 12. She is 10. It is vitamin C. It helps."],
        ["Mehl usw.", "Lee"],
        ["Gen. Lee and Rev. King came, inkl. Abb. Vier."],
        # Closing marks by themselves.
        ["« Bonjour. »", "Il part."],
        ["Il dit : « Pars ! »", "Puis il part."],
        ["« Il est parti. » dit-elle."],
        ["“ Stop . ”", "He left ."],
    ],
)
def test_a_text_is_cut_into_its_sentences(sentences: list[str]) -> None:
    for space in (" ", "  ", "\u00a0", "\n", " \r\n\n"):
        text = space.join(sentences)
        assert [text[start:end] for start, end in sentence_spans(f"\t{text} ".strip())] == sentences
        start, end = sentence_spans(f" {text} ")[-1]
        assert f" {text} "[start:end] == sentences[-1]


@pytest.mark.parametrize(
    "sentences",
    [
        ["ភាសាខ្មែរ។", "ប្រទេស៕", "បាទ។"],
        ["ផ្លែឈើ។ល។", "ខ្ញុំ។"],
        ["မြန်မာ၊ စာ။", "ပြည်။"],
        ["መጽሐፉ ተጠናቋል።", "እሱ የት ነው፧", "አልተፈታም፨"],
        ["Ես տուն եմ։", "Դու այստեղ ես։", "Ա. Չարենցը չկա։"],
        ["བོད་ཡིན།", "དེ་རིང་ཡིན། །", "ཁྱེད་༎"],
        ["ᠪᠢ ᠃", "ᠴᠢ᠉", "ᠲᠡᠷᠡ"],
        ["ეს კატაა.", "ის ძაღლია?", "ა. წერეთელი წერს."],
        ["ΠΟΥ ΕΙΣΑΙ;", "Πού είναι η γάτα;", "Εδώ: α; β."],
        ["ድመቷ ተኛች።", "«ውሻው ሮጠ።»", "አዎ"],
        ["وہ آیا۔", "کیوں؟", "ہاں۔"],
        ["د. سامي هنا.", "هو نائم."],
        ["ড. রহমান আসেন।", "তিনি যান।"],
        ["वह है.", "यह है॥"],
        ["החתול ישן\u200f.", "הכלב רץ.\u200f", "כן"],
        ["고양이가 자요.", "네.", "개가 뛰어요."],
        ["මෙය පූසෙක්෴", "එය"],
        ["ܐܢܐ܂", "ܐܢܬ܀"],
        ["He sleeps⁈", "She‼", "We‽", "They"],
    ],
)
def test_every_script_has_its_marks(sentences: list[str]) -> None:
    for space in (" ", "  ", "\n", "\u2028\u2060"):
        text = space.join(sentences)
        assert [text[start:end].strip("\u2060") for start, end in sentence_spans(text)] == sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["ភាសាខ្មែរ។", "ប្រទេស៕", "ផ្លែឈើ។ល។", "បាទ"],
        ["မြန်မာ။", "စာ၊ဗ။", "ပြည်"],
        ["ተጠናቋል።", "ነገር፧", "«አዎ»"],
        ["वह आया।", "वह गया।।", "(हाँ)"],
        ["ماذا؟", "نعم"],
        ["Տուն եմ։", "Դու։"],
        ["ཡིན།", "དེ།"],
        ["你好!", "你好吗?!", "我用Yahoo!奇摩。", "好"],
        ["である．", "図３．５は3.5か?", "はい‼", "次"],
        ["ไป!", "มา"],
        ["ក។\u200b", "ខ"],
        # In front of no letter, within a word of several scripts, and in front of lower case.
        ["॥१॥"],
        ["Yahoo!ニュース"],
        ["a?b!c"],
        ["ڈی۔سی"],
        ["եմ։դու"],
        ["等等…他"],
    ],
)
def test_marks_of_one_script_need_no_space(sentences: list[str]) -> None:
    text = "".join(sentences)
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@pytest.mark.parametrize(
    "begin",
    [
        *("https://a.b/c", "http://a.b.", "ftp://a.b", "custom+app://x", "www.a.b/c", "(https://a.b)", "“www.a.b”"),
        *("mailto:cat@house.example", "cat@house.example", "house.example", "os.path.join", "config.yaml"),
        *("{name}", "{{ name }}", "${name}", "%s", "%(name)s", "@cat", "#cat", "<b>cat</b>", "`cat`", "&lt;", "_cat_"),
        *("ის", "ª", "ʻokina"),
    ],
)
def test_a_link_or_a_placeholder_begins_a_sentence(begin: str) -> None:
    text = f"The cat sleeps. {begin} is here."
    assert sentence_spans(text) == [(0, 15), (16, len(text))]
    # An abbreviation does not end a sentence in front of it, either.
    assert len(sentence_spans(f"See Dr. {begin} here.")) == 1


@pytest.mark.parametrize(
    "begin",
    [
        "cat",
        "(cat",
        "iPhone",
        "eBay",
        "e.g.",
        "a.m.",
        "z.B.",
        "and/or",
        "it's",
        "co-op",
        "n.",
        "etc.)",
        "ß",
        "ǆ",
        "\u200ethe",
    ],
)
def test_a_word_in_lower_case_begins_no_sentence(begin: str) -> None:
    assert len(sentence_spans(f"The cat sleeps approx. {begin} the dog.")) == 1


def test_scripts_without_spaces_are_cut_behind_their_marks() -> None:
    sentences = ["你好。", "你好吗？！", "他说：“好。”", "「はい。」", "3.5です。", "「好。」，他说", "Ja."]
    assert sentence_spans("彼は「行く。」と言った。") == [(0, 12)]
    text = "".join(sentences[:-1]) + "\n" + sentences[-1]
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@pytest.mark.parametrize(
    "text",
    [
        *("." * 200_000, " " * 200_000 + ".", "(" * 200_000 + ".", "a." * 100_000, "。" * 200_000, "!." * 100_000),
        *("។" * 200_000, "។»" * 100_000, "។" + "»" * 200_000, "x" * 200_000 + "។", "။၊" * 100_000, ".។" * 100_000),
        *(". " + part * 70_000 for part in ("a.", "ab.", "a-", "ab@", "a+", "{", "x:", "a.b@")),
        *(
            "a\u200f." * 70_000,
            "\u200b" * 200_000 + "ក",
            "ក" + "\u200b" * 200_000 + "ក",
            "ក!" * 50_000 + "!" * 100_000,
        ),
        *("a" + " " * 200_000 + ")", "། །" + "།" * 200_000, "η;" * 100_000, "\u00ad" * 200_000),
    ],
)
def test_long_runs_are_cut_in_no_time(text: str) -> None:
    before = time.perf_counter()
    assert len(sentence_spans(text)) < 60_000
    assert len(visible(f"a{text}")) <= len(text) + 1
    assert time.perf_counter() - before < 5


def test_a_text_without_a_word_is_one_sentence() -> None:
    assert all(sentence_spans(text) == [(0, len(text))] for text in ("", " ", "\n \n"))


# Line breaks end a sentence, as newlines do; indentation; other white space between sentences.
BREAKS = ["\n", "\r", "\r\n", "\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\n    ", "\n\t"]
SPACES = [*BREAKS, "\t", "  ", "\u00a0", "\u3000", "\u2003", " \u202f"]


@pytest.mark.parametrize("space", BREAKS)
def test_a_line_break_ends_a_sentence(space: str) -> None:
    text = f"{space}a cat{space}the dog. and{space}"
    assert [text[start:end] for start, end in sentence_spans(text)] == ["a cat", "the dog. and"]
    # No mark belongs to the line before, either.
    assert len(sentence_spans(f"Stop .{space}” go")) == 2


@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("One. Two.", ["Eins.", "Zwei."], "Eins. Zwei."),
        ("One.   Two.", ["Eins.", "Zwei."], "Eins.   Zwei."),
        # White space is the text's own, also at both ends.
        ("\n One.\n\n\tTwo. \n", ["Eins.", "Zwei."], "\n Eins.\n\n\tZwei. \n"),
        (" One. Two. ", ["Eins.", "Zwei."], " Eins. Zwei. "),
        *((f"One.{space}Two.", ["Eins.", "Zwei."], f"Eins.{space}Zwei.") for space in SPACES),
        *((f"{space}One.{space}", ["Eins."], f"{space}Eins.{space}") for space in SPACES),
        ("一。\u3000二。\r三。四。", ["One.", "Two.", "Three.", "Four."], "One.\u3000Two.\rThree. Four."),
        ("One. Two.  Three.\tFour.", ["一。", "二！", "三。", "四。"], "一。二！三。\t四。"),
        # An empty translation leaves no second space.
        ("One. Two. Three.", ["Eins.", "", "Drei."], "Eins. Drei."),
        ("One. Two.", ["", "Zwei."], "Zwei."),
        ("One. Two.", ["", ""], ""),
        ("One. Two. Three.", ["一。", "「二」", "三。"], "一。「二」 三。"),
    ],
)
def test_translations_are_joined_as_the_text_is_written(text: str, translations: list[str], joined: str) -> None:
    assert Parts("", text, sentence_spans(text)).join(translations) == joined


# ---- Language tags -----------------------------------------------------------------------------------------------


class Tokenizer:
    """A tokenizer with added tokens."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def get_added_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def tags_of(*languages: str, targets: Sequence[str] = (), **settings: Any) -> LanguageTags:
    config = SimpleNamespace(language_pairs=[["en", target] for target in targets] or None)
    return LanguageTags(Tokenizer(*(f"<2{language}>" for language in languages)), config, **settings)


def test_the_tags_of_a_vocabulary_are_found_by_their_languages() -> None:
    tokenizer = Tokenizer("<pad>", "<2de>", "<2pt_BR>", "<2>", "a<2fr>")
    tags = LanguageTags(tokenizer)
    assert tags.by_language == {"de": "<2de>", "pt_BR": "<2pt_BR>"}
    assert tags.split("<2fr> a") == ("", "<2fr> a")
    tokenizer.tokens.append("<2fr>")
    assert tags.split("<2fr> a") == ("<2fr> ", "a")
    # A tokenizer of another family.
    assert LanguageTags(object()).by_language == {} and LanguageTags(object()).put("<2de> a") == "<2de> a"


@pytest.mark.parametrize("text", ["<2de> a b", " \t<2de>  a b", "<2de>a b"])
def test_a_tag_is_found_behind_white_space(text: str) -> None:
    tags = tags_of("de", "fr")
    assert tags.split(text) == ("<2de> ", "a b")
    assert tags.put(text, "de") == tags.put(text) == text
    with pytest.raises(ValueError, match="The target language is 'fr', but the text begins with <2de>"):
        tags.put(text, "fr")


def test_a_text_gets_the_tag_of_its_language() -> None:
    tags = tags_of("de", "fr", targets=["de", "fr"], option="--target-language")
    assert [tags.put(text, "de") for text in ("a <2fr>", " a", "", " \t")] == ["<2de> a <2fr>", "<2de>  a", "", " \t"]
    with pytest.raises(ValueError, match="into de, fr: choose one by --target-language, or put one of <2de>, <2fr> "):
        tags.put("a")
    assert tags.find("fr") == "<2fr>"
    for call in (tags.find, partial(tags.put, "a")):
        with pytest.raises(ValueError, match="no tag for the target language 'es', only for de, fr"):
            call("es")
    with pytest.raises(ValueError, match="no tag for the target language 'es': it has no language tags"):
        tags_of().find("es")
    # The one language that the model translates into; another vocabulary has no tags at all.
    assert tags_of("de", "fr", targets=["fr"]).put("a") == "<2fr> a"
    assert tags_of(targets=["de", "fr"], is_required=True).put("a", "de") == "a"


def test_a_model_may_have_tags_and_name_no_languages() -> None:
    assert tags_of("de").put("a") == "a"
    with pytest.raises(ValueError, match="translates into de: choose one by"):
        tags_of("de", is_required=True).put("a")
    # Its vocabulary is that of a larger model.
    assert tags_of("fr", "es", targets=["de"], is_required=True).put("a") == "a"


# ---- Text without words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "7b", "é", "猫", "ส", "10 €uro", "\u200ba", "ᄀ", "五", "𝓗", "1ºC"])
def test_a_visible_letter_is_a_word(text: str) -> None:
    assert has_words(text) and kept(text) is None


# Digits, punctuation, emoji (one of several signs, a flag, a key), and what is not seen.
WORDLESS = ["42", "10:30", "٤٢", "½", "-", "—", "★★★", "€ 5", "😀", "👩🏽‍🚀", "🇩🇪", "1️⃣"]
WORDLESS += ["\u200b", "\u00ad", "\u2060", "\ufeff", "\u3164", "\uffa0", "\u2800", "\ufe0f", "\u0301", "\u0e31"]
# Numbers, units, and signs of sound, of repetition and of ordinal numbers that are by themselves.
WORDLESS += ["१२", "๔๒", "Ⅷ", "ⅷ", "①", "🄰", "20 ℃", "5 ㎏", "1º", "ª", "ーーー", "ʼ", "々", "ๆ"]


@pytest.mark.parametrize("text", [*WORDLESS, "", " ", "\n\t", "\u3000"])
def test_text_without_letters_is_kept(text: str) -> None:
    assert not has_words(text)
    assert kept(text) == visible(text) == text
    text = text.lstrip()
    # The tag of a language is for the model.
    tags = tags_of("de")
    assert kept(tags.split(f" <2de> {text}")[1]) == text
    assert kept(tags.split(f"{text} <2fr>")[1]) is None


# ---- Signs that are not seen -------------------------------------------------------------------------------------

HIDDEN = ["\u00ad", "\u200b", "\u2060", "\ufeff", "\u200e", "\u200f", "\u061c", "\u202b", "\u202c", "\u2068", "\u2069"]


@pytest.mark.parametrize("sign", HIDDEN)
def test_a_model_does_not_read_what_is_not_seen(sign: str) -> None:
    text = f"{sign}The old tea{sign}cher{sign} sleeps.{sign * 2}"
    assert visible(text) == "The old teacher sleeps."
    text = f" \ufeff{text}  {sign}Yes{sign}!{sign} {sign}42"
    parts = Parts("<2de> ", text, sentence_spans(text))
    assert parts.sources == [f"<2de> {sentence}" for sentence in ("The old teacher sleeps.", "Yes!", f"{sign}42")]
    # White space is joined as it is.
    assert parts.join(["A", "B", "C"]) == " A  B C"


@pytest.mark.parametrize(
    "text", ["می\u200cخواهم", "क्\u200dष", "👩\u200d💻 a", "❤\ufe0f a", "ไป\u200bมา", "ខ្ញុំ\u200b\u200bទៅ", "စာ\u200bအုပ်"]
)
def test_signs_that_have_a_meaning_are_read(text: str) -> None:
    """They join letters, or separate words that are written without spaces."""
    assert visible(text) == text
    assert visible(f"\u200b{text} \u200b") == f"{text} "


def test_signs_that_are_not_read_make_no_text_too_long() -> None:
    parts = cut("", "ab\u00ad" * 20, lambda text: {"input_ids": [*text]}, longest=50)
    assert parts.spans == [(0, 60)] and parts.sources == ["ab" * 20]


# ---- Long sentences ----------------------------------------------------------------------------------------------


def pieces_of(text: str, longest: int) -> list[str]:
    return [text[start:end] for start, end in fitting_spans(text, lambda piece: len(piece) <= longest)]


@pytest.mark.parametrize(
    ("longest", "pieces"),
    [
        # White space comes first, then punctuation.
        (9, ["one,", "two;three"]),
        (8, ["1.5,2.5-", "3.5"]),
        (6, ["don't-", "won't"]),
        (5, ["(one)", "(two)"]),
        (3, ["一二，", "三四"]),
        # Characters of several signs: accents, vowels of Thai, conjuncts, syllables of Hangul, emoji, flags.
        (2, ["e\u0301", "e\u0301", "e\u0301"]),
        (2, ["เก", "เก", "เก"]),
        (2, ["กำ", "กำ", "กำ"]),
        (3, ["क्ष", "क्ष", "क्ष"]),
        (3, ["\u1112\u1161\u11ab", "\u1112\u1161\u11ab"]),
        (4, ["👩🏽‍🚀", "👩🏽‍🚀"]),
        (2, ["🇩🇪", "🇫🇷", "🇮🇹"]),
    ],
)
def test_a_long_sentence_is_cut_where_it_does_least_harm(longest: int, pieces: list[str]) -> None:
    assert pieces_of("".join(pieces), longest) == pieces
    assert pieces_of(" ".join(pieces), longest) == pieces


@pytest.mark.parametrize(
    ("text", "longest", "pieces"),
    [
        # Sentences first, then words, then characters.
        ("A is here. B is there! Is C?", 20, ["A is here.", "B is there!", "Is C?"]),
        ("He said: 'No.' She: (\"Yes!\") And so on.", 22, ["He said: 'No.'", 'She: ("Yes!")', "And so on."]),
        ("Dr. No is here.  Ja am 3. Mai.\nNo.", 15, ["Dr. No is here.", "Ja am 3. Mai.", "No."]),
        ("3.5 is a number", 10, ["3.5 is", "a number"]),
        ("one two three four", 9, ["one two", "three", "four"]),
        ("abcdefgh", 3, ["ab", "cd", "ef", "gh"]),
        ("ab", 0, ["a", "b"]),
    ],
)
def test_a_text_is_split_between_sentences_then_words_then_characters(text, longest, pieces) -> None:
    assert pieces_of(text, longest) == pieces


@pytest.mark.parametrize("text", ["ส" * 5000, "🇩🇪" * 2500, "\u0301" * 5000, "a," * 2500, "เ" * 5000, "x " * 2500])
def test_nothing_of_a_long_sentence_is_lost(text: str) -> None:
    before = time.perf_counter()
    found = pieces_of(text, 40)
    assert "".join(found) == text.replace(" ", "") or " ".join(found) == text.strip()
    assert max(map(len, found)) <= 40 and time.perf_counter() - before < 5


def test_the_longest_sentence_is_what_the_model_has_seen() -> None:
    def longest(**fields: object) -> int:
        config = tiny_config(**fields)
        # A tokenizer without a limit, as transformers marks it.
        return longest_source([SimpleNamespace(config=config)], SimpleNamespace(model_max_length=10**30))

    assert longest() == 1024 and longest(longest_sentence=300) == 300
    # Training on short text alone does not cut sentences of common length.
    assert longest(longest_sentence=9) == 128
    # What is beyond a learned table cannot be read, and all within can.
    learned = {"position_encoding": "learned", "max_position_embeddings": 200}
    assert longest(longest_sentence=300, **learned) == longest(longest_sentence=9, **learned) == 200


def test_long_text_is_counted() -> None:
    """The last one is written in 18 letters by the normalizers of many tokenizers."""
    for text in ("x" * 300, "ส" * 100, "ﷺ" * 10):
        assert may_be_longer(text, 180) and not may_be_longer(text[:2], 300)


# ---- Batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[], [0, 0], [5000], [1] * 63 + [4800], list(range(1, 200)), [7] * 3000, [1, 3000]]
)
def test_batches_have_every_sentence_once_and_a_bounded_number_of_positions(lengths: list[int]) -> None:
    groups = length_groups(lengths, most=4096, padded=1024)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = max(lengths[i] for i in group), min(lengths[i] for i in group)
        assert len(group) == 1 or longest * len(group) <= (4096 if 2 * shortest >= longest else 1024)
    # Similar sentences fill their batches.
    assert len(groups) <= 2 + 2 * sum(lengths) / 1024
    assert max(map(len, length_groups(lengths, rows=7)), default=0) <= 7


def test_a_batch_is_larger_on_an_accelerator_and_smaller_with_more_beams() -> None:
    cpu, cuda, other = (SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1", "mps"))
    most, padded = batch_limits(cpu, 1, usual=4)
    assert (most, padded) == batch_limits(cpu, 4, usual=4) == (4096, 1024)
    assert batch_limits(cpu, 8, usual=4) == (most // 2, padded // 2)
    assert batch_limits(cuda, 1, usual=4) == (8 * most, 8 * padded)
    assert batch_limits(other, 1, usual=4) == (4 * most, 4 * padded)


def test_splitting_loses_no_text() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        letters = torch.randint(0, 8, (int(torch.randint(1, 200, (1,), generator=generator)),), generator=generator)
        text = "".join("abcd  .!"[i] for i in letters).strip()
        pieces = pieces_of(text, 9)
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
        assert all(len(piece) <= 9 and piece == piece.strip() for piece in pieces)


# ---- Threads


def test_the_last_thread_to_leave_gives_modules_their_modes_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout())).train()
    model[0].eval()
    inside, leave = threading.Event(), threading.Event()

    def use() -> None:
        with evaluation_mode(model):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    # The other one still translates.
    assert not any(module.training for module in model.modules())
    leave.set()
    thread.join()
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert model not in IN_USE


FORKS = """
import os, threading, time
from hf_vaswani.model.sentences_vaswani import LOCK

def fork():
    child = os.fork()
    if not child:
        with LOCK:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with LOCK:
    # As a tokenizer does that starts a process while it is called.
    print(fork(), flush=True)
inside, leave = threading.Event(), threading.Event()

def hold():
    with LOCK:
        inside.set()
        leave.wait()

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
threading.Timer(0.1, leave.set).start()
# No child inherits what another thread holds.
print(fork(), leave.is_set(), flush=True)
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_is_forked_whoever_holds_the_lock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60
    )
    assert done.stdout.split() == [b"7", b"7", b"True"], done.stderr[-2000:]
