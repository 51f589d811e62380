"""Builds folders of Marian models with random weights, in the formats of transformers (OPUS-MT) and Marian itself."""

import json
import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from transformers import AutoTokenizer, MarianConfig, MarianMTModel

from benchmarks.parity import randomize

EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
ENGLISH = "a the red old small dog cat house street girl runs sees likes over under in two three and".split()
GERMAN = "ein der rote alte kleine Hund Katze Häuser Straße Mädchen läuft sieht mag über unter zwei drei und".split()
SIZES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "scale_embedding": True}
SIZES |= {f"{side}_attention_heads": 3 for side in ("encoder", "decoder")}
SIZES |= {f"{side}_ffn_dim": 50 for side in ("encoder", "decoder")}
# Letters of either side or neither, combining accents, ligatures, runs of unknown letters, all kinds of white space.
TEXTS = [
    "the red dog runs.", "  two   cats\tand\u00a0a  house ", "", "   ", "Straße", "the ЖЖ dog", "你好 dog",
    "dog\n\ncat", "ﬁne caﬀe\u0301", "cafe\u0301 naïve", "ｔｈｅ　ｄｏｇ", "½ dog…", "▁dog ▁", "😀😀 cat",
    "über Mädchen", "the</s> dog", "a <unk> dog", "dogcatdog", "x" * 70, "the dog\u200b", ">>deu<< the dog",
    ">>deu<<the dog", "²three", "undß alteß", "roteЖ! einß",
]  # fmt: skip


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
    """Numbers tokens as OPUS-MT does: </s> first, padding last, all others in random order."""
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
    """Writes a folder in the format of OPUS-MT, and returns its model with random weights."""
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    source = [piece for piece in pieces(spms["source"]) if piece not in left_out]
    vocab = numbered([*source, ">>deu<<", *([] if separate else pieces(spms["target"]))])
    (folder / "vocab.json").write_text(json.dumps(vocab))
    settings = {"separate_vocabs": separate, "model_max_length": 64, "tokenizer_class": "MarianTokenizer"}
    target = vocab
    if separate:
        tokens = [*numbered(pieces(spms["target"]) + [f"<extra_{i}>" for i in range(40)], seed=4)][:-1]
        # transformers' decoder requires the same id for padding on both sides.
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
        # Larger weights make </s> frequent enough for translations of many lengths.
        model.lm_head.weight[0] *= 1.5
        for matrix in {model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight}:
            # Large enough for sources to matter in addition to their positions.
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


# ---- Both sides --------------------------------------------------------------------------------------------------


def their_translations(folder: Path, texts: list[str]) -> list[str]:
    """Translates with transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


def our_translations(model, tokenizer, texts: list[str]) -> list[str]:
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


# ---- Marian's own files ------------------------------------------------------------------------------------------

OPTIONS = {
    "type": "transformer", "dim-emb": 24, "transformer-dim-ffn": 40, "transformer-heads": 4, "enc-depth": 2,
    "dec-depth": 1, "transformer-ffn-activation": "swish", "transformer-preprocess": "",
    "transformer-postprocess": "dan", "transformer-postprocess-top": "", "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": False, "tied-embeddings-all": True,
    "transformer-tied-layers": [], "transformer-guided-alignment-layer": "last", "transformer-depth-scaling": True,
}  # fmt: skip
PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
MATRICES = {"all": ("Wemb",), "target": ("encoder_Wemb", "decoder_Wemb"), "none": ("encoder_Wemb", "decoder_Wemb")}


def npz_weights(options: dict[str, object], tied: str, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns random weights by Marian's names."""
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
    """Writes a folder in Marian's own format; returns its options, weights, source and target vocabulary."""
    options = OPTIONS | changes
    for side, spm in spms.items():
        (folder / f"{side}.spm").write_bytes(spm)
    # Words that YAML interprets as other values.
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
