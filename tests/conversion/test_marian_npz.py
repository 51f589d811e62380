"""Marian's own files convert to the logits of Marian's network and the translations of CTranslate2."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from hf_vaswani.conversion.marian_npz import load

from .marian_folders import (
    ENGLISH,
    EOS,
    OPTIONS,
    PRE_NORM,
    UNK,
    npz_folder,
    npz_weights,
    pieces,
    sentences,
    write_npz,
)

GELU = {"transformer-ffn-activation": "gelu"}
NPZ = [
    {},
    {"transformer-ffn-activation": "relu"} | PRE_NORM,
    GELU | {"version": "v1.12.0 65bf82ff 2023-02-21 09:56:29 -0800", "tied": "target", "enc-depth": 1},
    {"tied": "none", "dec-depth": 2, "transformer-heads": 2},
    {"tied": "target", "separate": True},
    {"tied": "none", "separate": True} | PRE_NORM,
]


@pytest.mark.parametrize("changes", NPZ)
def test_logits_and_translations_are_those_of_ctranslate2(changes, spms, tmp_path) -> None:
    """It reads Marian's files itself."""
    options, weights, source, target = npz_folder(tmp_path, spms, **changes)
    converted = load(tmp_path)
    model, tokenizer = converted.model, converted.tokenizer
    assert model.config.tie_word_embeddings == (changes.get("tied") != "none")
    assert model.config.share_embeddings == ("tied" not in changes)
    translator = in_ctranslate2(tmp_path, options, weights, 1 + ("separate" in changes))
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    texts = sentences(ENGLISH, 5, count=20)
    pieces_of = [processor.encode(text, out_type=str) for text in texts]
    for text, found in zip(texts, pieces_of, strict=True):
        assert tokenizer(text)["input_ids"] == [*(source.get(piece, 1) for piece in found), 0]
    # Ids of a separate target vocabulary follow those of the source.
    names = sorted(target, key=target.get)
    rest = {name: i for i, name in enumerate(name for name in names if name not in (EOS, UNK))}
    shared = "separate" not in changes
    ours = [i if shared or name in (EOS, UNK) else len(source) + 1 + rest[name] for i, name in enumerate(names)]
    translation = [random.Random(6).randrange(2, len(target)) for _ in range(7)]
    result = translator.translate_batch(
        pieces_of[:1],
        [[names[id_] for id_ in translation]],
        beam_size=1,
        end_token=next(name for name in names[2:] if target[name] not in translation),
        min_decoding_length=0,
        max_decoding_length=8,
        return_logits_vocab=True,
    )[0]
    expected = np.stack([np.array(row) for row in result.logits[0]])
    decoder_ids = torch.tensor([[model.config.decoder_start_token_id, *(ours[id_] for id_ in translation)]])
    with torch.no_grad():
        ids = torch.tensor([tokenizer(texts[0])["input_ids"]])
        logits = model(input_ids=ids, decoder_input_ids=decoder_ids).logits[0]
    assert np.abs(logits[:, ours].numpy() - expected).max() <= 1e-5
    assert (logits[:, [i for i in range(model.config.vocab_size) if i not in ours]] < -1e8).all()

    rules = {"disable_unk": True, "max_decoding_length": 12, "no_repeat_ngram_size": 1}
    found = translator.translate_batch(pieces_of, beam_size=1, **rules)
    theirs = ["".join(each.hypotheses[0]).replace("▁", " ").strip() for each in found]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    rules = {"num_beams": 1, "max_new_tokens": 12, "no_repeat_ngram_size": 1, "forced_eos_token_id": None}
    translations = tokenizer.batch_decode(model.generate(**batch, **rules), skip_special_tokens=True)
    assert len(set(theirs)) > 5 and translations == theirs


def in_ctranslate2(folder: Path, options: dict, weights: dict, vocabularies: int) -> Any:
    """Converts Marian's files by CTranslate2, with Marian's sinusoids and epsilon."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    from ctranslate2.converters import MarianConverter

    half = options["dim-emb"] // 2
    angles = np.arange(100)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
    (folder / "theirs").mkdir()
    file = write_npz(folder / "theirs", options, weights | {"Wpos": table})
    paths = [str(folder / f"vocab{i}.yml") for i in (0, vocabularies - 1)]
    MarianConverter(str(file), paths).convert(str(folder / "ct2"))
    config = folder / "ct2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"layer_norm_epsilon": 1e-6}))
    return ctranslate2.Translator(str(folder / "ct2"), inter_threads=1, intra_threads=1)


def test_vocabularies_can_be_spm_files(spms, tmp_path) -> None:
    (tmp_path / "vocab.spm").write_bytes(spms["source"])
    size = len(pieces(spms["source"])) + 2
    write_npz(tmp_path, OPTIONS, npz_weights(OPTIONS, "all", (size, size)))
    converted = load(tmp_path / "model.npz")
    processor = sentencepiece.SentencePieceProcessor(model_proto=spms["source"])
    for text in sentences(ENGLISH, 5, count=20):
        assert converted.tokenizer(text)["input_ids"] == [*processor.encode(text), 0]
    assert converted.model.config.vocab_size == size + 1
    assert not converted.foreign.notes


@pytest.mark.parametrize(
    ("version", "beside", "expected"),
    [
        ("v1.9.56", None, "quick_gelu"),
        ("v1.12.0", None, "quick_gelu"),
        ("v1.12.42", "v1.9.0", "gelu"),
        ("v1.13.0", None, "gelu"),
        (None, "v1.12.42 1a2b3c4d 2025-05-01", "gelu"),
        ("v1.12.1", "v1.12.42", "gelu"),
        ("v1.12.1", None, None),
        ("mine", None, None),
        (None, None, None),
    ],
)
def test_gelu_is_that_of_the_version_which_wrote_the_file(version, beside, expected, spms, tmp_path) -> None:
    npz_folder(tmp_path, spms, **GELU, **({} if version is None else {"version": version}))
    if beside is not None:
        (tmp_path / "model.npz.yml").write_text(f"version: {beside}\n")
    if expected is None:
        with pytest.raises(
            ValueError, match=f"'gelu', which is .* its version is {(version and repr(version)) or 'not'}"
        ):
            load(tmp_path)
    else:
        assert load(tmp_path).model.config.activation_function == expected


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_folder_as_marian_leaves_it(given, spms, tmp_path) -> None:
    """With its own files about the model beside it, paths as they were given, and the best model so far."""
    npz_folder(tmp_path, spms)
    expected = load(tmp_path).model
    (tmp_path / "decoder.yml").unlink()
    (tmp_path / "model.npz").rename(tmp_path / "m.npz")
    settings = "models: [runs/m.npz]\nvocabs: [data/vocab0.yml, data/vocab0.yml]\nbeam-size: 5\nnormalize: 1\n"
    (tmp_path / "m.npz.decoder.yml").write_text(settings)
    for name in ("m.npz.yml", "m.npz.progress.yml", "m.npz.best-bleu.npz.decoder.yml", "m.iter20.npz.decoder.yml"):
        (tmp_path / name).write_text("beam-size: 9\n")
    for name in ("m.npz.optimizer.npz", "m.npz.best-bleu.npz", "m.npz.orig.npz", "m.iter20.npz", "m.iter1000.npz"):
        (tmp_path / name).write_bytes(b"")
    found = load(tmp_path if given == "folder" else tmp_path / "m.npz").model
    assert (found.generation_config.num_beams, found.generation_config.length_penalty) == (5, 1.0)
    assert all(torch.equal(weight, found.state_dict()[name]) for name, weight in expected.state_dict().items())
    # Without its settings, there is one vocabulary.
    (tmp_path / "m.npz.decoder.yml").unlink()
    assert load(tmp_path).model.generation_config.num_beams == 12
    (tmp_path / "other.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 .npz files: give the one to convert \(m.npz, other.npz\)"):
        load(tmp_path)
    # Without the last one, a person chooses.
    for name in ("other.npz", "m.npz"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"\(m.iter1000.npz, m.iter20.npz, m.npz.best-bleu.npz"):
        load(tmp_path)


def test_decoder_yml_sets_the_search(spms, tmp_path) -> None:
    npz_folder(tmp_path, spms)
    model = load(tmp_path).model
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (3, 0.6, "power")
    assert settings.suppress_tokens == [1]
    found = model.generate(torch.tensor([[5, 6, 7, 0]]), max_length=10)
    assert not torch.isin(found[:, 1:], torch.tensor([1])).any()
