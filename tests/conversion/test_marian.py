"""MarianMTModel converts in both directions with the same logits, ids and translations."""

import pytest
import torch
from transformers import AutoTokenizer, MarianMTModel, PreTrainedTokenizerFast

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.conversion.convert import largest_difference
from hf_vaswani.conversion.formats import Loaded
from hf_vaswani.conversion.marian import load, save
from hf_vaswani.data.tokenizer import train_tokenizer

from ..conftest import dear
from ..networks import random_model
from .marian_folders import (
    ENGLISH,
    marian_folder,
    our_translations,
    sentences,
    their_translations,
)
from .unsafe_pickle import MakesFolder

SHAPES = [
    {"activation_function": "swish", "max_position_embeddings": 64},
    {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 1, "decoder_layers": 1, "seed": 4},
    {"activation_function": "gelu", "d_model": 20, "encoder_attention_heads": 5, "decoder_attention_heads": 5},
    {"activation_function": "swish", "share_encoder_decoder_embeddings": False},
    {"activation_function": "relu", "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    {"separate": True},
    {"separate": True, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("fields", [*SHAPES[:2], dear(SHAPES[2]), dear(SHAPES[3]), *SHAPES[4:]])
def test_logits_and_translations_are_those_of_marian(fields, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms, **fields)
    converted = load(tmp_path)
    assert converted.model.config.vocab_size == len(converted.tokenizer)
    assert largest_difference(converted.model, converted.foreign.logits) <= 1e-5
    texts = sentences(ENGLISH, 5, count=30)
    expected = their_translations(tmp_path, texts)
    assert len(set(expected)) > 15
    assert len({len(text) for text in expected}) > 5
    assert our_translations(converted.model, converted.tokenizer, texts) == expected
    pipe = VaswaniTranslationPipeline(converted.model, converted.tokenizer, batch_size=8)
    assert [found["translation_text"] for found in pipe(texts)] == expected


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "generation", [{"length_penalty": 0.6, "early_stopping": True}, {"num_beams": 1}, {"max_length": 9}]
)
def test_settings_of_the_search_are_converted(generation, spms, tmp_path) -> None:
    marian_folder(tmp_path, spms, activation_function="swish", generation=generation)
    converted = load(tmp_path)
    texts = sentences(ENGLISH, 5, count=20)
    assert our_translations(converted.model, converted.tokenizer, texts) == their_translations(tmp_path, texts)


# ---- Out ---------------------------------------------------------------------------------------------------------


def test_a_round_trip_gives_equal_weights(spms, tmp_path) -> None:
    marian = marian_folder(tmp_path, spms, activation_function="swish")
    converted = load(tmp_path)
    save(Loaded(converted.model, converted.tokenizer, tmp_path), tmp_path / "back")
    back = MarianMTModel.from_pretrained(tmp_path / "back")
    expected, found = marian.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    expected, found = (each.generation_config.to_diff_dict() for each in (marian, back))
    expected.pop("_from_model_config", None)
    assert found == expected


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(sentences(ENGLISH, 1), 300)


@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": False, "d_k": 6, "d_v": 6, "sinusoid_layout": "concatenated"}]
)
def test_a_written_marian_has_our_logits_and_translations(fields, tokenizer, tmp_path) -> None:
    model = random_model(vocab_size=len(tokenizer), layer_norm_eps=1e-5, **fields)
    rules = {"length_penalty_type": "power", "finish_candidates": "top", "max_length_offset": None, "max_length": 20}
    rules |= {"num_beams": 4, "no_repeat_ngram_size": 1, "min_length": 4}
    model.generation_config.update(**rules)
    foreign = save(Loaded(model, tokenizer, tmp_path), tmp_path)
    assert largest_difference(model, foreign.logits) <= 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path)("a dog")["input_ids"] == tokenizer("a dog")["input_ids"]
    texts = sentences(ENGLISH, 5, count=20)
    found = our_translations(model, tokenizer, texts)
    assert len(set(found)) > 10
    assert their_translations(tmp_path, texts) == found
    assert any("tokenizer.json" in note for note in foreign.notes)


def test_ignored_settings_are_noted(tokenizer, tmp_path) -> None:
    model = random_model(vocab_size=len(tokenizer), layer_norm_eps=1e-5, max_length_offset=50)
    foreign = save(Loaded(model, tokenizer, tmp_path), tmp_path)
    for part in ("length_penalty_type='gnmt'", "finish_candidates='all'", "max_length_offset=50", "to 512 tokens"):
        assert any(part in note for note in foreign.notes), part
    assert MarianMTModel.from_pretrained(tmp_path).generation_config.max_length == 512


# ---- Wrong inputs ------------------------------------------------------------------------------------------------


def test_pickled_weights_are_read_in_float32_but_other_pickles_are_not(spms, tmp_path) -> None:
    marian = marian_folder(tmp_path, spms)
    (tmp_path / "model.safetensors").unlink()
    # The table of positions is not rounded.
    half = {name: w if "positions" in name else w.half() for name, w in marian.state_dict().items()}
    torch.save(half, tmp_path / "pytorch_model.bin")
    converted = load(tmp_path)
    assert {weight.dtype for weight in converted.model.parameters()} == {torch.float32}
    assert largest_difference(converted.model, converted.foreign.logits) <= 1e-5
    for name in ("encoder", "decoder"):
        weights = marian.state_dict()
        weights[f"model.{name}.embed_positions.weight"] = weights[f"model.{name}.embed_positions.weight"].flip(1)
        torch.save(weights, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="does not contain Marian's sinusoids"):
            load(tmp_path)
    torch.save({"weights": MakesFolder(tmp_path / "opened")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle that is damaged, or contains code: save them as model.safetensors"):
        load(tmp_path)
    assert not (tmp_path / "opened").exists()
