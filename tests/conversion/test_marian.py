"""Marian's models come in and ours go out, with the same logits, ids and translations."""

import json
import os
import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from benchmarks.parity import random_batch, randomize
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTranslationPipeline
from hf_vaswani.conversion import marian_npz
from hf_vaswani.conversion.marian import load, recognize, save
from hf_vaswani.data.tokenizer import train_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
ENGLISH = "a the red old small dog cat house street girl runs sees likes over under in two three and".split()
GERMAN = "ein der rote alte kleine Hund Katze Häuser Straße Mädchen läuft sieht mag über unter zwei drei und".split()
SIZES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "scale_embedding": True}
SIZES |= {f"{side}_attention_heads": 3 for side in ("encoder", "decoder")}
SIZES |= {f"{side}_ffn_dim": 50 for side in ("encoder", "decoder")}
SHAPES = [
    {"activation_function": "swish", "max_position_embeddings": 64},
    {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 1, "decoder_layers": 1, "seed": 4},
    {"activation_function": "gelu", "d_model": 20, "encoder_attention_heads": 5, "decoder_attention_heads": 5},
    {"activation_function": "swish", "share_encoder_decoder_embeddings": False},
    {"activation_function": "relu", "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
]
# Letters of one side and of none, accents apart, ligatures, runs of unknown ones, white space of all kinds.
TEXTS = [
    *(
        "the red dog runs.",
        "  two   cats\tand\u00a0a  house ",
        "",
        "   ",
        "Straße",
        "the ЖЖ dog",
        "你好 dog",
        "dog\n\ncat",
    ),
    *(
        "ﬁne caﬀe\u0301",
        "cafe\u0301 naïve",
        "ｔｈｅ　ｄｏｇ",
        "½ dog…",
        "▁dog ▁",
        "😀😀 cat",
        "über Mädchen",
        "the</s> dog",
    ),
    *(
        "a <unk> dog",
        "dogcatdog",
        "x" * 70,
        "the dog\u200b",
        ">>deu<< the dog",
        ">>deu<<the dog",
        "²three",
        "undß alteß",
        "roteЖ! einß",
    ),
]


def sentences(words: list[str], seed: int, count: int = 150) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(2, 8))) + draw.choice(".!?") for _ in range(count)]


def train_spm(text: list[str], **settings: object) -> bytes:
    model, options = BytesIO(), {"vocab_size": 70, "hard_vocab_limit": False} | settings
    options |= {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=model, **options)
    return model.getvalue()


@pytest.fixture(scope="session")
def spms() -> dict[str, bytes]:
    return {"source": train_spm(sentences(ENGLISH, 1)), "target": train_spm(sentences(GERMAN, 2))}


def pieces(spm: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    return [processor.id_to_piece(i) for i in range(2, processor.get_piece_size())]


def numbered(tokens: list[str], seed: int = 3) -> dict[str, int]:
    """As OPUS-MT's: the end first, padding last, all else in an order of its own."""
    shuffled = sorted(set(tokens))
    random.Random(seed).shuffle(shuffled)
    return {token: i for i, token in enumerate([EOS, UNK, *shuffled, PAD])}


def marian_folder(
    folder: Path,
    spms: dict[str, bytes],
    separate: bool = False,
    left_out: tuple[str, ...] = (),
    seed: int = 2,
    generation: dict[str, object] | None = None,
    **fields: object,
) -> MarianMTModel:
    """A folder as OPUS-MT's, with random weights everywhere."""
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    source = [piece for piece in pieces(spms["source"]) if piece not in left_out]
    vocab = numbered([*source, ">>deu<<", *([] if separate else pieces(spms["target"]))])
    (folder / "vocab.json").write_text(json.dumps(vocab))
    settings = {"separate_vocabs": separate, "model_max_length": 64, "tokenizer_class": "MarianTokenizer"}
    target = vocab
    if separate:
        tokens = [*numbered(pieces(spms["target"]) + [f"<extra_{i}>" for i in range(40)], seed=4)][:-1]
        # Padding is where the source has it, as transformers' decoder wants it.
        tokens.insert(vocab[PAD], PAD)
        target = {token: i for i, token in enumerate(tokens)}
        (folder / "target_vocab.json").write_text(json.dumps(target))
        settings["target_vocab_file"] = str(folder / "target_vocab.json")
        fields = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": len(target)} | fields
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"pad_token_id": vocab[PAD], "decoder_start_token_id": vocab[PAD], "forced_eos_token_id": 0}
    model = MarianMTModel(MarianConfig(vocab_size=len(vocab), **(SIZES | ids | fields))).eval()
    randomize(model, seed)
    with torch.no_grad():
        # The end often enough for translations of many lengths.
        model.lm_head.weight[0] *= 1.5
        for matrix in {model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight}:
            # Large enough for sources to matter beside their positions.
            matrix *= 1.0 if model.config.scale_embedding else model.config.d_model**0.5
            matrix[vocab[PAD]] = 0
    rules = {
        "num_beams": 4,
        "max_length": 24,
        "bad_words_ids": [[vocab[PAD]]],
        "no_repeat_ngram_size": 1,
        "min_length": 5,
    }
    model.generation_config.update(**(rules | (generation or {})))
    model.save_pretrained(folder)
    return MarianMTModel.from_pretrained(folder).eval()


def largest_difference(ours: VaswaniForConditionalGeneration, foreign, valid: list[int] | None = None) -> float:
    batch = random_batch(ours.config, 5, 11, 7, "right")
    if valid is not None:
        for name in ("input_ids", "decoder_input_ids"):
            batch[name] = torch.tensor(valid)[batch[name] % len(valid)]
    expected = foreign.logits(batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"])
    with torch.no_grad():
        actual = ours(**batch).logits
    assert actual.shape == expected.shape
    return (actual - expected)[batch["decoder_attention_mask"].bool()].abs().max().item()


def their_translations(folder: Path, texts: list[str]) -> list[str]:
    """By transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


def our_translations(model, tokenizer, texts: list[str]) -> list[str]:
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


@pytest.mark.parametrize("fields", SHAPES)
def test_a_marian_comes_in_with_the_same_logits_and_translations(fields, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms, **fields)
    converted = load(tmp_path)
    assert converted.model.config.vocab_size == len(converted.tokenizer)
    assert largest_difference(converted.model, converted.foreign) <= 1e-5
    texts = sentences(ENGLISH, 5, count=30)
    expected = their_translations(tmp_path, texts)
    assert len(set(expected)) > 15
    assert len({len(text) for text in expected}) > 5
    assert our_translations(converted.model, converted.tokenizer, texts) == expected
    pipe = VaswaniTranslationPipeline(converted.model, converted.tokenizer, batch_size=8)
    assert [found["translation_text"] for found in pipe(texts)] == expected


@pytest.mark.parametrize(
    "generation", [{"length_penalty": 0.6, "early_stopping": True}, {"num_beams": 1}, {"max_length": 9}]
)
def test_the_settings_of_the_search_come_along(generation, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms, activation_function="swish", generation=generation)
    converted = load(tmp_path)
    texts = sentences(ENGLISH, 5, count=20)
    assert our_translations(converted.model, converted.tokenizer, texts) == their_translations(tmp_path, texts)


def test_half_precision_comes_in_as_float32(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms).half().save_pretrained(tmp_path)
    converted = load(tmp_path)
    assert {weight.dtype for weight in converted.model.parameters()} == {torch.float32}
    assert largest_difference(converted.model, converted.foreign) <= 1e-5


def test_what_came_in_is_saved_and_loaded_again(spms, tmp_path) -> None:
    (tmp_path / "marian").mkdir()
    marian_folder(tmp_path / "marian", spms, activation_function="swish")
    converted = load(tmp_path / "marian")
    converted.model.save_pretrained(tmp_path / "ours")
    converted.tokenizer.save_pretrained(tmp_path / "ours")
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "ours")
    texts = sentences(ENGLISH, 5, count=10)
    found = our_translations(model.eval(), AutoTokenizer.from_pretrained(tmp_path / "ours"), texts)
    assert found == their_translations(tmp_path / "marian", texts)


# ---- The tokenizer -----------------------------------------------------------------------------------------------


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


def test_only_pieces_of_the_source_are_used_for_it(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    theirs, ours = both_tokenizers(tmp_path)
    letters = {letter for piece in pieces(spms["source"]) for letter in piece}
    of_source = {theirs.encoder[piece] for piece in pieces(spms["source"])} | {0, theirs.encoder[UNK]}
    texts = ["".join(c for c in text if c in letters | {" "}) for text in sentences(GERMAN, 9, 100)]
    assert {id_ for text in texts for id_ in ours(text)["input_ids"]} <= of_source
    # They could be cut into pieces of the target.
    assert {id_ for text in texts for id_ in theirs(text_target=text)["input_ids"]} - of_source


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


def test_letters_that_only_symbols_have_are_named(spms, tmp_path) -> None:
    marian_folder(tmp_path, spms)
    assert not any("user-defined" in note for note in load(tmp_path).foreign.notes)
    marian_folder(tmp_path, {**spms, "source": train_spm(sentences(ENGLISH, 1), user_defined_symbols=["XaY", "Z"])})
    (note,) = [note for note in load(tmp_path).foreign.notes if "user-defined" in note]
    assert "(X Y) are read as <unk>" in note


@pytest.mark.real_data
def test_real_text_has_marians_ids_and_is_found_again(multi30k, tmp_path) -> None:
    text = {side: (multi30k / f"train.{side}").read_text("utf-8").splitlines()[:6000] for side in ("en", "de")}
    spms = {"source": train_spm(text["en"][:3000], vocab_size=2000)}
    marian_folder(tmp_path, spms | {"target": train_spm(text["de"][:3000], vocab_size=2000)})
    theirs, ours = both_tokenizers(tmp_path)
    for lines in (text["en"][3000:], text["de"][3000:4000]):
        assert ours(lines)["input_ids"] == theirs(lines)["input_ids"]
    ids = [theirs(text_target=line)["input_ids"] for line in text["de"][3000:4000]]
    expected = theirs.batch_decode(ids, skip_special_tokens=True)
    assert ours.batch_decode(ids, skip_special_tokens=True) == expected


# ---- Vocabularies that are not one -------------------------------------------------------------------------------


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


# ---- Out ---------------------------------------------------------------------------------------------------------


def test_there_and_back_again_are_equal_weights(spms, tmp_path) -> None:
    marian = marian_folder(tmp_path, spms, activation_function="swish")
    converted = load(tmp_path)
    save(converted.model, converted.tokenizer, tmp_path / "back")
    back = MarianMTModel.from_pretrained(tmp_path / "back")
    expected, found = marian.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    expected, found = (each.generation_config.to_diff_dict() for each in (marian, back))
    expected.pop("_from_model_config", None)
    assert found == expected


OURS = [
    {},
    {"attention_bias": True, "lm_head_bias": True, "num_heads": 3},
    {"share_embeddings": False, "scale_embedding": False},
    {"tie_word_embeddings": False, "d_k": 6, "d_v": 6, "sinusoid_layout": "concatenated"},
]


def our_model(tokenizer, seed: int = 1, **fields: object) -> VaswaniForConditionalGeneration:
    sizes = {"vocab_size": len(tokenizer), "d_model": 24, "d_ff": 40, "num_heads": 4, "layer_norm_eps": 1e-5}
    sizes |= {"encoder_layers": 2, "decoder_layers": 1}
    model = VaswaniForConditionalGeneration(VaswaniConfig(**(sizes | fields))).eval()
    randomize(model, seed)
    with torch.no_grad():
        model.lm_head.weight[2] *= 1.5
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(sentences(ENGLISH, 1), 300)


@pytest.mark.parametrize("fields", OURS)
def test_ours_goes_out_with_the_same_logits_and_translations(fields, tokenizer, tmp_path) -> None:
    model = our_model(tokenizer, **fields)
    rules = {"length_penalty_type": "power", "finish_candidates": "top", "max_length_offset": None, "max_length": 20}
    rules |= {"num_beams": 4, "no_repeat_ngram_size": 1, "min_length": 4}
    model.generation_config.update(**rules)
    foreign = save(model, tokenizer, tmp_path)
    assert largest_difference(model, foreign) <= 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path)("a dog")["input_ids"] == tokenizer("a dog")["input_ids"]
    texts = sentences(ENGLISH, 5, count=20)
    found = our_translations(model, tokenizer, texts)
    assert len(set(found)) > 10
    assert their_translations(tmp_path, texts) == found
    assert any("tokenizer.json" in note for note in foreign.notes)


def test_what_marians_search_has_not_is_noted(tokenizer, tmp_path) -> None:
    foreign = save(our_model(tokenizer), tokenizer, tmp_path)
    for part in ("'gnmt'", "'all'", "50 tokens more"):
        assert any(part in note for note in foreign.notes), part
    assert MarianMTModel.from_pretrained(tmp_path).generation_config.max_length == 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_position": "pre"}, 'norm_position "pre", but Marian has only "post"'),
        ({"position_encoding": "learned"}, 'position_encoding "learned"'),
        ({"sinusoid_layout": "tensor2tensor"}, 'sinusoid_layout "tensor2tensor"'),
        ({"d_k": 5}, "d_k 5, but a head of Marian's has d_model / num_heads = 24 / 4"),
        ({"d_v": 7}, "d_v 7"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps 1e-06, but Marian's is always 1e-05.* train it with"),
    ],
)
def test_what_marian_has_not_is_refused(fields, message, tokenizer, tmp_path) -> None:
    model = our_model(tokenizer, **fields)
    with pytest.raises(ValueError, match=message):
        save(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert all(m.eps == model.config.layer_norm_eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm))


# ---- Wrong inputs ------------------------------------------------------------------------------------------------


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_wrong_folders_are_refused_in_one_sentence(spms, tmp_path) -> None:
    folder = tmp_path / "marian"

    def refused(*parts: str) -> None:
        with pytest.raises(ValueError) as caught:
            load(folder)
        assert all(part in str(caught.value) for part in parts), caught.value
        assert "\n" not in str(caught.value)

    def fresh() -> MarianMTModel:
        folder.mkdir(exist_ok=True)
        return marian_folder(folder, spms)

    assert not recognize(folder)
    size = fresh().config.vocab_size
    assert recognize(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    changed(folder / "vocab.json", more=size)
    refused("vocab.json", str(size + 1), str(size))
    (folder / "vocab.json").write_text(json.dumps({token: id_ + 1 for token, id_ in vocab.items()}))
    refused("vocab.json", f"0 to {size - 1}")
    (folder / "vocab.json").unlink()
    refused("vocab.json is missing")
    fresh()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1000])
    refused(str(folder))
    (folder / "model.safetensors").unlink()
    refused(str(folder))
    for fields, parts in (
        ({"vocab_size": size + 3, "decoder_vocab_size": size + 3}, (str(size), str(size + 3), "final_logits_bias")),
        ({"decoder_vocab_size": size + 2}, (str(size), str(size + 2), "decoder_vocab_size")),
        ({"decoder_layers": 4}, ("decoder.layers.3",)),
        ({"decoder_layers": 2}, ("decoder.layers.2",)),
        ({"encoder_attention_heads": 2}, ("encoder_attention_heads 2", "decoder_attention_heads 3")),
        ({"decoder_ffn_dim": 51}, ("encoder_ffn_dim 50", "decoder_ffn_dim 51")),
        ({"encoder_layerdrop": 0.1}, ("encoder_layerdrop 0.1",)),
        ({"normalize_before": True}, ("normalize_before True",)),
    ):
        fresh()
        changed(folder / "config.json", **fields)
        refused(*parts)
    for name in ("source.spm", "target.spm"):
        fresh()
        (folder / name).write_bytes(spms["source"][:-5000])
        refused(name)
        (folder / name).unlink()
        refused(name, "missing")
    fresh()
    (folder / "source.spm").write_bytes(train_spm(sentences(ENGLISH, 1), model_type="bpe"))
    refused("source.spm", "model_type bpe")
    fresh()
    (folder / "config.json").write_text("{")
    refused("config.json is not JSON")


def test_old_weights_are_read_and_other_pickles_are_not(spms, tmp_path) -> None:
    marian = marian_folder(tmp_path, spms)
    (tmp_path / "model.safetensors").unlink()
    torch.save(marian.state_dict(), tmp_path / "pytorch_model.bin")
    converted = load(tmp_path)
    assert largest_difference(converted.model, converted.foreign) <= 1e-5
    for name in ("encoder", "decoder"):
        weights = marian.state_dict()
        weights[f"model.{name}.embed_positions.weight"] = weights[f"model.{name}.embed_positions.weight"].flip(1)
        torch.save(weights, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="not Marian's sinusoids"):
            load(tmp_path)
    torch.save({"weights": Opens(tmp_path / "opened")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path)
    assert not (tmp_path / "opened").exists()


class Opens:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


# ---- Marian's own files ------------------------------------------------------------------------------------------

OPTIONS = {
    **{"type": "transformer", "dim-emb": 24, "transformer-dim-ffn": 40, "transformer-heads": 4, "enc-depth": 2},
    **{"dec-depth": 1, "transformer-ffn-activation": "swish", "transformer-preprocess": ""},
    **{"transformer-postprocess": "dan", "transformer-postprocess-top": "", "transformer-postprocess-emb": "d"},
    **{
        "transformer-decoder-autoreg": "self-attention",
        "transformer-no-projection": False,
        "tied-embeddings-all": True,
    },
    **{"transformer-tied-layers": [], "transformer-guided-alignment-layer": "last", "transformer-depth-scaling": True},
}
PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
MATRICES = {"all": ("Wemb",), "target": ("encoder_Wemb", "decoder_Wemb"), "none": ("encoder_Wemb", "decoder_Wemb")}


def npz_weights(options: dict[str, object], tied: str, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """Random weights by Marian's names."""
    draw = np.random.default_rng(5)
    d_model, d_ff = options["dim-emb"], options["transformer-dim-ffn"]
    weights = {}

    def put(name: str, rows: int, columns: int, around: float = 0.0) -> None:
        scale = 0.2 if rows == 1 else rows**-0.5
        weights[name] = (draw.normal(size=(rows, columns)) * scale + around).astype(np.float32)

    def put_norm(name: str) -> None:
        suffix = "" if name.endswith("_top") or not options["transformer-preprocess"] else "_pre"
        put(f"{name}_ln_scale{suffix}", 1, d_model, 1.0)
        put(f"{name}_ln_bias{suffix}", 1, d_model)

    for side, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        for layer in (f"{side}_l{i + 1}" for i in range(depth)):
            for kind in ["self"] + ["context"] * (side == "decoder"):
                for letter in "qkvo":
                    put(f"{layer}_{kind}_W{letter}", d_model, d_model)
                    put(f"{layer}_{kind}_b{letter}", 1, d_model)
                put_norm(f"{layer}_{kind}_Wo")
            for digit, shape in (("1", (d_model, d_ff)), ("2", (d_ff, d_model))):
                put(f"{layer}_ffn_W{digit}", *shape)
                put(f"{layer}_ffn_b{digit}", 1, shape[1])
            put_norm(f"{layer}_ffn_ffn")
        if options["transformer-postprocess-top"]:
            put_norm(f"{side}_top")
    for name, size in zip(MATRICES[tied], sizes, strict=False):
        put(name, size, d_model)
        weights[name] *= (size / d_model) ** 0.5
    if tied == "none":
        put("decoder_ff_logit_out_W", d_model, sizes[1])
    put("decoder_ff_logit_out_b", 1, sizes[1])
    return weights


def write_npz(folder: Path, options: dict[str, object], weights: dict[str, np.ndarray]) -> Path:
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", dtype=np.int8)
    np.savez(folder / "model.npz", **weights, **{"special:model.yml": text})
    return folder / "model.npz"


def npz_folder(folder: Path, spms: dict[str, bytes], tied: str = "all", separate: bool = False, **changes: object):
    """A folder as Marian's, its weights by name, and its source and target vocabulary."""
    options = OPTIONS | changes
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    # Words that YAML takes for something else.
    odd = ["true", "1.5", "null", "~", "<<", "#x", "'", '"', "?", ":", "-"]
    both = [*pieces(spms["source"]), *([] if separate else pieces(spms["target"])), *odd]
    vocabs = [numbered(both)] + [numbered(pieces(spms["target"]), seed=4)] * separate
    for i, vocab in enumerate(vocabs):
        del vocab[PAD]
        (folder / f"vocab{i}.yml").write_text(yaml.safe_dump(vocab, allow_unicode=True), encoding="utf-8")
    weights = npz_weights(options, tied, (len(vocabs[0]), len(vocabs[-1])))
    write_npz(folder, options, weights)
    names = [f"vocab{i}.yml" for i in (0, len(vocabs) - 1)]
    decoder = {"models": ["model.npz"], "vocabs": names, "beam-size": 3, "normalize": 0.6}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    return options, weights, vocabs[0], vocabs[-1]


def marian_logits(options: dict[str, object], weights: dict[str, np.ndarray], source: list[int], target: list[int]):
    """Marian's transformer for one sentence, in float64: `(1 + target, target vocabulary)`."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    d_model, heads = options["dim-emb"], options["transformer-heads"]
    before, behind = options["transformer-preprocess"] == "n", options["transformer-postprocess"] == "dan"

    def norm(x, name, suffix=""):
        deviation = x - x.mean(-1, keepdims=True)
        scaled = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * w[f"{name}_ln_scale{suffix}"] + w[f"{name}_ln_bias{suffix}"]

    def sublayer(x, name, function):
        y = x + function(norm(x, name, "_pre") if before else x)
        return norm(y, name) if behind else y

    def linear(x, name, which):
        return x @ w[f"{name}_W{which}"] + w[f"{name}_b{which}"]

    def attention(name, x, memory, causal):
        parts = [linear(x, name, "q"), linear(memory, name, "k"), linear(memory, name, "v")]
        q, k, v = (part.reshape(len(part), heads, -1).swapaxes(0, 1) for part in parts)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(d_model / heads)
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = exponentials / exponentials.sum(-1, keepdims=True) @ v
        return linear(mixed.swapaxes(0, 1).reshape(len(x), -1), name, "o")

    def ffn(x, name):
        hidden = linear(x, name, "1")
        slope = {"swish": 1.0, "gelu": 1.702}.get(options["transformer-ffn-activation"])
        hidden = np.maximum(hidden, 0) if slope is None else hidden / (1 + np.exp(-slope * hidden))
        return linear(hidden, name, "2")

    def positions(rows):
        angles = np.arange(len(rows))[:, None] / 10000 ** (np.arange(d_model // 2) / (d_model // 2 - 1))
        return rows * np.sqrt(d_model) + np.concatenate((np.sin(angles), np.cos(angles)), axis=1)

    def stack(side, x, memory):
        for i in range(options["enc-depth" if side == "encoder" else "dec-depth"]):
            layer = f"{side}_l{i + 1}"
            x = sublayer(
                x,
                f"{layer}_self_Wo",
                lambda y: attention(f"{layer}_self", y, y, side == "decoder"),  # noqa: B023
            )
            if memory is not None:
                x = sublayer(
                    x,
                    f"{layer}_context_Wo",
                    lambda y: attention(f"{layer}_context", y, memory, False),  # noqa: B023
                )
            x = sublayer(x, f"{layer}_ffn_ffn", lambda y: ffn(y, f"{layer}_ffn"))  # noqa: B023
        return norm(x, f"{side}_top") if options["transformer-postprocess-top"] else x

    of_source, of_target = (w.get(f"{side}_Wemb", w.get("Wemb")) for side in ("encoder", "decoder"))
    encoded = stack("encoder", positions(of_source[source]), None)
    started = np.concatenate((np.zeros((1, d_model)), of_target[target]))
    output = w.get("decoder_ff_logit_out_W", of_target.T)
    return stack("decoder", positions(started), encoded) @ output + w["decoder_ff_logit_out_b"]


NPZ = [
    {},
    {"transformer-ffn-activation": "relu"} | PRE_NORM,
    {"transformer-ffn-activation": "gelu", "tied": "target", "enc-depth": 1, "transformer-heads": 2},
    {"tied": "none", "dec-depth": 2},
    {"tied": "target", "separate": True},
    {"tied": "none", "separate": True} | PRE_NORM,
]


@pytest.mark.parametrize("changes", NPZ)
def test_marians_own_files_come_in_with_marians_logits(changes, spms, tmp_path) -> None:
    options, weights, source, target = npz_folder(tmp_path, spms, **changes)
    assert marian_npz.recognize(tmp_path)
    assert marian_npz.recognize(tmp_path / "model.npz")
    converted = marian_npz.load(tmp_path)
    model, tokenizer = converted.model, converted.tokenizer
    assert model.config.tie_word_embeddings == (changes.get("tied") != "none")
    assert model.config.share_embeddings == ("tied" not in changes)
    text = "the red dog sees a house."
    ids = tokenizer(text)["input_ids"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    expected_ids = [source.get(piece, 1) for piece in processor.encode(text, out_type=str)] + [0]
    assert ids == expected_ids
    translation = [random.Random(6).randrange(2, len(target)) for _ in range(7)]
    expected = marian_logits(options, weights, expected_ids, translation)
    # A target's id is behind the source's where it has a list of its own.
    names = sorted(target, key=target.get)
    rest = {name: i for i, name in enumerate(name for name in names if name not in (EOS, UNK))}
    ours = [
        i if not changes.get("separate") or name in (EOS, UNK) else len(source) + 1 + rest[name]
        for i, name in enumerate(names)
    ]
    start = model.config.decoder_start_token_id
    decoder_ids = torch.tensor([[start, *(ours[id_] for id_ in translation)]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=decoder_ids).logits[0]
    assert np.abs(logits[:, ours].numpy() - expected).max() <= 1e-5
    others = [i for i in range(model.config.vocab_size) if i not in ours]
    assert (logits[:, others] < -1e8).all()


def test_marians_own_files_translate_as_in_ctranslate2(spms, tmp_path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from ctranslate2.converters import MarianConverter

    options, weights, _, _ = npz_folder(tmp_path, spms)
    # Without them CTranslate2 takes sinusoids that are a little other than Marian's.
    half = options["dim-emb"] // 2
    angles = np.arange(100)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
    (tmp_path / "theirs").mkdir()
    file = write_npz(tmp_path / "theirs", options, weights | {"Wpos": table})
    MarianConverter(str(file), [str(tmp_path / "vocab0.yml")]).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), inter_threads=1, intra_threads=1)
    converted = marian_npz.load(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    texts = sentences(ENGLISH, 5, count=20)
    rules = {"beam_size": 1, "disable_unk": True, "max_decoding_length": 12, "no_repeat_ngram_size": 1}
    found = translator.translate_batch([processor.encode(text, out_type=str) for text in texts], **rules)
    expected = ["".join(each.hypotheses[0]).replace("▁", " ").strip() for each in found]
    assert len(set(expected)) > 5
    batch = converted.tokenizer(texts, return_tensors="pt", padding=True)
    rules = {"num_beams": 1, "max_new_tokens": 12, "no_repeat_ngram_size": 1, "forced_eos_token_id": None}
    ours = converted.model.generate(**batch, **rules)
    assert converted.tokenizer.batch_decode(ours, skip_special_tokens=True) == expected


def test_vocabularies_of_marians_own_can_be_spm_files(spms, tmp_path) -> None:
    (tmp_path / "vocab.spm").write_bytes(spms["source"])
    size = len(pieces(spms["source"])) + 2
    write_npz(tmp_path, OPTIONS, npz_weights(OPTIONS, "all", (size, size)))
    converted = marian_npz.load(tmp_path / "model.npz")
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    for text in sentences(ENGLISH, 5, count=20):
        assert converted.tokenizer(text)["input_ids"] == [*processor.encode(text), 0]
    assert converted.model.config.vocab_size == size + 1
    assert not converted.foreign.notes


def test_decoder_yml_sets_the_search(spms, tmp_path) -> None:
    npz_folder(tmp_path, spms)
    model = marian_npz.load(tmp_path).model
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (3, 0.6, "power")
    assert settings.suppress_tokens == [1]
    found = model.generate(torch.tensor([[5, 6, 7, 0]]), max_length=10)
    assert not torch.isin(found[:, 1:], torch.tensor([1])).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "s2s"}, "type 's2s'"),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg 'rnn'"),
        ({"transformer-train-position-embeddings": True}, "transformer-train-position-embeddings True"),
        ({"transformer-tied-layers": [1, 1]}, r"transformer-tied-layers \[1, 1\]"),
        ({"transformer-postprocess-emb": "nd"}, "transformer-postprocess-emb 'nd'"),
        ({"transformer-ffn-depth": 3}, "transformer-ffn-depth 3"),
        ({"transformer-decoder-dim-ffn": 8}, "transformer-dim-ffn 40 and transformer-decoder-dim-ffn 8"),
        ({"transformer-ffn-activation": "tanh"}, "transformer-ffn-activation 'tanh'"),
        ({"transformer-preprocess": "d"}, "transformer-preprocess 'd'"),
        ({"right-left": True}, "right-left True"),
        ({"lemma-dim-emb": 16}, "lemma-dim-emb 16"),
        ({"enc-depth": 1}, "has encoder_l2_"),
        ({"enc-depth": 3}, "has no encoder_l3_self_Wq"),
        ({"transformer-dim-ffn": 41}, "40.*41"),
    ],
)
def test_options_that_ours_has_not_are_refused(changes, message, spms, tmp_path) -> None:
    _, weights, _, _ = npz_folder(tmp_path, spms)
    write_npz(tmp_path, OPTIONS | changes, weights)
    with pytest.raises(ValueError, match=message):
        marian_npz.load(tmp_path)


def test_wrong_files_of_marians_own_are_refused(spms, tmp_path) -> None:
    options, weights, vocab, _ = npz_folder(tmp_path, spms)
    file, list_ = tmp_path / "model.npz", tmp_path / "vocab0.yml"
    content, ids = file.read_bytes(), list_.read_text("utf-8")

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            marian_npz.load(tmp_path)
        file.write_bytes(content)
        list_.write_text(ids, encoding="utf-8")

    list_.write_text(ids + "more: 999\n", encoding="utf-8")
    refused(f"vocab0.yml has {len(vocab) + 1} entries, but Wemb has {len(vocab)} rows")
    list_.write_text("a: [", encoding="utf-8")
    refused("vocab0.yml is not YAML")
    list_.write_text("a: x", encoding="utf-8")
    refused("has 'x' for 'a', which is no id")
    list_.unlink()
    refused("vocab0.yml is missing")
    file.write_bytes(content[:-2000])
    refused("model.npz is not a whole .npz file")
    write_npz(tmp_path, options, {**weights, "Wemb": np.array([Opens(tmp_path / "opened")], dtype=object)})
    refused("model.npz is not a whole .npz file")
    assert not (tmp_path / "opened").exists()
    write_npz(tmp_path, options, {**weights, "Wemb": weights["Wemb"].astype(np.int8)})
    refused("Wemb in int8")
    np.savez(file, **weights)
    refused("has no special:model.yml")
    (tmp_path / "source.spm").unlink()
    refused("source.spm is missing")
    assert not marian_npz.recognize(tmp_path / "vocab0.yml")
    (tmp_path / "decoder.yml").write_text("models: [a.npz, b.npz]")
    refused("names 2 models, but only 1")
