"""Texts split into sentences, their translations joined, and the tags of target languages in a vocabulary."""

import time

import pytest

from hf_vaswani.model.sentences_vaswani import join_sentences, language_tags, sentence_spans


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


def test_scripts_without_spaces_are_cut_behind_their_marks() -> None:
    sentences = ["你好。", "你好吗？！", "他说：“好。”", "「はい。」", "3.5です。", "「好。」，他说", "Ja."]
    assert sentence_spans("彼は「行く。」と言った。") == [(0, 12)]
    text = "".join(sentences[:-1]) + "\n" + sentences[-1]
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@pytest.mark.parametrize(
    "text", ["." * 200_000, " " * 200_000 + ".", "(" * 200_000 + ".", "a." * 100_000, "。" * 200_000]
)
def test_long_runs_are_cut_in_no_time(text: str) -> None:
    before = time.perf_counter()
    assert len(sentence_spans(text)) == 1
    assert time.perf_counter() - before < 5


@pytest.mark.parametrize("text", ["", " ", "\n \n"])
def test_a_text_without_a_word_is_one_sentence(text: str) -> None:
    assert sentence_spans(text) == [(0, len(text))]


@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("One. Two.", ["Eins.", "Zwei."], "Eins. Zwei."),
        ("One.   Two.", ["Eins.", "Zwei."], "Eins. Zwei."),
        # White space with a newline is the text's own, also at both ends.
        ("\n One.\n\n\tTwo. \n", ["Eins.", "Zwei."], "\n Eins.\n\n\tZwei. \n"),
        (" One. Two. ", ["Eins.", "Zwei."], "Eins. Zwei."),
        # An empty translation leaves no second space.
        ("One. Two. Three.", ["Eins.", "", "Drei."], "Eins. Drei."),
        ("One. Two.", ["", "Zwei."], "Zwei."),
        ("One. Two.", ["", ""], ""),
        ("One. Two. Three.", ["一。", "「二」", "三。"], "一。「二」 三。"),
    ],
)
def test_translations_are_joined_as_the_text_is_written(text: str, translations: list[str], joined: str) -> None:
    assert join_sentences(text, sentence_spans(text), translations) == joined


def test_the_sentences_of_a_text_are_joined_to_it() -> None:
    text = "Dr. Who runs. Does he?\n\n He does!"
    spans = sentence_spans(text)
    assert join_sentences(text, spans, [text[start:end] for start, end in spans]) == text


def test_a_translation_is_missing() -> None:
    with pytest.raises(ValueError, match="shorter"):
        join_sentences("One. Two.", sentence_spans("One. Two."), ["Eins."])


def test_the_tags_of_a_vocabulary_are_found_by_their_languages() -> None:
    class Tokenizer:
        def get_added_vocab(self) -> dict[str, int]:
            return {"<pad>": 0, "<2de>": 7, "<2pt_BR>": 8, "<2>": 9, "a<2fr>": 10}

    assert language_tags(Tokenizer()) == {"de": "<2de>", "pt_BR": "<2pt_BR>"}
    assert language_tags(object()) == {}
