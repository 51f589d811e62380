"""The fast tokenizer produces the ids of Marian's SentencePiece models and vocabularies, and decodes to its text."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, MarianConfig, MarianTokenizer, PreTrainedTokenizerFast

from hf_vaswani.conversion.marian import _read_tokenizer, load
from hf_vaswani.conversion.marian_vocabulary import check_ids, join, map_ids, read_spm
from hf_vaswani.data.encoding import encode_rows
from hf_vaswani.data.tokenizer import TwoSidedTokenizer, load_tokenizer

from .marian_folders import (
    ENGLISH,
    GERMAN,
    TEXTS,
    UNK,
    largest_difference,
    marian_folder,
    our_translations,
    pieces,
    sentences,
    their_translations,
    train_spm,
)


def both_tokenizers(folder: Path):
    return AutoTokenizer.from_pretrained(folder), load(folder).tokenizer


def test_source_text_has_marians_ids(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    theirs, ours = both_tokenizers(tmp_path)
    assert isinstance(ours, PreTrainedTokenizerFast)
    for text in [*sentences(ENGLISH, 6, 100), *sentences(GERMAN, 6, 20), *TEXTS]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours(">>deu<< a dog")["input_ids"][0] == theirs.convert_tokens_to_ids(">>deu<<")
    batch = ours(["a dog", "the old red dog"], padding=True)
    assert batch["input_ids"] == theirs(["a dog", "the old red dog"], padding=True)["input_ids"]
    assert batch["attention_mask"][0][-1] == 0


def test_target_ids_are_marians_text(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    theirs, ours = both_tokenizers(tmp_path)
    for text in [*sentences(GERMAN, 7, 100), *sentences(ENGLISH, 7, 20)]:
        ids = theirs(text_target=text)["input_ids"]
        expected = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=True) == expected
    draw = random.Random(8)
    for _ in range(100):
        ids = draw.choices(range(len(theirs.encoder)), k=12)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
def test_target_text_has_marians_ids(spms, tmp_path, separate) -> None:
    marian_folder(tmp_path, spms, separate)
    vocabulary, ours = _read_tokenizer(tmp_path, MarianConfig.from_pretrained(tmp_path))
    theirs = MarianTokenizer.from_pretrained(tmp_path)
    ours.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(again, TwoSidedTokenizer) and type(plain) is PreTrainedTokenizerFast
    differ = 0
    # Codes of languages belong into source text only.
    texts = [text for text in TEXTS if ">>" not in text]
    for text in [*sentences(GERMAN, 7, 100), *sentences(ENGLISH, 7, 20), *texts]:
        ids = vocabulary.target_ids(torch.tensor(theirs(text_target=text)["input_ids"])).tolist()
        assert ours(text_target=text)["input_ids"] == again(text_target=text)["input_ids"] == ids, text
        assert ours(text)["input_ids"] == again(text)["input_ids"] == plain(text)["input_ids"]
        assert ours.decode(ids) == plain.decode(ids)
        differ += ours(text)["input_ids"] != ids
    assert differ > 100
    table = encode_rows(["the dog", "a cat"], ["über Straße", "Hund"], [1, 2], copy.deepcopy(again))
    assert table["source_ids"].to_pylist() == ours(["the dog", "a cat"])["input_ids"]
    assert table["target_ids"].to_pylist() == ours(text_target=["über Straße", "Hund"])["input_ids"]


def test_target_pieces_without_an_id_are_split_into_others(spms, tmp_path) -> None:
    lost = max(pieces(spms["target"]), key=len)
    marian_folder(tmp_path, spms, left_out=(lost,))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary[f"{lost}?"] = vocabulary.pop(lost)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = load(tmp_path).tokenizer
    ids = tokenizer(text_target=lost.strip("▁"))["input_ids"]
    assert len(ids) > 2 and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == lost.strip("▁")


def test_added_tokens_have_one_id_on_both_sides(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    tokenizer = load(tmp_path).tokenizer
    tokenizer.add_tokens(["<2de>"])
    id_ = tokenizer.convert_tokens_to_ids("<2de>")
    assert tokenizer("<2de>")["input_ids"][0] == tokenizer(text_target="<2de>")["input_ids"][0] == id_


def test_only_pieces_of_the_source_are_used_for_it(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    theirs, ours = both_tokenizers(tmp_path)
    letters = {letter for piece in pieces(spms["source"]) for letter in piece}
    of_source = {theirs.encoder[piece] for piece in pieces(spms["source"])} | {0, theirs.encoder[UNK]}
    texts = ["".join(c for c in text if c in letters | {" "}) for text in sentences(GERMAN, 9, 100)]
    assert {id_ for text in texts for id_ in ours(text)["input_ids"]} <= of_source
    # The target's model would split them into pieces of its own.
    assert {id_ for text in texts for id_ in theirs(text_target=text)["input_ids"]} - of_source


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"byte_fallback": True, "vocab_size": 330},
        {"user_defined_symbols": ["XYZ", "dog"]},
        {"normalization_rule_name": "identity"},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False, "vocab_size": 120},
    ],
)
def test_source_text_has_marians_ids_with_other_settings(settings, spms, tmp_path) -> None:
    text = sentences(ENGLISH, 1)
    marian_folder(tmp_path, {"source": train_spm(text, **settings), "target": spms["target"]})
    theirs, ours = both_tokenizers(tmp_path)
    for text in [*sentences(ENGLISH, 6, 50), "the XYZ dogdog", "aXYZ", "XYZ", *TEXTS]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text


@pytest.mark.slow
def test_letters_that_occur_only_in_user_defined_pieces_are_noted(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    assert not any("user-defined" in note for note in load(tmp_path).foreign.notes)
    marian_folder(tmp_path, {**spms, "source": train_spm(sentences(ENGLISH, 1), user_defined_symbols=["XaY", "Z"])})
    (note,) = [note for note in load(tmp_path).foreign.notes if "user-defined" in note]
    assert "(X Y) become <unk>" in note


# ---- Joint vocabularies ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pieces_without_ids_are_read_as_unknown(spms, tmp_path) -> None:
    known = [piece for piece in pieces(spms["source"]) if piece not in pieces(spms["target"])]
    left_out = tuple(sorted(known, key=len)[-6:]) + tuple(piece for piece in known if piece in "bw")
    marian = marian_folder(tmp_path, spms, left_out=left_out)
    converted = load(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    assert converted.model.config.vocab_size == len(vocab) + len(left_out)
    theirs, texts = AutoTokenizer.from_pretrained(tmp_path), sentences(ENGLISH, 5, count=30)
    some = 0
    for text in texts:
        found, expected = converted.tokenizer(text)["input_ids"], theirs(text)["input_ids"]
        assert [min(id_, len(vocab)) for id_ in found] == [
            len(vocab) if new >= len(vocab) else old for new, old in zip(found, expected, strict=True)
        ]
        assert all(old == vocab[UNK] for new, old in zip(found, expected, strict=True) if new >= len(vocab))
        some += any(id_ >= len(vocab) for id_ in found)
    assert some > 10
    assert marian.config.vocab_size == len(vocab)
    assert largest_difference(converted.model, converted.foreign) <= 1e-5
    assert our_translations(converted.model, converted.tokenizer, texts) == their_translations(tmp_path, texts)


@pytest.mark.variants(2)
@pytest.mark.parametrize("tied", [True, False])
def test_separate_vocabularies_are_joined(tied, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms, separate=True, tie_word_embeddings=tied)
    converted = load(tmp_path)
    source, target = (json.loads((tmp_path / name).read_text()) for name in ("vocab.json", "target_vocab.json"))
    assert len(source) != len(target)
    assert converted.model.config.vocab_size == len(source) + len(target) - 3
    assert largest_difference(converted.model, converted.foreign) <= 1e-5
    texts = sentences(ENGLISH, 5, count=30)
    expected = their_translations(tmp_path, texts)
    assert len(set(expected)) > 15
    assert our_translations(converted.model, converted.tokenizer, texts) == expected
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts, *sentences(GERMAN, 6, 20), *TEXTS]:
        assert converted.tokenizer(text)["input_ids"] == theirs(text)["input_ids"], text


# ---- Parts -------------------------------------------------------------------------------------------------------


def test_joined_vocabularies_share_special_tokens(spms, tmp_path) -> None:
    (tmp_path / "source.spm").write_bytes(spms["source"])
    spm = read_spm(tmp_path / "source.spm")
    known = pieces(spms["source"])[:3]
    source = {token: i for i, token in enumerate(["</s>", "<unk>", *known])}
    target = {"</s>": 0, "<unk>": 1, known[0]: 2}
    vocabulary = join(source, target, spm, ["</s>", "<unk>"], "<unk>")
    without_id = len({piece.piece for piece in spm.pieces if piece.type == 1} - source.keys())
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 5 + without_id + 1
    assert vocabulary.source_rows.tolist() == [0, 1, 2, 3, 4, *[1] * without_id, -1]
    assert vocabulary.target_rows.tolist() == [0, 1, -1, -1, -1, *[-1] * without_id, 2]
    assert vocabulary.is_target.tolist() == [True, True, *[False] * (3 + without_id), True]
    # The same piece of the target is another token.
    assert vocabulary.tokens[2] == known[0] and vocabulary.tokens[-1] == f"{known[0]}  "


def test_ids_must_fit_the_embeddings(tmp_path) -> None:
    file = tmp_path / "vocab.json"
    check_ids(file, {"a": 1, "b": 0}, 2, "Wemb")
    with pytest.raises(ValueError, match="vocab.json has 2 entries, but Wemb has 3 rows"):
        check_ids(file, {"a": 1, "b": 0}, 3, "Wemb")
    for ids in ({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 0, "b": "1"}, {"a": 0, "b": True}):
        with pytest.raises(ValueError, match="each of its 2 entries an id of its own, from 0 to 1"):
            check_ids(file, ids, 2, "Wemb")


def test_ids_in_settings_are_mapped_to_any_depth() -> None:
    assert map_ids([[1, 2], [3], []], lambda id_: id_ * 10) == [[10, 20], [30], []]
    assert map_ids(4, lambda id_: id_ * 10) == 40 and map_ids(None, lambda id_: id_ * 10) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "source.spm, the SentencePiece model, is missing"),
        (b"text", "source.spm is damaged or not a SentencePiece model"),
        (b"", "source.spm is not a SentencePiece model: it contains no pieces"),
    ],
)
def test_other_files_are_not_sentencepiece_models(tmp_path, content, words) -> None:
    if content is not None:
        (tmp_path / "source.spm").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_spm(tmp_path / "source.spm")
