"""Damaged and unsupported inputs of every format: one sentence that names the file and what is wrong."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hf_vaswani.cli import main
from hf_vaswani.conversion.convert import SOURCES

from .fairseq_folders import args_of, simple_folder, word_list
from .marian_folders import ENGLISH, marian_folder, npz_folder, sentences, train_spm, write_npz
from .unsafe_pickle import MakesFolder

Damage = Callable[[Path], object]
CHECKPOINT = "checkpoint_best.pt"


def text(content: str) -> Damage:
    return lambda path: path.write_text(content, encoding="utf-8")


def more_text(content: str) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes() + content.encode("utf-8", "surrogateescape"))


def values(**fields: object) -> Damage:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), encoding="utf-8")


def cut(size: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def missing(path: Path) -> None:
    path.unlink()


def nan(path: Path) -> None:
    weights = load_file(path)
    weights["model.encoder.layers.0.feed_forward.fc1.weight"][0, 0] = torch.nan
    save_file(weights, path, {"format": "pt"})


def spm(**settings: object) -> Damage:
    return lambda path: path.write_bytes(train_spm(sentences(ENGLISH, 1), **settings))


def npz(options: dict[str, Any] | None = None, **weights: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Changes options and weights of an `.npz` file."""

    def damage(path: Path) -> None:
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        given = yaml.safe_load(found.pop("special:model.yml").tobytes().rstrip(b"\0").decode())
        found |= {name: change(found[name]) for name, change in weights.items()}
        write_npz(path.parent, given | (options or {}), found)

    return damage


def without_options(path: Path) -> None:
    with np.load(path) as file:
        found = {name: file[name] for name in file.files if not name.startswith("special:")}
    np.savez(path, **found)


def pickled(content: object) -> Damage:
    return lambda path: torch.save(content, path)


def args(**settings: object) -> Damage:
    """Changes settings of a fairseq checkpoint."""
    return changed(lambda state: state | {"args": Namespace(**(vars(state["args"]) | settings))})


def weights(**by_name: object) -> Damage:
    """Changes weights of a fairseq checkpoint, whose names have `__` for dots; `None` leaves one out."""
    new = {name.replace("__", "."): weight for name, weight in by_name.items()}
    return changed(
        lambda state: (
            state | {"model": {name: each for name, each in (state["model"] | new).items() if each is not None}}
        )
    )


def changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    return lambda path: torch.save(change(torch.load(path, weights_only=False)), path)


def nan_in_pickle(path: Path) -> None:
    table = torch.load(path, weights_only=False)["model"]["encoder.embed_tokens.weight"]
    table[7] = torch.nan
    weights(encoder__embed_tokens__weight=table)(path)


def other_dictionary(path: Path) -> None:
    args(target_lang=None)(path.parent / CHECKPOINT)
    path.write_text("".join(f"{word} 1\n" for word in word_list(29, seed=9)), encoding="utf-8")


def npz_code(path: Path) -> None:
    npz(Wemb=lambda _: np.array([MakesFolder(path.parent.parent / "opened")], dtype=object))(path)


# By format: a file of the folder, what happens to it, and words of the message.
DAMAGED: dict[str, list[tuple[str, Damage, str]]] = {
    "vaswani": [
        ("model.safetensors", nan, "non-finite values in model.encoder.layers.0.feed_forward.fc1.weight"),
    ],
    "marian": [
        ("config.json", text('{"model_type"'), "is not JSON"),
        ("config.json", values(pad_token_id=99999), "the id 99999 as pad_token_id"),
        ("config.json", values(vocab_size="x"), "config.json cannot be used"),
        ("config.json", values(activation_function="x"), "activation_function 'x', which transformers does not know"),
        ("config.json", values(vocab_size=103, decoder_vocab_size=103), "final_logits_bias"),
        ("config.json", values(decoder_vocab_size=99), "decoder_vocab_size"),
        ("config.json", values(decoder_layers=4), "decoder.layers.3"),
        ("config.json", values(decoder_layers=2), "decoder.layers.2"),
        ("config.json", values(encoder_attention_heads=2), "encoder_attention_heads 2 and decoder_attention_heads 3,"),
        ("config.json", values(decoder_ffn_dim=51), "encoder_ffn_dim 50 and decoder_ffn_dim 51, but they must be eq"),
        ("config.json", values(encoder_layerdrop=0.1), "encoder_layerdrop 0.1, but only 0 is supported"),
        ("config.json", values(normalize_before=True), "normalize_before True, but only False is supported"),
        ("vocab.json", values(more=1), "entries, but the embedding (vocab_size in config.json) has "),
        ("vocab.json", values(**{"</s>": 1}), "entries an id of its own, from 0 to "),
        ("vocab.json", values(**{"</s>": True}), "entries an id of its own, from 0 to "),
        ("vocab.json", missing, "vocab.json is missing"),
        ("model.safetensors", cut(-1000), "model.safetensors"),
        ("model.safetensors", missing, "model"),
        ("source.spm", cut(-5000), "source.spm is damaged or not a SentencePiece model"),
        ("source.spm", text(""), "source.spm is not a SentencePiece model: it contains no pieces"),
        ("target.spm", missing, "target.spm, the SentencePiece model, is missing"),
        ("source.spm", spm(model_type="bpe"), "source.spm has the model_type bpe, but only unigram is supported"),
    ],
    "marian-npz": [
        ("decoder.yml", text("a: ["), "is not valid YAML"),
        ("decoder.yml", text("vocabs: [vocab0.yml]\nbeam-size: 0"), "beam-size 0"),
        ("decoder.yml", text("vocabs: [vocab0.yml]\nnormalize: a"), "normalize 'a'"),
        ("decoder.yml", text("models: [a.npz, b.npz]"), "names 2 models, but only 1"),
        ("vocab0.yml", more_text("\udcff"), "is not UTF-8"),
        ("vocab0.yml", more_text("more: 999\n"), "entries, but Wemb has "),
        ("vocab0.yml", text("a: ["), "vocab0.yml is not valid YAML"),
        ("vocab0.yml", text("a: x"), "has 'x' as the id of 'a', but it must be a whole number"),
        ("vocab0.yml", missing, "vocab0.yml, the vocabulary, is missing"),
        ("source.spm", missing, "source.spm, the SentencePiece model, is missing"),
        ("model.npz", cut(-2000), "model.npz is damaged or not an .npz file"),
        ("model.npz", npz_code, "model.npz is damaged or not an .npz file"),
        ("model.npz", npz(Wemb=lambda table: table.astype(np.int8)), "Wemb in int8"),
        ("model.npz", without_options, "has no special:model.yml"),
        ("model.npz", npz({"type": "s2s"}), "type 's2s', but only transformer is supported"),
        ("model.npz", npz({"transformer-decoder-autoreg": "rnn"}), "transformer-decoder-autoreg 'rnn'"),
        ("model.npz", npz({"transformer-train-position-embeddings": True}), "-position-embeddings True, but only"),
        ("model.npz", npz({"transformer-tied-layers": [1, 1]}), "transformer-tied-layers [1, 1]"),
        ("model.npz", npz({"transformer-postprocess-emb": "nd"}), "transformer-postprocess-emb 'nd'"),
        ("model.npz", npz({"transformer-ffn-depth": 3}), "transformer-ffn-depth 3"),
        ("model.npz", npz({"transformer-ffn-activation": "tanh"}), "'tanh', but only swish, relu, gelu are supported"),
        ("model.npz", npz({"transformer-preprocess": "d"}), "transformer-preprocess 'd'"),
        ("model.npz", npz({"right-left": True}), "right-left True"),
        ("model.npz", npz({"lemma-dim-emb": 16}), "lemma-dim-emb 16"),
        ("model.npz", npz({"enc-depth": 1}), "encoder_l2_self_Wq has no place in a Vaswani model"),
        ("model.npz", npz({"enc-depth": 3}), "has no weight for model.encoder.layers.2.self_attn.q_proj.weight"),
        ("model.npz", npz({"transformer-dim-ffn": 41}), "has the shape (40, 24), but the model requires (41, 24)"),
    ],
    "fairseq": [
        (CHECKPOINT, nan_in_pickle, "non-finite values in model.encoder.embed_tokens.weight"),
        (CHECKPOINT, text("a text"), "is damaged or was not written by torch.save"),
        (CHECKPOINT, pickled([1, 2]), '"model"'),
        (CHECKPOINT, pickled({"args": Namespace()}), '"model"'),
        (CHECKPOINT, pickled({"model": {"encoder.layers": 3}}), "encoder.layers is a int, but must be a tensor"),
        (CHECKPOINT, pickled({"model": {}, "args": None}), 'no settings: neither "args", nor "cfg"'),
        (CHECKPOINT, pickled({"model": {}, "args": {"arch": "fconv"}}), "arch 'fconv', but only transformer, trans"),
        (CHECKPOINT, pickled({"model": {}, "cfg": {"model": {"_name": "lightconv"}}}), "arch 'lightconv'"),
        (CHECKPOINT, pickled({"model": {}, "args": args_of()}), "no matrix decoder.embed_tokens.weight"),
        (CHECKPOINT, args(arch="transformer_wmt_en_de_big_t2t", encoder_normalize_before=True,
                          decoder_normalize_before=True), "no weight for model.encoder.norm"),
        (CHECKPOINT, args(layernorm_embedding=True), "layernorm_embedding True, but only False is supported"),
        (CHECKPOINT, args(quant_noise_pq=0.2), "quant_noise_pq 0.2"),
        (CHECKPOINT, args(encoder_layers_to_keep="0,1"), "encoder_layers_to_keep '0,1'"),
        (CHECKPOINT, args(decoder_attention_heads=4), "encoder_attention_heads 3 and decoder_attention_heads 4"),
        (CHECKPOINT, args(decoder_normalize_before=True), "encoder_normalize_before False and decoder_nor"),
        (CHECKPOINT, args(activation_fn="relu_squared"), "'relu_squared', but only relu, gelu, gelu_fast, gelu_accu"),
        (CHECKPOINT, args(decoder_layers=6), "decoder_layers 6 in its settings, but 1 in its weights"),
        (CHECKPOINT, weights(encoder__layernorm_embedding__weight=torch.ones(12)), "layernorm_embedding.weight has"),
        (CHECKPOINT, weights(encoder__layer_norm__weight=torch.ones(12)), "encoder.layer_norm.weight has no place"),
        (CHECKPOINT, weights(encoder__layers__1__fc2__bias=torch.ones(3)),
         "encoder.layers.1.fc2.bias has the shape (3,), but the model requires (12,)"),
        (CHECKPOINT, weights(encoder__layers__0__self_attn__q_proj__bias=None), "layers.0.self_attn.q_proj.bias"),
        ("dict.en.txt", more_text("more 1\n"), "encoder.embed_tokens.weight has 33 rows, but the dictionary has 34"),
        ("dict.en.txt", more_text("word\n"), "line 30: expected a symbol and its count, but found 'word'"),
        ("dict.en.txt", more_text("word x\n"), "line 30: expected a symbol and its count, but found 'word x'"),
        ("dict.en.txt", more_text("<unk> 7\n"), "line 30: the symbol '<unk>' is repeated"),
        ("dict.en.txt", more_text("\udcff 3\n"), "dict.en.txt, line 30, is not UTF-8"),
        ("dict.en.txt", missing, "contains no dict.en.txt: if dict.de.txt is for both sides, copy it"),
        ("dict.de.txt", other_dictionary, "which differ, but checkpoint_best.pt has source_lang 'en' and target_lang"),
        ("code", text("#version: 0.1\na b\n"), "version 0.1"),
        ("code", text(""), "contains no pieces to merge"),
        ("code", text("a b\nab </w>\n"), "line 2: 'ab </w>' is a code of version 0.1"),
        ("code", text("#version: 0.2\na b\nabc\n"), "line 3: expected two pieces to merge, but found 'abc'"),
        ("code", text("a b 3\na b c\n"), "line 2"),
        ("sentencepiece.bpe.model", spm(model_type="bpe"), "has the model_type bpe"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tiny_run, spms, tmp_path_factory) -> dict[str, Path]:
    """A whole folder of each format."""
    found = {name: tmp_path_factory.mktemp(name) for name in SOURCES} | {"vaswani": tiny_run / "model"}
    marian_folder(found["marian"], spms)
    npz_folder(found["marian-npz"], spms)
    simple_folder(found["fairseq"])
    return found


@pytest.mark.parametrize(
    ("kind", "file", "damage", "words"), [(kind, *row) for kind, rows in DAMAGED.items() for row in rows]
)
def test_what_is_wrong_is_said_in_one_sentence(folders, tmp_path, capsys, kind, file, damage, words) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders[kind], folder)
    damage(folder / file)
    capsys.readouterr()
    code = main(["convert", str(folder), str(tmp_path / "out"), "--to", "onnx" if kind == "vaswani" else "vaswani"])
    said = capsys.readouterr().err
    assert code == 2 and words in said and str(folder) in said and said.count("\n") == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", SOURCES)
def test_other_paths_are_not_recognized(folders, tmp_path, kind) -> None:
    recognize = SOURCES[kind][0].recognize
    (tmp_path / "text").write_text("text")
    assert recognize(folders[kind])
    assert not any(map(recognize, (tmp_path, tmp_path / "text", tmp_path / "none")))
    assert not any(recognize(folders[other]) for other in SOURCES if other != kind)
