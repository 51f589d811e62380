"""ONNX Runtime computes the same logits and translations, for any batch size and length, with and without a cache."""

import importlib
import io
import random
import re
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from hf_vaswani.conversion.protocol import Loaded
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.translation.loading import load_translator

from ..conftest import dear
from ..networks import random_batch, random_model

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hf_vaswani.conversion.onnx import OnnxTranslator, save

PAD, EOS = 0, 2
WORDS = [f"{first}{second}" for first in "bdfgklm" for second in ("a", "e", "i", "o", "u", "ai")]
MODELS = {
    "post": {"layer_norm_eps": 0.05, "sinusoid_layout": "tensor2tensor", "position_offset": 2, "type_vocab_size": 3}
    | {"embedding_norm": True, "scale_embedding": False},
    "pre": {"norm_position": "pre", "position_encoding": "learned", "max_position_embeddings": 30}
    | {"activation_function": "gelu", "attention_bias": True, "lm_head_bias": True, "d_k": 5, "d_v": 7}
    | {"tie_word_embeddings": False, "share_embeddings": False, "encoder_layers": 1, "decoder_layers": 3},
}


def random_sentences(count: int) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module", params=[dear("post"), dear("pre")])
def converted(request, tmp_path_factory):
    """A random model, the folder of its graphs, and the model in ONNX Runtime."""
    folder = tmp_path_factory.mktemp("model")
    model = random_model(seed=4, max_length_offset=20, **MODELS[request.param])
    model.save_pretrained(folder / "ours")
    train_tokenizer([" ".join(WORDS)], len(WORDS) + 4, kind="words").save_pretrained(folder / "ours")
    with redirect_stdout(io.StringIO()) as said:
        loaded = Loaded(*load_translator(folder / "ours", torch.float32), folder / "ours")
        foreign = save(loaded, folder / "onnx")
    # The exporters' own reports are suppressed.
    assert said.getvalue() == ""
    return model, folder / "onnx", foreign


def ids_of_shape(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_batch(range(3, 51), range(1, 51), shape)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 4), (5, 3, 1), (2, 7, 13), (6, 25, 3)], ids=str)
def test_logits_are_ours_for_any_sizes(converted, shape) -> None:
    model, _, foreign = converted
    ids, mask, targets = ids_of_shape(*shape)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    torch.testing.assert_close(foreign.logits(ids, mask, targets), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (3, 1, 1), (2, 3)], ids=str)
def test_decoding_with_the_cache_equals_decoding_at_once(converted, parts) -> None:
    model, folder, _ = converted
    ids, mask, targets = ids_of_shape(4, 6, 5)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    translator = OnnxTranslator(folder)
    source = translator.read(ids.numpy(), mask.numpy())
    past, found = translator.empty_cache(source), []
    for tokens in targets.split(parts, dim=1):
        logits, past = translator.write(tokens.numpy(), mask.numpy(), past, source)
        found.append(torch.from_numpy(logits))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-4, rtol=0)


def translated(model, tokenizer, sentences: list[str]) -> list[str]:
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    ids = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_greedy_translations_are_ours(converted) -> None:
    model, folder, foreign = converted
    sentences = random_sentences(100)
    expected = translated(model, AutoTokenizer.from_pretrained(folder), sentences)
    # Equality means something only if the translations vary.
    assert len(set(expected)) > 15 and len({len(text.split()) for text in expected}) > 5
    assert sum(ours == theirs for ours, theirs in zip(expected, foreign.translate(sentences), strict=True)) >= 99
    assert foreign.translate([]) == []
    assert any("greedy" in note for note in foreign.notes)


@pytest.mark.parametrize(
    "rules",
    [
        lambda often: {"suppress_tokens": [often], "bad_words_ids": [[PAD], [9]], "max_length": 9},
        lambda often: {"min_new_tokens": 6, "max_new_tokens": 8},
        lambda often: {"eos_token_id": [EOS, often]},
    ],
    ids=["suppressed", "at least", "two ends"],
)
def test_settings_of_the_generation_config_are_followed(converted, rules) -> None:
    """Settings that models converted from Marian and fairseq have."""
    model, folder, _ = converted
    translator, sentences = OnnxTranslator(folder), random_sentences(40)
    tokenizer, before = translator.tokenizer, model.generation_config
    free = translated(model, tokenizer, sentences)
    often, _ = Counter(id_ for ids in tokenizer(free)["input_ids"] for id_ in ids[:-1]).most_common(1)[0]
    model.generation_config = GenerationConfig.from_dict(before.to_dict() | rules(often))
    translator.generation_config.update(**rules(often))
    expected = translated(model, tokenizer, sentences)
    model.generation_config = before
    assert expected != free
    assert sum(a == b for a, b in zip(expected, translator.translate(sentences), strict=True)) >= 39


def test_the_folder_is_complete_and_contains_no_paths_of_this_machine(converted) -> None:
    model, folder, _ = converted
    graphs = {f"{name}.onnx{end}" for name in ("encoder", "decoder") for end in ("", ".data")}
    texts = {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
    assert {path.name for path in folder.iterdir()} == graphs | texts
    assert "auto_map" not in (folder / "config.json").read_text("utf-8")
    config = AutoConfig.from_pretrained(folder)
    expected = {name: value for name, value in model.config.to_dict().items() if name != "auto_map"}
    assert config.to_dict() | {"_name_or_path": ""} == expected
    assert GenerationConfig.from_pretrained(folder).max_length_offset == 20
    for path in folder.glob("*.onnx"):
        content = path.read_bytes()
        assert b".py" not in content and str(Path(__file__).parent.parent).encode() not in content


def test_dynamic_axes_have_names(converted) -> None:
    model, folder, _ = converted
    config, translator = model.config, OnnxTranslator(folder)
    sides = {side: getattr(translator, side) for side in ("encoder", "decoder")}
    found = {side: {each.name: each.shape for each in sides[side].get_inputs()} for side in sides}
    assert found["encoder"] == {name: ["batch", "source"] for name in ("input_ids", "attention_mask")}
    heads = [config.decoder_layers, "batch", config.num_heads]
    assert [shape[:4] for name, shape in found["decoder"].items() if name.endswith(("keys", "values"))] == [
        [*heads, "past"],
        [*heads, "past"],
        [*heads, "source"],
        [*heads, "source"],
    ]
    logits, keys, _ = sides["decoder"].get_outputs()
    assert logits.shape == ["batch", "target", config.vocab_size]
    assert set(keys.shape[3].split(" + ")) == {"past", "target"}


def test_threads_are_those_of_this_process(converted, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    translator = OnnxTranslator(converted[1])
    for session in (translator.encoder, translator.decoder):
        assert session.get_session_options().intra_op_num_threads == 3


def test_without_onnxruntime_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "hf_vaswani.conversion.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=re.escape("needs onnxruntime: pip install 'hf_vaswani[convert]'")):
        importlib.import_module("hf_vaswani.conversion.onnx")
