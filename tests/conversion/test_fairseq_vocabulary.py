"""The tokenizer produces the ids of fairseq's dictionaries and codes, and decodes them to the same text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_vaswani.conversion.fairseq import load
from hf_vaswani.conversion.fairseq_vocabulary import piece_of, read_codes, read_dictionary, symbol_of

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
    sentences,
    simple_folder,
    word_list,
    write_folder,
)


def test_separate_dictionaries_are_joined(tmp_path) -> None:
    source, target = word_list(60, seed=1), word_list(40, seed=2)
    assert 2 < len(set(source) & set(target)) < 40
    fsmt = random_fsmt(64, 44, SHAPES[1][0], "decoder", "relu", True, seed=2)
    shares = {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    came = load(write_folder(tmp_path, fairseq_state(fsmt), args_of(SHAPES[1][0], **shares), source, target))
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

    text = sentences(source + target)
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
    greedy = came.model.generate(**batch, num_beams=1, early_stopping=False)
    assert came.foreign.translate(text) == came.tokenizer.batch_decode(greedy, skip_special_tokens=True)


@pytest.mark.parametrize("form", ["subword-nmt", "fastBPE"])
def test_codes_produce_the_ids_of_fairseq(tmp_path, form) -> None:
    known = sentences(LONG_WORDS, 30)
    folder, codes, symbols, fsmt = codes_folder(tmp_path, known, form)
    came = load(folder)
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    unseen = sentences(
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
    came = load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    inside, word = came.tokenizer("ab")["input_ids"], came.tokenizer("a@@")["input_ids"]
    assert inside == [4, 5, EOS] and came.tokenizer("@@")["input_ids"] == [6, EOS] and word[0] >= 7
    decoder_ids = torch.tensor([[EOS, 4]])
    expected = logits_of(model, (torch.tensor([[4, EOS]]), torch.ones(1, 2).long(), decoder_ids))
    found = logits_of(came.model, (torch.tensor([word]), torch.ones(1, 2).long(), decoder_ids))
    assert_close(found[..., :7], expected)


def test_pieces_are_decoded_to_words(tmp_path) -> None:
    came = load(codes_folder(tmp_path, sentences(LONG_WORDS, 30))[0])
    ids = came.tokenizer("abaäßab dddbac")["input_ids"]
    assert came.tokenizer.decode([EOS, *ids, PAD], skip_special_tokens=True) == "abaäßab dddbac"
    cut = [came.tokenizer.convert_tokens_to_ids(piece) for piece in ("aba", "ab</w>", "ddd")]
    assert UNK not in cut
    assert came.tokenizer.decode([EOS, *cut, EOS], skip_special_tokens=True) == "abaab ddd"
    assert any("Moses" in note for note in came.foreign.notes)


def test_without_codes_text_is_split_at_spaces(tmp_path) -> None:
    symbols = ["lo@@", "w", "low", "Wör@@", "ter", "."]
    model = random_fsmt(10, 10, SIZES, "all", "relu", True)
    came = load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer(" lo@@ w  Wör@@ ter\tnever .")["input_ids"]
    assert ids == [4, 5, 7, 8, UNK, 9, EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "low Wörter ."
    assert tokenizer.decode([6, 4], skip_special_tokens=True) == "low lo"
    assert any("already split by them" in note for note in came.foreign.notes)


def train_sentencepiece(file: Path, kind: str) -> None:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(LONG_WORDS, 200)),
        model_prefix=str(file.with_suffix("")),
        vocab_size=40,
        model_type=kind,
        minloglevel=2,
    )


@pytest.mark.variants(2)
@pytest.mark.parametrize("joint", [True, False])
def test_sentencepiece_produces_the_ids_of_fairseq(tmp_path, joint) -> None:
    spm = pytest.importorskip("sentencepiece")
    train_sentencepiece(tmp_path / "sentencepiece.bpe.model", "unigram")
    cut = spm.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.bpe.model"))
    known = sentences(LONG_WORDS, 30)
    # Some of its pieces are missing, and one symbol is not a piece.
    pieces = dict.fromkeys(piece for line in known for piece in cut.encode(line, out_type=str))
    source = [*list(pieces)[:-5], "zz"]
    target = source if joint else word_list(20)
    fsmt = random_fsmt(len(source) + 4, len(target) + 4, SIZES, "all" if joint else "none", "relu", True)
    args = args_of(share_all_embeddings=joint)
    came = load(write_folder(tmp_path, fairseq_state(fsmt), args, source, target))
    ids, unknown = {symbol: i for i, symbol in enumerate(SPECIAL + source)}, 0
    for line in known + sentences([word[::-1] for word in LONG_WORDS] + ["azzb", "zz", "qab", "  b"], 60, seed=5):
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


def test_sentencepiece_models_of_other_types_are_rejected(tmp_path) -> None:
    folder, _ = simple_folder(tmp_path)
    train_sentencepiece(folder / "sentencepiece.bpe.model", "bpe")
    with pytest.raises(ValueError, match=r"sentencepiece\.bpe\.model has the model_type bpe"):
        load(folder)


# ---- Damaged files -----------------------------------------------------------------------------------------------


def test_damaged_and_missing_dictionaries_are_rejected(tmp_path) -> None:
    folder, model = simple_folder(tmp_path)
    english, german = folder / "dict.en.txt", folder / "dict.de.txt"
    text = english.read_text("utf-8")
    english.write_text(text + "more 1\nandmore 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"encoder\.embed_tokens\.weight has 33 rows.* 35 symbols"):
        load(folder)
    for line, words in (
        ("word\n", "line 30: expected a symbol and its count, but found 'word'"),
        ("word x\n", "line 30.*'word x'"),
        ("<unk> 7\n", "line 30: the symbol '<unk>' is repeated"),
    ):
        english.write_text(text + line, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load(folder)
    english.write_bytes(text.encode() + b"\xff 3\n")
    with pytest.raises(ValueError, match=r"dict\.en\.txt, line 30, is not UTF-8"):
        load(folder)
    english.unlink()
    with pytest.raises(ValueError, match=r"contains no dict\.en\.txt: if dict.de.txt is for both sides, copy it"):
        load(folder)
    german.unlink()
    with pytest.raises(ValueError, match=r"contains no dict\.\*\.txt"):
        load(folder)
    write_folder(folder, fairseq_state(model), args_of(target_lang=None), word_list(29), word_list(29, seed=9))
    with pytest.raises(ValueError, match=r"dict\.de\.txt, dict\.en\.txt, which differ.*target_lang None"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#version: 0.1\na b\n", "version 0.1"),
        ("", "contains no pieces to merge"),
        ("a b\nab </w>\n", "line 2.*version 0.1"),
        ("#version: 0.2\na b\nabc\n", "line 3: expected two pieces to merge, but found 'abc'"),
        ("a b 3\na b c\n", "line 2"),
    ],
)
def test_codes_in_other_formats_are_rejected(tmp_path, text, words) -> None:
    (tmp_path / "code").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_codes(tmp_path / "code")


def test_the_first_of_equal_codes_counts(tmp_path) -> None:
    (tmp_path / "code").write_text("a b 9\nb c 8\na b 7\n\n", encoding="utf-8")
    assert read_codes(tmp_path / "code") == [("a", "b"), ("b", "c")]


def test_symbols_of_a_dictionary_follow_the_special_ones(tmp_path) -> None:
    """Other line separators of Unicode are part of a symbol."""
    (tmp_path / "dict.en.txt").write_bytes("low 9\nlo@@ 8\r\na\u2028b 7\n\u00a0 3".encode())
    assert read_dictionary(tmp_path / "dict.en.txt") == [*SPECIAL, "low", "lo@@", "a\u2028b", "\u00a0"]


def test_symbols_and_pieces_are_spelled_for_each_other() -> None:
    for symbol, piece in (("lo@@", "lo"), ("low", "low</w>"), ("@@", "@@</w>"), ("a@b", "a@b</w>")):
        assert piece_of(symbol) == piece and symbol_of(piece) == symbol
