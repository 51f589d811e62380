"""Marian's own files convert to the logits of Marian's network and the translations of CTranslate2."""

import math
import random

import numpy as np
import pytest
import sentencepiece
import torch

from hf_vaswani.conversion.marian_npz import load, recognize

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


def marian_logits(options: dict[str, object], weights: dict[str, np.ndarray], source: list[int], target: list[int]):
    """Computes Marian's logits of one sentence in float64, of shape `(1 + target, target vocabulary)`."""
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
        activation = options["transformer-ffn-activation"]
        if activation == "gelu" and "v1.12.42" in options["version"]:
            return linear(hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2, name, "2")
        slope = {"swish": 1.0, "gelu": 1.702}.get(activation)
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


GELU = {"transformer-ffn-activation": "gelu"}
NPZ = [
    {},
    {"transformer-ffn-activation": "relu"} | PRE_NORM,
    GELU | {"version": "v1.12.0 65bf82ff 2023-02-21 09:56:29 -0800", "tied": "target", "enc-depth": 1},
    GELU | {"version": "v1.12.42", "transformer-heads": 2},
    {"tied": "none", "dec-depth": 2},
    {"tied": "target", "separate": True},
    {"tied": "none", "separate": True} | PRE_NORM,
]


@pytest.mark.parametrize("changes", NPZ)
def test_logits_are_those_of_marian(changes, spms, tmp_path) -> None:
    options, weights, source, target = npz_folder(tmp_path, spms, **changes)
    assert recognize(tmp_path)
    assert recognize(tmp_path / "model.npz")
    converted = load(tmp_path)
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
    # Ids of a separate target vocabulary follow those of the source.
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


def test_translations_are_those_of_ctranslate2(spms, tmp_path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from ctranslate2.converters import MarianConverter

    options, weights, _, _ = npz_folder(tmp_path, spms)
    # By default, CTranslate2 computes sinusoids that differ slightly from Marian's.
    half = options["dim-emb"] // 2
    angles = np.arange(100)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
    (tmp_path / "theirs").mkdir()
    file = write_npz(tmp_path / "theirs", options, weights | {"Wpos": table})
    MarianConverter(str(file), [str(tmp_path / "vocab0.yml")]).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), inter_threads=1, intra_threads=1)
    converted = load(tmp_path)
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
    for name in ("m.npz.yml", "m.npz.progress.yml", "m.npz.best-bleu.npz.decoder.yml"):
        (tmp_path / name).write_text("beam-size: 9\n")
    for name in ("m.npz.optimizer.npz", "m.npz.best-bleu.npz"):
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


def test_decoder_yml_sets_the_search(spms, tmp_path) -> None:
    npz_folder(tmp_path, spms)
    model = load(tmp_path).model
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (3, 0.6, "power")
    assert settings.suppress_tokens == [1]
    found = model.generate(torch.tensor([[5, 6, 7, 0]]), max_length=10)
    assert not torch.isin(found[:, 1:], torch.tensor([1])).any()
