"""Settings of a search, for engines with a search of their own."""

import pytest
from transformers import GenerationConfig, WatermarkingConfig

from hf_vaswani import VaswaniConfig
from hf_vaswani.conversion.settings import (
    SETTINGS,
    approximated_settings,
    fixed_limit,
    forbidden_sequences,
    forces_eos,
    ignored_settings,
    max_new_tokens_for,
    start_token_id,
)

OFF = {"max_length_offset": None, "length_penalty_type": "power", "finish_candidates": "top", "early_stopping": True}
# A value other than the default for every setting.
ON = {
    "do_sample": True,
    "min_length": 5,
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "repetition_penalty": 1.3,
    "forced_bos_token_id": 7,
    "begin_suppress_tokens": [7],
    "bad_words_ids": [[7, 8]],
    "suppress_tokens": [9],
    "max_length_offset": 50,
    "max_time": 9.0,
    "stop_strings": ["a"],
    "encoder_repetition_penalty": 1.3,
    "exponential_decay_length_penalty": (5, 1.1),
    "sequence_bias": [[[7, 8], 2.0]],
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(bias=2.0),
    "renormalize_logits": True,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "constraints": ["a"],
    "force_words_ids": [[7]],
    "length_penalty_type": "gnmt",
    "finish_candidates": "all",
    "early_stopping": "never",
}


def config(**settings: object) -> GenerationConfig:
    return GenerationConfig(**(OFF | settings))


@pytest.mark.parametrize(
    ("settings", "fixed", "limit"),
    [
        ({}, 20, 20),
        ({"max_length_offset": 3}, None, 13),
        ({"max_length": 9, "max_length_offset": 3}, 8, 8),
        ({"max_new_tokens": 9, "max_length": 5}, 9, 9),
        ({"max_new_tokens": 9, "forced_eos_token_id": 2}, 9, 8),
        ({"max_length_offset": 3, "forced_eos_token_id": 2}, None, 12),
    ],
    ids=str,
)
def test_the_limit_of_a_translation(settings, fixed, limit) -> None:
    """For a source of 10 tokens, and never beyond the table of positions."""
    generation_config = config(**settings)
    assert fixed_limit(generation_config) == fixed
    assert max_new_tokens_for(generation_config, 10) == limit
    assert forces_eos(generation_config) == ("forced_eos_token_id" in settings)
    assert max_new_tokens_for(generation_config, 10, positions=5) == 4 - forces_eos(generation_config)
    assert max_new_tokens_for(generation_config, 10, positions=500) == limit


def test_forbidden_sequences_are_bad_words_and_suppressed_tokens() -> None:
    assert forbidden_sequences(config()) == []
    both = config(bad_words_ids=[[4], [5, 6]], suppress_tokens=[7, 8])
    assert forbidden_sequences(both) == [[4], [5, 6], [7], [8]]


def test_the_generation_config_overrides_the_start_token() -> None:
    assert start_token_id(config(), VaswaniConfig(decoder_start_token_id=1)) == 1
    assert start_token_id(config(decoder_start_token_id=0), VaswaniConfig(decoder_start_token_id=1)) == 0


def test_each_engine_reports_the_settings_that_it_ignores() -> None:
    assert ON.keys() == SETTINGS.keys()
    for engine, followed in (("Marian", "marian"), ("CTranslate2", "ctranslate2")):
        assert ignored_settings(config(), engine) == []
        for name, value in ON.items():
            told = ignored_settings(config(**{name: value}), engine)
            expected = f"{engine} ignores settings of the generation config and may find other translations"
            assert told == ([] if getattr(SETTINGS[name], followed) else [f"{expected}: {name}={value!r}."])
    (told,) = ignored_settings(config(**ON), "CTranslate2")
    assert "do_sample=True, min_length=5, encoder_no_repeat_ngram_size=2, forced_bos_token_id=7, begin" in told


def test_ctranslate2_comes_close_to_some_in_beam_search_alone() -> None:
    close = {name: value for name, value in ON.items() if SETTINGS[name].ctranslate2 == "closely"}
    assert approximated_settings(config(**ON, num_beams=4)) == close
    assert approximated_settings(config(**ON, num_beams=1)) == approximated_settings(config(num_beams=4)) == {}
    # What the model's rule is by default, and what has no effect.
    assert approximated_settings(config(num_beams=4, early_stopping=None)) == {"early_stopping": False}
    flat = config(num_beams=4, length_penalty_type="gnmt", length_penalty=0.0, early_stopping=None)
    assert approximated_settings(flat) == {"early_stopping": "never"}
