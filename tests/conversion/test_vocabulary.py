"""Foreign vocabularies as one: the ids of Marian's and fairseq's tokenizers, and their text; rows of embeddings."""

import copy
import json
import random
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, MarianConfig, MarianTokenizer, PreTrainedTokenizerFast

from hf_vaswani.conversion import fairseq
from hf_vaswani.conversion.convert import largest_difference
from hf_vaswani.conversion.marian import _read_tokenizer, load
from hf_vaswani.conversion.vocabulary import Vocabulary, piece_of, read_codes, symbol_of
from hf_vaswani.data.encoding import encode_rows
from hf_vaswani.data.tokenizer import TwoSidedTokenizer, load_tokenizer

from .fairseq_folders import (
    EOS,
    LONG_WORDS,
    PAD,
    RULES,
    SHAPES,
    SIZES,
    SPECIAL,
    UNK,
    apply_codes,
    args_of,
    assert_close,
    codes_folder,
    fairseq_batch,
    fairseq_state,
    logits_of,
    random_fsmt,
    word_list,
    write_folder,
)
from .fairseq_folders import sentences as fairseq_sentences
from .marian_folders import (
    ENGLISH,
    GERMAN,
    TEXTS,
    marian_folder,
    our_translations,
    pieces,
    sentences,
    their_translations,
    train_spm,
)

# ---- Marian -------------------------------------------------------------------------------------------------------


def both_tokenizers(folder: Path):
    return AutoTokenizer.from_pretrained(folder), load(folder).tokenizer


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"byte_fallback": True, "vocab_size": 330},
        {"user_defined_symbols": ["XYZ", "dog"]},
        {"normalization_rule_name": "identity"},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False, "vocab_size": 120},
    ],
)
def test_source_text_has_marians_ids(settings, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms | {"source": train_spm(sentences(ENGLISH, 1), **settings)})
    theirs, ours = both_tokenizers(tmp_path)
    assert isinstance(ours, PreTrainedTokenizerFast)
    for text in [*sentences(ENGLISH, 6, 100), *sentences(GERMAN, 6, 20), "the XYZ dogdog", "aXYZ", "XYZ", *TEXTS]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours(">>deu<< a dog")["input_ids"][0] == theirs.convert_tokens_to_ids(">>deu<<")
    batch, expected = (each(["a dog", "the old red dog"], padding=True) for each in (ours, theirs))
    assert batch["input_ids"] == expected["input_ids"] and batch["attention_mask"][0][-1] == 0


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
    vocabulary, ours, _ = _read_tokenizer(tmp_path, MarianConfig.from_pretrained(tmp_path))
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
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ids) == plain.decode(ids)
        differ += ours(text)["input_ids"] != ids
    assert differ > 100
    again.add_tokens(["<2de>"])
    id_ = again.convert_tokens_to_ids("<2de>")
    assert again("<2de>")["input_ids"][0] == again(text_target="<2de>")["input_ids"][0] == id_
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


@pytest.mark.slow
def test_letters_that_occur_only_in_user_defined_pieces_are_noted(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    assert not any("user-defined" in note for note in load(tmp_path).foreign.notes)
    marian_folder(tmp_path, {**spms, "source": train_spm(sentences(ENGLISH, 1), user_defined_symbols=["XaY", "Z"])})
    (note,) = [note for note in load(tmp_path).foreign.notes if "user-defined" in note]
    assert "(X Y) become <unk>" in note


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
        assert all(old == vocab["<unk>"] for new, old in zip(found, expected, strict=True) if new >= len(vocab))
        some += any(id_ >= len(vocab) for id_ in found)
    assert some > 10
    assert marian.config.vocab_size == len(vocab)
    assert largest_difference(converted.model, converted.foreign.logits) <= 1e-5
    assert our_translations(converted.model, converted.tokenizer, texts) == their_translations(tmp_path, texts)


def test_an_id_outside_the_target_is_named() -> None:
    rows = torch.tensor([0, 2, 1])
    vocabulary = Vocabulary(["a", "b", "</s>"], rows, rows, torch.ones_like(rows, dtype=torch.bool), never=-1e9)
    assert vocabulary.target_ids(torch.arange(3)).tolist() == [0, 2, 1]
    with pytest.raises(ValueError, match="contain the id 3, but the target vocabulary has only 3 entries"):
        vocabulary.target_ids(torch.tensor([1, 3]))


# ---- fairseq ------------------------------------------------------------------------------------------------------


def test_separate_dictionaries_are_joined(tmp_path) -> None:
    source, target = word_list(60, seed=1), word_list(40, seed=2)
    assert 2 < len(set(source) & set(target)) < 40
    fsmt = random_fsmt(64, 44, SHAPES[1][0], "decoder", "relu", True, seed=2)
    shares = {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    came = fairseq.load(write_folder(tmp_path, fairseq_state(fsmt), args_of(SHAPES[1][0], **shares), source, target))
    union = list(dict.fromkeys(SPECIAL + source + target))
    assert came.tokenizer.convert_ids_to_tokens(range(len(union))) == union
    assert came.model.config.vocab_size == len(union)
    # For each id of the union, the id of each side; <unk> if the side does not have the symbol.
    theirs = [
        torch.tensor([(SPECIAL + side).index(s) if s in SPECIAL + side else UNK for s in union])
        for side in (source, target)
    ]
    ids, mask, decoder_ids = fairseq_batch(len(union))
    expected = logits_of(fsmt, (theirs[0][ids], mask, theirs[1][decoder_ids]))
    found = logits_of(came.model, (ids, mask, decoder_ids))
    ours = torch.tensor([union.index(symbol) for symbol in SPECIAL + target])
    assert_close(found[..., ours], expected)
    others = [i for i, symbol in enumerate(union) if symbol not in SPECIAL + target]
    assert (found[..., others] < found.min(dim=-1, keepdim=True).values + 40).all() and found[..., others].max() < -40
    assert_close(found.softmax(-1)[..., ours], expected.softmax(-1))
    assert_close(came.foreign.logits(ids, mask, decoder_ids), found)

    text = fairseq_sentences(source + target)
    batch = came.tokenizer(text, padding=True, return_tensors="pt")
    came.model.generation_config.max_new_tokens = 30
    for beams in (1, 5):
        settings = {"num_beams": beams, "early_stopping": beams > 1, "no_repeat_ngram_size": 2}
        translations = came.tokenizer.batch_decode(came.model.generate(**batch, **settings), skip_special_tokens=True)
        best = fsmt.generate(
            theirs[0][batch["input_ids"]], attention_mask=batch["attention_mask"], **RULES, **settings
        )
        words = [[(SPECIAL + target)[i] for i in row if i not in (0, PAD, EOS, UNK)] for row in best.tolist()]
        assert translations == [" ".join(row) for row in words]
        assert len(set(translations)) > 10 and set(" ".join(translations).split()) - set(source)
    greedy = came.model.generate(**batch, num_beams=1, early_stopping=False, max_new_tokens=201)
    assert came.foreign.translate(text) == came.tokenizer.batch_decode(greedy, skip_special_tokens=True)


@pytest.mark.parametrize("form", ["subword-nmt", "fastBPE"])
def test_codes_produce_the_ids_of_fairseq(tmp_path, form) -> None:
    known = fairseq_sentences(LONG_WORDS, 30)
    folder, codes, symbols, fsmt = codes_folder(tmp_path, known, form)
    came = fairseq.load(folder)
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    unseen = fairseq_sentences(
        [word[::-1] for word in LONG_WORDS] + ["a", "zebra", "q", "ab@@", "</s>", "<unk>", "@@"], 60, seed=5
    )
    ids_of = {symbol: i for i, symbol in enumerate(symbols)}
    several, unknown, beyond, compared = 0, 0, 0, 0
    for line in known + unseen:
        pieces = apply_codes(line, codes)
        expected = [ids_of.get(piece, UNK) for piece in pieces] + [EOS]
        found = tokenizer(line)["input_ids"]
        # Pieces of the codes that are not in the dictionary have ids of their own, which are read as <unk>.
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == theirs or (ours >= len(symbols) and theirs == UNK), line
        several += sum(piece.endswith("@@") for piece in pieces)
        unknown += expected.count(UNK)
        beyond += sum(i >= len(symbols) for i in found)
        # The model treats them as <unk>.
        if max(found) >= len(symbols) and compared < 5:
            compared += 1
            batch = (torch.tensor([found]), torch.ones(1, len(found)).long(), torch.tensor([[EOS, 5]]))
            logits, theirs = logits_of(came.model, batch), logits_of(fsmt, (torch.tensor([expected]), *batch[1:]))
            assert_close(logits[..., : len(symbols)], theirs)
            assert_close(logits.softmax(-1)[..., : len(symbols)], theirs.softmax(-1))
            assert_close(came.foreign.logits(*batch), logits)
        if UNK not in expected:
            assert tokenizer.decode(found, skip_special_tokens=True) == line
    assert several > 100 and unknown > 100 and beyond > 20 and compared == 5
    assert all(tokenizer(line)["input_ids"] == [ids_of[p] for p in apply_codes(line, codes)] + [EOS] for line in known)


def test_a_symbol_may_also_be_a_literal_word(tmp_path) -> None:
    """`a@@` may be a literal word, or the beginning of one."""
    (tmp_path / "code").write_text("#version: 0.2\n@ @</w>\na @@</w>\n", encoding="utf-8")
    symbols = ["a@@", "b", "@@"]
    model = random_fsmt(7, 7, SIZES, "all", "relu", True)
    came = fairseq.load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    inside, word = came.tokenizer("ab")["input_ids"], came.tokenizer("a@@")["input_ids"]
    assert inside == [4, 5, EOS] and came.tokenizer("@@")["input_ids"] == [6, EOS] and word[0] >= 7
    decoder_ids = torch.tensor([[EOS, 4]])
    expected = logits_of(model, (torch.tensor([[4, EOS]]), torch.ones(1, 2).long(), decoder_ids))
    found = logits_of(came.model, (torch.tensor([word]), torch.ones(1, 2).long(), decoder_ids))
    assert_close(found[..., :7], expected)


def test_pieces_are_decoded_to_words(tmp_path) -> None:
    came = fairseq.load(codes_folder(tmp_path, fairseq_sentences(LONG_WORDS, 30))[0])
    ids = came.tokenizer("abaäßab dddbac")["input_ids"]
    assert came.tokenizer.decode([EOS, *ids, PAD], skip_special_tokens=True) == "abaäßab dddbac"
    cut = [came.tokenizer.convert_tokens_to_ids(piece) for piece in ("aba", "ab</w>", "ddd")]
    assert UNK not in cut
    assert came.tokenizer.decode([EOS, *cut, EOS], skip_special_tokens=True) == "abaab ddd"
    assert any("Moses" in note for note in came.foreign.notes)


def test_without_codes_text_is_split_at_spaces(tmp_path) -> None:
    symbols = ["lo@@", "w", "low", "Wör@@", "ter", "."]
    model = random_fsmt(10, 10, SIZES, "all", "relu", True)
    came = fairseq.load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer(" lo@@ w  Wör@@ ter\tnever .")["input_ids"]
    assert ids == [4, 5, 7, 8, UNK, 9, EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "low Wörter ."
    assert tokenizer.decode([6, 4], skip_special_tokens=True) == "low lo"
    assert any("already split by them" in note for note in came.foreign.notes)


@pytest.mark.variants(2)
@pytest.mark.parametrize("joint", [True, False])
def test_sentencepiece_produces_the_ids_of_fairseq(tmp_path, joint) -> None:
    model = train_spm(fairseq_sentences(LONG_WORDS, 200), vocab_size=40)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model)
    cut = sentencepiece.SentencePieceProcessor(model_proto=model)
    known = fairseq_sentences(LONG_WORDS, 30)
    # Some of its pieces are missing, and one symbol is not a piece.
    pieces = dict.fromkeys(piece for line in known for piece in cut.encode(line, out_type=str))
    source = [*list(pieces)[:-5], "zz"]
    target = source if joint else word_list(20)
    fsmt = random_fsmt(len(source) + 4, len(target) + 4, SIZES, "all" if joint else "none", "relu", True)
    args = args_of(share_all_embeddings=joint)
    came = fairseq.load(write_folder(tmp_path, fairseq_state(fsmt), args, source, target))
    ids, unknown = {symbol: i for i, symbol in enumerate(SPECIAL + source)}, 0
    others = [word[::-1] for word in LONG_WORDS] + ["azzb", "zz", "qab", "  b"]
    for line in known + fairseq_sentences(others, 60, seed=5):
        expected = [ids.get(piece, UNK) for piece in cut.encode(line, out_type=str)] + [EOS]
        found = came.tokenizer(line)["input_ids"]
        assert [i if i < len(ids) else UNK for i in found] == expected, line
        unknown += expected.count(UNK)
        batch = (torch.tensor([found]), torch.ones(1, len(found)).long(), torch.tensor([[EOS, UNK]]))
        theirs = logits_of(fsmt, (torch.tensor([expected]), *batch[1:]))
        ours = logits_of(came.model, batch)
        # Target ids differ, and ids that are never generated have much lower logits.
        assert_close(ours.sort(descending=True).values[..., : len(target) + 4], theirs.sort(descending=True).values)
        assert_close(came.foreign.logits(*batch), ours)
        if UNK not in expected:
            assert came.tokenizer.decode(found, skip_special_tokens=True) == " ".join(line.split())
    assert unknown > 10 and len(ids) > 15
    assert not any("Moses" in note for note in came.foreign.notes)


def test_the_first_of_equal_codes_counts(tmp_path) -> None:
    (tmp_path / "code").write_text("a b 9\nb c 8\na b 7\n\n", encoding="utf-8")
    assert read_codes(tmp_path / "code") == [("a", "b"), ("b", "c")]


def test_symbols_of_a_dictionary_follow_the_special_ones(tmp_path) -> None:
    """Other line separators of Unicode are part of a symbol."""
    (tmp_path / "dict.en.txt").write_bytes("low 9\nlo@@ 8\r\na\u2028b 7\n\u00a0 3".encode())
    assert fairseq.read_dictionary(tmp_path / "dict.en.txt") == [*SPECIAL, "low", "lo@@", "a\u2028b", "\u00a0"]


@pytest.mark.parametrize(
    ("symbol", "piece"), [("lo@@", "lo"), ("low", "low</w>"), ("@@", "@@</w>"), ("a@b", "a@b</w>")]
)
def test_symbols_and_pieces_are_spelled_for_each_other(symbol, piece) -> None:
    assert piece_of(symbol) == piece and symbol_of(piece) == symbol
