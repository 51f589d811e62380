"""What a configuration accepts, refuses, and says again after saving."""

import pytest
from transformers import AutoConfig

import hf_vaswani  # noqa: F401 (registers the model type)
from hf_vaswani import VaswaniConfig


def test_defaults_are_the_papers_base_model() -> None:
    config = VaswaniConfig()
    assert (config.d_model, config.d_ff, config.num_heads) == (512, 2048, 8)
    assert (config.encoder_layers, config.decoder_layers, config.dropout) == (6, 6, 0.1)
    assert (config.attention_dropout, config.activation_dropout, config.activation_function) == (0.0, 0.0, "relu")
    assert (config.norm_position, config.attention_bias, config.layer_norm_eps) == ("post", False, 1e-6)
    assert config.share_embeddings and config.tie_word_embeddings and config.scale_embedding


def test_the_names_of_hugging_face_are_synonyms() -> None:
    config = VaswaniConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=3, intermediate_size=96)
    assert (config.d_model, config.num_heads, config.encoder_layers, config.d_ff) == (64, 2, 3, 96)


def test_saved_and_loaded_config_is_equal(tmp_path) -> None:
    config = VaswaniConfig(d_model=64, num_heads=2, d_k=5, norm_position="pre")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is VaswaniConfig
    ignored = {"transformers_version", "_name_or_path"}
    same = {k: v for k, v in loaded.to_dict().items() if k not in ignored}
    assert same == {k: v for k, v in config.to_dict().items() if k not in ignored}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"d_model": 100, "num_heads": 8}, ["d_model (100)", "num_heads (8)"]),
        ({"d_model": 15, "num_heads": 3}, ["even", "15"]),
        ({"num_heads": 0}, ["num_heads", "0"]),
        ({"dropout": 1.5}, ["dropout", "1.5"]),
        ({"norm_position": "middle"}, ["norm_position", "middle"]),
        ({"activation_function": "rulo"}, ["activation_function", "rulo", "relu"]),
    ],
)
def test_impossible_sizes_are_refused_with_their_numbers(fields, words) -> None:
    with pytest.raises(ValueError) as error:
        VaswaniConfig(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_d_model_need_not_be_divisible_when_both_widths_are_given() -> None:
    assert VaswaniConfig(d_model=100, num_heads=8, d_k=16, d_v=12).d_k == 16
