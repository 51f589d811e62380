"""Search settings of a `GenerationConfig`, for engines with a search of their own."""

import copy
from collections.abc import Set
from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..model.rules_vaswani import SEARCH_SETTINGS, TRANSFORMERS_RULES

# The limit of `generate()` if nothing else limits a translation.
DEFAULT_LENGTH = 20


class Setting(NamedTuple):
    """
    A setting of a search, and who follows it.

    Attributes:
        off (`tuple`): values that turn it off.
        marian (`bool`): whether a MarianMTModel follows it.
        ctranslate2 (`str`, *optional*): `"exactly"`; or `"closely"`: exactly in greedy search, and in beam search by
            the closest rule that CTranslate2 has. `None` if it does not follow it.
        javascript (`bool`): whether the greedy search of transformers.js follows it, by its own code or by the graphs
            that it runs, or has no use for it.
    """

    off: tuple[Any, ...]
    marian: bool = True
    ctranslate2: str | None = None
    javascript: bool = False


SETTINGS = {
    "do_sample": Setting((None, False)),
    "min_length": Setting((None, 0), javascript=True),
    # CTranslate2 changes logits, and transformers log-probabilities, which no longer sum to 1.
    "min_new_tokens": Setting((None, 0), ctranslate2="closely", javascript=True),
    "no_repeat_ngram_size": Setting((None, 0), ctranslate2="closely", javascript=True),
    "encoder_no_repeat_ngram_size": Setting((None, 0)),
    "repetition_penalty": Setting((None, 1.0), ctranslate2="closely", javascript=True),
    "forced_bos_token_id": Setting((None,), javascript=True),
    "begin_suppress_tokens": Setting((None, []), javascript=True),
    "bad_words_ids": Setting((None, []), ctranslate2="closely", javascript=True),
    "suppress_tokens": Setting((None, []), ctranslate2="closely", javascript=True),
    "max_length_offset": Setting(
        (TRANSFORMERS_RULES["max_length_offset"],), marian=False, ctranslate2="exactly", javascript=True
    ),
    "max_time": Setting((None,)),
    "stop_strings": Setting((None, [])),
    "encoder_repetition_penalty": Setting((None, 1.0)),
    "exponential_decay_length_penalty": Setting((None,)),
    "sequence_bias": Setting((None,)),
    "guidance_scale": Setting((None, 1.0)),
    "watermarking_config": Setting((None,)),
    "renormalize_logits": Setting((None, False)),
    "num_beam_groups": Setting((None, 1)),
    "penalty_alpha": Setting((None, 0.0)),
    "constraints": Setting((None,)),
    "force_words_ids": Setting((None,)),
    "dola_layers": Setting((None,)),
    "token_healing": Setting((None, False)),
    "length_penalty_type": Setting(
        (TRANSFORMERS_RULES["length_penalty_type"],), marian=False, ctranslate2="closely", javascript=True
    ),
    "finish_candidates": Setting(
        (TRANSFORMERS_RULES["finish_candidates"],), marian=False, ctranslate2="closely", javascript=True
    ),
    "early_stopping": Setting((True,), ctranslate2="closely", javascript=True),
}


def unsupported_settings(generation_config: GenerationConfig, engine: str) -> dict[str, Any]:
    """
    Returns the settings that are turned on and that an engine does not follow.

    Args:
        generation_config ([`GenerationConfig`]): settings of the search.
        engine (`str`): `"Marian"`, `"CTranslate2"` or `"transformers.js"`.

    Returns:
        `dict[str, Any]`: values by name.
    """
    field = "javascript" if engine == "transformers.js" else engine.lower()
    return _turned_on(generation_config, {name for name, each in SETTINGS.items() if not getattr(each, field)})


def approximated_settings(generation_config: GenerationConfig) -> dict[str, Any]:
    """Returns the settings that are turned on and that CTranslate2 does not follow exactly, by name."""
    if (generation_config.num_beams or 1) == 1:
        return {}
    return _turned_on(generation_config, {name for name, each in SETTINGS.items() if each.ctranslate2 == "closely"})


def settings_of_javascript(generation_config: GenerationConfig) -> dict[str, Any]:
    """Returns the settings that are turned on and that transformers.js follows, by name."""
    return _turned_on(generation_config, {name for name, each in SETTINGS.items() if each.javascript})


def greedy_within_limits(generation_config: GenerationConfig) -> GenerationConfig:
    """Returns a greedy search with the special tokens and limits of a generation config, and no other settings."""
    # `None` turns these off. The others are rules of beam search, without effect on a greedy one.
    off = {name for name, each in SETTINGS.items() if None in each.off} - {"max_length_offset"}
    greedy = copy.deepcopy(generation_config)
    greedy.update(num_beams=1, **dict.fromkeys(off))
    return greedy


def _turned_on(generation_config: GenerationConfig, names: Set[str]) -> dict[str, Any]:
    values = {name: getattr(generation_config, name, None) for name in SETTINGS if name in names}
    if values.get("early_stopping", True) is None:
        values["early_stopping"] = SEARCH_SETTINGS["early_stopping"].by_type[generation_config.length_penalty_type]
    if generation_config.length_penalty == 0:
        # Both types then compare log-probabilities.
        values.pop("length_penalty_type", None)
    return {name: value for name, value in values.items() if value not in SETTINGS[name].off}


def ignored_settings(generation_config: GenerationConfig, engine: str) -> list[str]:
    """
    Describes the settings that an engine does not follow, in one sentence with all of them, or in none.
    Arguments are those of [`unsupported_settings`].
    """
    ignored = unsupported_settings(generation_config, engine)
    if not ignored:
        return []
    values = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
    return [f"{engine} ignores settings of the generation config and may find other translations: {values}."]


def fixed_limit(generation_config: GenerationConfig) -> int | None:
    """
    Returns the maximum number of tokens in a translation, not counting the decoder's start token, or `None` if it
    depends on the length of the source.
    """
    if generation_config.max_new_tokens is not None:
        return generation_config.max_new_tokens
    if generation_config.max_length is not None:
        return generation_config.max_length - 1
    return DEFAULT_LENGTH if generation_config.max_length_offset is None else None


def max_new_tokens_for(generation_config: GenerationConfig, source: int, positions: int | None = None) -> int:
    """
    Returns the maximum number of tokens in one translation, not counting the decoder's start token or a forced `</s>`.

    Args:
        generation_config ([`GenerationConfig`]): settings of the search.
        source (`int`): number of source tokens.
        positions (`int`, *optional*): number of rows in the table of positions.
    """
    limit = fixed_limit(generation_config)
    if limit is None:
        limit = source + generation_config.max_length_offset
    if positions is not None:
        limit = min(limit, positions - 1)
    return limit - forces_eos(generation_config)


def forces_eos(generation_config: GenerationConfig) -> bool:
    """Returns whether a translation of maximum length always ends with `</s>`."""
    return generation_config.forced_eos_token_id is not None


def eos_token_ids(generation_config: GenerationConfig) -> list[int]:
    """
    Returns the ids that end a translation.

    Raises:
        ValueError: the generation config does not set any.
    """
    ids = generation_config.eos_token_id
    if ids is None or ids == []:
        raise ValueError("The generation config has no eos_token_id, which engines need to end a translation.")
    return [ids] if isinstance(ids, int) else list(ids)


def forbidden_sequences(generation_config: GenerationConfig) -> list[list[int]]:
    """Returns the sequences of ids that no translation may contain."""
    return [*(generation_config.bad_words_ids or []), *([id_] for id_ in generation_config.suppress_tokens or [])]


def start_token_id(generation_config: GenerationConfig, config: Any) -> int:
    """Returns the first token of the decoder; the generation config overrides the model's config."""
    start = generation_config.decoder_start_token_id
    return config.decoder_start_token_id if start is None else start
