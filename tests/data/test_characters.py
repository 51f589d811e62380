"""Characters are counted by kind as Unicode has them, many sentences at once."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from hf_vaswani.data.characters import DIGIT, SPACE, count_characters, script_names


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
