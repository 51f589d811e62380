"""Ids and back: every text is itself again, whatever the training text had in it."""

import unicodedata

import pytest
from transformers import AutoTokenizer

from hf_vaswani.tokenizer import load_tokenizer, train_tokenizer

TEXT = ["The dog's red ball, please!", "Der Hund spielt schön.", "Ein Mann und ein Hund."] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 400)


def test_special_tokens_have_the_first_ids(tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )


def test_a_sentence_ends_with_eos_and_padding_is_masked(tokenizer) -> None:
    batch = tokenizer(["ein Hund", "Mann"], padding=True)
    assert [ids[-1] if 0 not in ids else ids[ids.index(0) - 1] for ids in batch["input_ids"]] == [2, 2]
    assert [sum(mask) for mask in batch["attention_mask"]] == [
        len([i for i in ids if i]) for ids in batch["input_ids"]
    ]
    assert sorted(batch) == ["attention_mask", "input_ids"]


def test_punctuation_is_split_from_words(tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer("Der Hund, der Mann.")["input_ids"][:-1]]
    assert all(not (any(c.isalpha() for c in piece) and any(c in ",.!'" for c in piece)) for piece in pieces)
    assert "," in pieces
    assert "." in pieces


def test_a_word_is_the_same_piece_at_the_start_and_inside(tokenizer) -> None:
    assert tokenizer("Hund")["input_ids"][:-1] == tokenizer("ein Hund")["input_ids"][1:-1]


@pytest.mark.parametrize(
    "text",
    [
        "The dog's red ball, please!",
        "zwei  Leerzeichen,\ttab",
        "",
        "日本語 🏳️‍🌈 ▁ Ġ",
        "„Zitat“ – 3,14 % …",
        "e\u0301tude",
        "a </s> <pad> <unk> <s> b",
        "\x00\x07",
    ],
)
def test_any_text_decodes_back_to_itself(tokenizer, text) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 2
    assert not {0, 1, 2, 3} & set(ids[:-1])
    expected = " ".join(unicodedata.normalize("NFC", text).split())
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def test_saved_and_loaded_by_plain_auto_tokenizer(tokenizer, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXT[:3], "a </s> b"):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_training_is_deterministic_and_learns_the_frequent_words(tokenizer) -> None:
    assert train_tokenizer(TEXT, 400).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer(" Hund")["input_ids"]) == 2
    assert len(tokenizer) <= 400


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="260.*259"):
        train_tokenizer(TEXT, 259)


def test_a_folder_without_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}.*no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.real_data
def test_ten_thousand_entries_on_multi30k(multi30k) -> None:
    lines = [line for name in ("train.en", "train.de") for line in (multi30k / name).read_text("utf-8").split("\n")]
    tokenizer = train_tokenizer(lines, 10_000)
    assert len(tokenizer) == 10_000
    for line in lines[::97]:
        ids = tokenizer(line)["input_ids"]
        assert 3 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(unicodedata.normalize("NFC", line).split())
