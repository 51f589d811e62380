"""Search settings of a `GenerationConfig`, for engines with a search of their own."""

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig

# The limit of `generate()` if nothing else limits a translation.
DEFAULT_LENGTH = 20
# Search settings with the values that turn them off, and the engines that follow them when they are on.
SETTINGS: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "do_sample": ((None, False), {"Marian"}),
    "min_length": ((None, 0), {"Marian"}),
    "min_new_tokens": ((None, 0), {"Marian", "CTranslate2"}),
    "no_repeat_ngram_size": ((None, 0), {"Marian", "CTranslate2"}),
    "encoder_no_repeat_ngram_size": ((None, 0), {"Marian"}),
    "repetition_penalty": ((None, 1.0), {"Marian", "CTranslate2"}),
    "forced_bos_token_id": ((None,), {"Marian"}),
    "begin_suppress_tokens": ((None, []), {"Marian"}),
    "bad_words_ids": (([],), {"Marian", "CTranslate2"}),
    "max_length_offset": ((None,), {"CTranslate2"}),
    "max_time": ((None,), {"Marian"}),
    "stop_strings": ((None, []), {"Marian"}),
    "encoder_repetition_penalty": ((None, 1.0), {"Marian"}),
    "exponential_decay_length_penalty": ((None,), {"Marian"}),
    "sequence_bias": ((None,), {"Marian"}),
    "guidance_scale": ((None, 1.0), {"Marian"}),
    "watermarking_config": ((None,), {"Marian"}),
    "renormalize_logits": ((None, False), {"Marian"}),
    "num_beam_groups": ((None, 1), {"Marian"}),
    "penalty_alpha": ((None, 0.0), {"Marian"}),
    "constraints": ((None,), {"Marian"}),
    "force_words_ids": ((None,), {"Marian"}),
    # CTranslate2's notes give its closest settings.
    "length_penalty_type": (("power",), {"CTranslate2"}),
    "finish_candidates": (("top",), {"CTranslate2"}),
}


def active_settings(generation_config: GenerationConfig, names: Iterable[str]) -> dict[str, Any]:
    """
    Returns the settings that are turned on.

    Args:
        generation_config ([`GenerationConfig`]): settings of the search.
        names (`Iterable[str]`): keys of `SETTINGS` to look at.

    Returns:
        `dict[str, Any]`: values by name. Of `bad_words_ids`, only sequences of two or more tokens are listed: every
        engine can forbid single tokens.
    """
    values = {name: getattr(generation_config, name, None) for name in names}
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [ids for ids in values["bad_words_ids"] or [] if len(ids) > 1]
    return {name: value for name, value in values.items() if value not in SETTINGS[name][0]}


def unsupported_settings(generation_config: GenerationConfig, engine: str) -> dict[str, Any]:
    """Returns the settings that are turned on and that an engine of `SETTINGS` does not follow, by name."""
    return active_settings(generation_config, (name for name in SETTINGS if engine not in SETTINGS[name][1]))


def ignored_settings(generation_config: GenerationConfig, engine: str) -> list[str]:
    """
    Describes the settings that an engine does not follow.

    Args:
        generation_config ([`GenerationConfig`]): settings of the search.
        engine (`str`): name of an engine in `SETTINGS`.

    Returns:
        `list[str]`: one sentence with all of them, or nothing.
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
