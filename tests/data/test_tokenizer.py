"""Encoding and decoding restores every text, up to what a kind of vocabulary cannot spell."""

import json
import os
import subprocess
import sys
import unicodedata
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_vaswani.data.tokenizer import (
    SPECIAL_TOKENS,
    Frame,
    add_tags,
    load_tokenizer,
    put_special_tokens,
    splits_digits,
    train_tokenizer,
)

from ..conftest import ROOT

KINDS = ["bpe", "unigram", "wordpiece", "words", "characters", "bytes"]
HARD = [
    "Don't stop, it's 3.5 %!",
    "Größe  über   alles: Öl, Ärger, e\u0301tude",
    "  two leading spaces",
    "a </s> <pad> <unk> <s> b ## ▁ <0x41>",
    "日本語 🏳️‍🌈 Ġ \x00",
    "ohne" * 50,
    "zwei  Leerzeichen,\ttab",
    "„Zitat“ – 3,14 % …",
    "\x00\x07",
]
TEXT = ["The dog's red ball, please!", "Der Hund spielt schön.", "Ein Mann und ein Hund."] * 20


def text_of(sentence: str) -> str:
    """Returns the sentence as it is decoded: normalised, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", sentence).split())


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 400)


def test_punctuation_is_split_from_words(tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer("Der Hund, der Mann.")["input_ids"][:-1]]
    assert all(not (any(c.isalpha() for c in piece) and any(c in ",.!'" for c in piece)) for piece in pieces)
    assert "," in pieces
    assert "." in pieces


def test_a_word_is_the_same_piece_at_the_start_and_inside(tokenizer) -> None:
    assert tokenizer("Hund")["input_ids"][:-1] == tokenizer("ein Hund")["input_ids"][1:-1]
    # A frequent word is one piece.
    assert len(tokenizer("Hund")["input_ids"]) == 2


@pytest.mark.parametrize(
    ("frame", "segments", "side", "splits", "inputs"),
    [
        (Frame(), False, "right", True, ["input_ids", "attention_mask"]),
        (Frame(bos=True, eos=False), False, "left", True, ["input_ids", "attention_mask"]),
        (Frame(bos=True, reads_mask=True), True, "right", False, ["input_ids", "token_type_ids", "attention_mask"]),
    ],
)
def test_what_a_task_asks_of_a_tokenizer_is_saved(frame, segments, side, splits, inputs, tmp_path) -> None:
    tokenizer = train_tokenizer(TEXT, 400)
    put_special_tokens(tokenizer, frame, segments)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.padding_side, loaded.split_special_tokens, loaded.model_input_names) == (side, splits, inputs)
    batch = [TEXT[0], TEXT[1] + " <s>"]
    assert loaded(batch, padding=True).data == tokenizer(batch, padding=True).data


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request):
    # Bytes spell any text, without having seen it.
    return request.param, train_tokenizer(
        TEXT if request.param in ("bpe", "bytes") else [*TEXT, *HARD], 400, request.param
    )


def test_every_kind_spells_its_training_text_and_bytes_any_text(any_tokenizer) -> None:
    kind, tokenizer = any_tokenizer
    for sentence in (*TEXT[:3], *HARD, ""):
        ids = tokenizer(sentence)["input_ids"]
        assert ids[-1] == 2
        assert not {0, 1, 2, 3} & set(ids[:-1])
        assert tokenizer.decode(ids, skip_special_tokens=True) == text_of(sentence)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert len(tokenizer) == 260 if kind == "bytes" else len(tokenizer) <= 400


def test_bytes_that_are_no_letter_are_decoded_as_nothing(any_tokenizer, tmp_path) -> None:
    kind, tokenizer = any_tokenizer
    tokenizer.save_pretrained(tmp_path)
    chance = Random(1)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        for _ in range(50):
            assert "\ufffd" not in each.decode([chance.randrange(len(each)) for _ in range(20)])
        if kind in ("bpe", "bytes"):
            # A letter that ends too early, and one that begins too late.
            ids = each("Hund 猫", add_special_tokens=False)["input_ids"]
            assert each.decode(ids[:-1]).strip() == "Hund" and each.decode([ids[-1], *ids]).endswith("Hund 猫")


@pytest.mark.parametrize("kind", KINDS)
def test_digits_are_entries_of_their_own_if_asked(kind, tmp_path) -> None:
    text = ["On 2024-11-29 he paid 2024 € by 2024.", "Am 29.11.2024 zahlte er 2024 €.", "3 6 7 8 ४२ m² B2024"] * 9
    plain, split = (train_tokenizer(text, 400, kind, split_digits=each) for each in (False, True))
    split.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert (splits_digits(plain), splits_digits(split), splits_digits(loaded)) == (False, True, True)
    has_numbers = any(len(entry.strip("Ġ▁ ")) > 1 and entry.strip("Ġ▁ ").isdecimal() for entry in plain.get_vocab())
    assert has_numbers == (kind in ("bpe", "wordpiece", "words"))
    for tokenizer in (split, loaded):
        entries = [tokenizer.decode([number]) for number in range(len(SPECIAL_TOKENS), len(tokenizer))]
        assert not [entry for entry in entries if len(entry) > 1 and any(map(str.isnumeric, entry))]
        # Alike at the beginning, behind a space, a letter and a sign.
        ids = tokenizer("2024", add_special_tokens=False)["input_ids"][-4:]
        for sentence in ("he paid 2024", "B2024", "29.11.2024"):
            assert tokenizer(sentence, add_special_tokens=False)["input_ids"][-4:] == ids
        for sentence in (*text, "29.11.2087", "४२४"):
            assert tokenizer.decode(tokenizer(sentence)["input_ids"], skip_special_tokens=True) == sentence


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_a_vocabulary_of_others_writes_no_broken_letters_either(kind, tmp_path) -> None:
    tokenizer = train_tokenizer(TEXT, 400, kind)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("Hund 猫", add_special_tokens=False)["input_ids"]
    assert "\ufffd" in tokenizer.decode(ids[:-1])
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode(ids[:-1]).strip() == "Hund" and loaded.decode(ids).strip() == "Hund 猫"


def test_the_bytes_of_a_rare_letter_that_are_no_letter_are_decoded_as_nothing(tmp_path) -> None:
    """Byte fallback, in which frequent letters have entries of their own."""
    entries = ["<pad>", "<s>", "</s>", "<unk>", "h", "i", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    ids = loaded("hi猫hi")["input_ids"]
    assert loaded.decode(ids) == "hi猫hi" and loaded.decode([*ids[:4], *ids[5:]]) == "hihi"


def test_what_a_kind_cannot_spell_is_unk(any_tokenizer) -> None:
    kind, tokenizer = any_tokenizer
    ids = tokenizer("Ein Ω spielt.")["input_ids"]
    assert (3 in ids) == (kind not in ("bpe", "bytes"))
    assert tokenizer.decode([i for i in ids if i != 3], skip_special_tokens=True).split() == (
        ["Ein", "spielt."] if 3 in ids else ["Ein", "Ω", "spielt."]
    )


def test_the_entries_of_each_kind() -> None:
    def pieces(kind: str, sentence: str, vocab_size: int = 400) -> list[str]:
        tokenizer = train_tokenizer(TEXT, vocab_size, kind)
        return tokenizer.convert_ids_to_tokens(tokenizer(sentence)["input_ids"][:-1])

    assert pieces("words", "Ein Hund, please!") == [" Ein", " Hund", ",", " please", "!"]
    assert pieces("characters", "ein Hund") == list("ein Hund")
    assert pieces("bytes", "schö") == ["s", "c", "h", "Ã", "¶"]
    assert train_tokenizer(TEXT, 400, "bytes")("schö")["input_ids"] == [4 + byte for byte in "schö".encode()] + [2]
    # 4 + 3 entries keep the most frequent ones.
    assert pieces("words", "Ein Hund spielt.", vocab_size=7) == ["<unk>", " Hund", "<unk>", "."]


def made_up_text() -> list[str]:
    """Frequent and rare words; the capitals are rare letters."""
    random = Random(1)
    words = [
        "".join(random.choice("bdfgkmnrst") + random.choice("aeiou") for _ in range(1 + n % 4)) for n in range(300)
    ]
    words[::10] = [word.capitalize() for word in words[::10]]
    return [" ".join(words[int(300 * random.random() ** 3)] for _ in range(10)) for _ in range(400)]


def cuts(word: str) -> list[list[str]]:
    """Yields all segmentations of a word."""
    if not word:
        return [[]]
    return [[word[:end], *rest] for end in range(1, len(word) + 1) for rest in cuts(word[end:])]


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_the_segmentation_of_a_word(kind) -> None:
    """Unigram: the most probable segmentation. Word-piece: the longest matching entry, then the rest likewise."""
    tokenizer = train_tokenizer(made_up_text(), 100, kind)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    worth = dict(vocabulary)
    for word in ["badugomi", "tisenora", "kitifuso", "magemba", "ndrosuke", "ribugefa", "nanananan"]:
        possible = [cut for cut in cuts(" " + word) if all(piece in worth for piece in cut)]
        best = max(
            possible,
            key=lambda cut: sum(worth[piece] for piece in cut) if kind == "unigram" else [len(piece) for piece in cut],
        )
        assert tokenizer.convert_ids_to_tokens(tokenizer(word)["input_ids"][:-1]) == best
        assert len(best) < len(word) + 1


@pytest.mark.process
def test_every_kind_is_deterministic() -> None:
    """Even in another process, with other hashes and other threads."""
    text = made_up_text()
    program = (
        "import sys, json; from hf_vaswani.data.tokenizer import train_tokenizer; kinds, text = json.load(sys.stdin);"
        "json.dump([train_tokenizer(text, 300, kind).backend_tokenizer.to_str() for kind in kinds], sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([KINDS, text]),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"RAYON_NUM_THREADS": "3"},
    )
    for kind, there in zip(KINDS, json.loads(done.stdout), strict=True):
        assert train_tokenizer(text, 300, kind).backend_tokenizer.to_str() == there, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaded", [False, True])
def test_another_vocabulary_learned_by_transformers_decodes_to_the_same_text(kind, loaded, tmp_path) -> None:
    tokenizer = train_tokenizer(TEXT, 400, kind)
    if loaded:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prefix = {"continuing_subword_prefix": ""} if kind == "wordpiece" else {}
    other = tokenizer.train_new_from_iterator(TEXT, 400, show_progress=False, **prefix)
    for sentence in TEXT[:5]:
        ids = other(sentence)["input_ids"]
        assert ids[-1] == other.eos_token_id and other.unk_token_id not in ids
        assert other.decode(ids, skip_special_tokens=True) == " ".join(sentence.split())
    # Characters it cannot encode are not lost.
    assert (other.unk_token_id in other("木")["input_ids"]) == (kind not in ("bpe", "bytes"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
def test_an_unpaired_surrogate_in_training_text_is_refused(kind) -> None:
    with pytest.raises(ValueError, match=r"unpaired UTF-16 surrogate.*a\\ud800b"):
        train_tokenizer([*TEXT, "a\ud800b"], 400, kind)


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 259 .*260"):
        train_tokenizer(TEXT, 259)
    with pytest.raises(ValueError, match="vocab_size 4 .*words.*5"):
        train_tokenizer(TEXT, 4, "words")
    for kind in ("unigram", "wordpiece"):
        with pytest.raises(ValueError, match=f"vocab_size 20 is too small for '{kind}'"):
            train_tokenizer(TEXT, 20, kind)
    assert len(train_tokenizer(TEXT, 1, "bytes")) == 260
    # And for its tags.
    with pytest.raises(ValueError, match="vocab_size 261 .*262"):
        train_tokenizer(TEXT, 261, languages=["de", "fr"])
    assert len(train_tokenizer(TEXT, 262, languages=["de", "fr"])) == 262


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_tag_is_one_entry_in_front_of_the_same_ids(kind, tmp_path) -> None:
    """The tag is written into the text; the vocabulary has the requested size, with the tags at its end."""
    tokenizer = train_tokenizer([*TEXT, *HARD], 400, kind, languages=["de", "pt-br"])
    plain = train_tokenizer([*TEXT, *HARD], 398, kind)
    assert len(tokenizer) == len(plain) + 2
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for sentence in (*TEXT[:3], *HARD, "", "<2fr> a", "xyz Ω."):
        ids = plain(sentence)["input_ids"]
        assert loaded(sentence)["input_ids"] == ids
        texts = [each.decode(ids, skip_special_tokens=True) for each in (loaded, plain)]
        assert texts[0] == texts[1]
        for space in ("", " ", "  "):
            assert loaded(f"<2de>{space}{sentence}")["input_ids"] == [len(plain), *ids]
        assert loaded(f"<2pt-br> {sentence}")["input_ids"] == [len(plain) + 1, *ids]
    # An existing tag is not added again.
    add_tags(loaded, ["<2de>", "<2fr>"])
    assert loaded.convert_tokens_to_ids(["<2de>", "<2pt-br>", "<2fr>"]) == [len(plain) + i for i in range(3)]


def test_a_folder_without_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}.*no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.real_data
@pytest.mark.slow
def test_ten_thousand_entries_on_multi30k(multi30k) -> None:
    lines = [line for name in ("train.en", "train.de") for line in (multi30k / name).read_text("utf-8").split("\n")]
    tokenizer = train_tokenizer(lines, 10_000)
    assert len(tokenizer) == 10_000
    for line in lines[::97]:
        ids = tokenizer(line)["input_ids"]
        assert 3 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text_of(line)


@pytest.mark.process
def test_importing_the_tokenizer_loads_no_training_dependencies() -> None:
    """Translating and converting use it without the `train` extra."""
    program = (
        "import sys, transformers; before = set(sys.modules); import hf_vaswani.data.tokenizer; "
        "import hf_vaswani.data.batching; print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "hf_vaswani" in loaded
    assert not loaded & {"datasets", "pyarrow", "pandas", "evaluate", "sacrebleu"}
