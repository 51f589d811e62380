"""What a configuration accepts, refuses, and says again after saving."""

import json

import pytest
from transformers import AutoConfig

import hf_vaswani  # noqa: F401 (registers the model type)
from hf_vaswani import VaswaniConfig
from hf_vaswani.model.configuration_vaswani import CUSTOM_PIPELINES, PipelineTasks


def test_defaults_are_the_papers_base_model() -> None:
    config = VaswaniConfig()
    assert (config.vocab_size, config.d_model, config.d_ff, config.num_heads) == (37_000, 512, 2048, 8)
    assert (config.d_k, config.d_v, config.lm_head_bias, config.decoder_start_token_id) == (None, None, False, 1)
    assert (config.position_encoding, config.sinusoid_layout) == ("sinusoidal", "interleaved")
    assert config.position_offset == 0
    assert (config.encoder_layers, config.decoder_layers, config.dropout) == (6, 6, 0.1)
    assert (config.attention_dropout, config.activation_dropout, config.activation_function) == (0.0, 0.0, "relu")
    assert (config.norm_position, config.attention_bias, config.layer_norm_eps) == ("post", False, 1e-6)
    assert config.share_embeddings and config.tie_word_embeddings and config.scale_embedding


def test_saved_and_loaded_config_is_equal(tmp_path) -> None:
    sizes = {"d_model": 64, "num_heads": 2, "d_k": 5, "norm_position": "pre", "lm_head_bias": True}
    for config in (VaswaniConfig(**sizes, position_encoding="learned"), VaswaniConfig(**sizes, position_offset=2)):
        config.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert type(loaded) is VaswaniConfig
        ignored = {"transformers_version": None, "_name_or_path": None}
        assert loaded.to_dict() | ignored == config.to_dict() | ignored
    # An older config has no first position.
    fields = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert fields.pop("position_offset") == 2
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    assert AutoConfig.from_pretrained(tmp_path).position_offset == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"d_model": 100, "num_heads": 8}, ["d_model (100)", "num_heads (8)"]),
        ({"d_model": 15, "num_heads": 3}, ["even", "15"]),
        ({"num_heads": 0}, ["num_heads", "0"]),
        ({"dropout": 1.5}, ["dropout", "1.5"]),
        ({"norm_position": "middle"}, ["norm_position", "middle", '"post" or "pre"']),
        ({"position_encoding": "rotary"}, ["position_encoding", "rotary", '"sinusoidal" or "learned"']),
        ({"sinusoid_layout": "mixed"}, ["sinusoid_layout", "mixed", "interleaved", "concatenated", "tensor2tensor"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings", "0"]),
        ({"position_offset": -1}, ["position_offset", "at least 0", "-1"]),
        ({"position_offset": 2, "position_encoding": "learned"}, ["position_offset", "must be 0", "learned", "2"]),
        ({"vocab_size": 10, "pad_token_id": 10}, ["pad_token_id", "10", "vocab_size"]),
        ({"d_model": 30, "num_heads": 4, "d_k": 8}, ["d_model (30)", "num_heads (4)"]),
        ({"activation_function": "rulo"}, ["activation_function", "rulo", "relu"]),
    ],
)
def test_impossible_sizes_are_refused_with_their_numbers(fields, words) -> None:
    with pytest.raises(ValueError) as error:
        VaswaniConfig(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_sizes_that_fit_in_other_ways() -> None:
    assert VaswaniConfig(d_model=15, num_heads=3, position_encoding="learned").d_model == 15
    assert VaswaniConfig(d_model=100, num_heads=8, d_k=16, d_v=12).d_k == 16
    config = VaswaniConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=3, intermediate_size=96)
    assert (config.d_model, config.num_heads, config.encoder_layers, config.d_ff) == (64, 2, 3, 96)


def test_a_config_says_where_its_classes_lie(tmp_path) -> None:
    """In files that are copied beside it; the names of a config that came with other classes stay."""
    config = VaswaniConfig()
    config.auto_map = {"AutoModel": "mine.MyModel", "AutoModelForCausalLM": "heads_vaswani.VaswaniForCausalLM"}
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert saved["auto_map"]["AutoModel"] == "mine.MyModel"
    assert saved["auto_map"]["AutoConfig"] == "configuration_vaswani.VaswaniConfig"
    assert saved["custom_pipelines"]["translation"]["impl"] == "pipeline_vaswani.VaswaniTranslationPipeline"
    assert (tmp_path / "configuration_vaswani.py").is_file()
    # Earlier versions named the heads for models of both stacks, too.
    assert "heads_vaswani" not in str([*saved["auto_map"].values(), *tmp_path.iterdir()])
    assert not hasattr(VaswaniConfig.from_pretrained(tmp_path), "custom_pipelines")


def test_a_model_that_travelled_answers_to_every_pair_of_languages() -> None:
    """transformers puts classes in the place of the names that it is given, so they are copies."""
    pipelines = PipelineTasks(CUSTOM_PIPELINES)
    assert "translation" in pipelines and "translation_en_to_de" in pipelines
    assert "translation_en" not in pipelines and "summarization" not in pipelines
    pipelines["translation_en_to_de"]["impl"] = None
    assert pipelines["translation"]["impl"] == "pipeline_vaswani.VaswaniTranslationPipeline"
    assert list(pipelines) == ["translation"]


def test_every_pair_of_languages_is_an_alias_of_the_translation_task() -> None:
    aliases = PipelineTasks({"ner": "token-classification"})
    assert aliases["translation_en_to_de"] == "translation" and aliases["ner"] == "token-classification"
    assert "translation" not in aliases and "translation_en_de" not in aliases
    with pytest.raises(KeyError, match="translation_en_de"):
        aliases["translation_en_de"]
    assert list(aliases) == ["ner"]
