"""Settings of a search, for engines with a search of their own."""

from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from hf_vaswani import VaswaniConfig
from hf_vaswani.conversion.engines import EngineOptions, check_search
from hf_vaswani.conversion.settings import (
    SETTINGS,
    approximated_settings,
    fixed_limit,
    forbidden_sequences,
    forces_eos,
    greedy_within_limits,
    ignored_settings,
    max_new_tokens_for,
    settings_of_javascript,
    start_token_id,
)
from hf_vaswani.model import search_vaswani
from hf_vaswani.model.rules_vaswani import DEFAULTS, SEARCH_SETTINGS, TRANSFORMERS_RULES
from hf_vaswani.model.search_vaswani import TRANSFORMERS_ONLY

from ..model.test_search import random_model, sentences

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
    "dola_layers": "low",
    "token_healing": True,
    "length_penalty_type": "gnmt",
    "finish_candidates": "all",
    "early_stopping": "never",
}


# Settings that mean nothing without `do_sample` or groups of beams, which engines refuse, and one that mends numbers.
SAMPLING = {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "top_h": 0.5, "min_p": 0.5, "typical_p": 0.5}
SAMPLING |= {"epsilon_cutoff": 0.5, "eta_cutoff": 0.5, "diversity_penalty": 0.5, "remove_invalid_values": True}
# The fields of transformers' config that are no rows: these; sizes, lengths and special tokens, which each search has;
# what says how fast the tokens come; outputs that a translation does not have; and a note.
NO_SETTINGS = {
    *("num_beams", "num_return_sequences", "length_penalty", "max_length", "max_new_tokens"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    *SAMPLING,
    *("use_cache", "cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    "transformers_version",
}
# Of assisted decoding, which finds the same tokens.
ASSISTED = (
    "assistant_",
    "num_assistant_",
    "prompt_lookup_",
    "max_matching_",
    "is_assistant",
    "target_",
    "speculation",
)


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


def test_every_setting_has_one_row() -> None:
    """A new one, of transformers or ours, fails here until its row says who follows it."""
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_") and not name.startswith(ASSISTED)}
    assert theirs - NO_SETTINGS - {"use_mtp"} <= SETTINGS.keys() == ON.keys()
    ours = {name for name, each in SETTINGS.items() if not each.marian}
    assert ours == DEFAULTS.keys() == TRANSFORMERS_RULES.keys()
    for name, setting in SEARCH_SETTINGS.items():
        assert name in NO_SETTINGS | SETTINGS.keys()
        assert not setting.choices or {setting.default, TRANSFORMERS_RULES[name]} == set(setting.choices)
    assert SETTINGS.keys().isdisjoint(TRANSFORMERS_ONLY)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_settings_of_sampling_change_nothing_without_it(num_beams) -> None:
    model, inputs = random_model(), sentences(5)
    plain = model.generate(**inputs, num_beams=num_beams)
    assert model.generate(**inputs, num_beams=num_beams, **SAMPLING).tolist() == plain.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ON)
def test_each_setting_is_followed_or_refused_by_name(name, num_beams, monkeypatch) -> None:
    model, inputs = random_model(), sentences(5)
    given = {"num_beams": num_beams} | ({} if name == "early_stopping" and num_beams == 1 else {name: ON[name]})
    # The fast search follows it, or leaves it to transformers.
    found: list[object] = []
    for is_fast in (True, False):
        with monkeypatch.context() as without:
            if not is_fast:
                without.setattr(search_vaswani, "fast_search_inputs", lambda *_, **__: None)
            torch.manual_seed(1)
            try:
                found.append(model.generate(**inputs, **given).tolist())
            except Exception as error:
                found.append(type(error))
    assert found[0] == found[1]
    # An engine is refused it by name, unless it follows it.
    row = SETTINGS[name]
    engines = {"Marian": row.marian, "CTranslate2": row.ctranslate2, "transformers.js": row.javascript}
    for engine, followed in engines.items():
        expected = f"{engine} ignores settings of the generation config and may find other translations"
        told = ignored_settings(config(**{name: ON[name]}), engine)
        assert told == ([] if followed else [f"{expected}: {name}={ON[name]!r}."])
    settings = GenerationConfig(**OFF | {name: ON[name], "num_beams": num_beams, "eos_token_id": 2})
    settings.decoder_start_token_id = model.generation_config.decoder_start_token_id
    is_exact = SETTINGS[name].ctranslate2 == "exactly" or (SETTINGS[name].ctranslate2 and num_beams == 1)
    refused = (
        nullcontext() if is_exact else pytest.raises(ValueError, match=f"CTranslate2 cannot translate with {name}=")
    )
    with refused:
        check_search(EngineOptions("ctranslate2"), [model], settings)


def test_a_greedy_search_keeps_limits_and_special_tokens_alone() -> None:
    ends = {"eos_token_id": [2, 3], "forced_eos_token_id": 2, "decoder_start_token_id": 1, "max_new_tokens": 9}
    greedy = greedy_within_limits(config(**ON | ends, num_beams=4))
    assert greedy.num_beams == 1 and greedy.max_length_offset == ON["max_length_offset"]
    assert {name: getattr(greedy, name) for name in ends} == ends
    beams = {"length_penalty_type", "finish_candidates", "early_stopping"}
    assert all(getattr(greedy, name) is None for name in ON.keys() - beams - {"max_length_offset"})
    assert settings_of_javascript(config(no_repeat_ngram_size=2, do_sample=True)) == {"no_repeat_ngram_size": 2}


def test_ctranslate2_comes_close_to_some_in_beam_search_alone() -> None:
    close = {name: value for name, value in ON.items() if SETTINGS[name].ctranslate2 == "closely"}
    assert approximated_settings(config(**ON, num_beams=4)) == close
    assert approximated_settings(config(**ON, num_beams=1)) == approximated_settings(config(num_beams=4)) == {}
    # What the model's rule is by default, and what has no effect.
    assert approximated_settings(config(num_beams=4, early_stopping=None)) == {"early_stopping": False}
    flat = config(num_beams=4, length_penalty_type="gnmt", length_penalty=0.0, early_stopping=None)
    assert approximated_settings(flat) == {"early_stopping": "never"}
