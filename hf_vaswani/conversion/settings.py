"""What a generation config says, for engines that have a search of their own."""

from collections.abc import Collection
from typing import Any

from transformers import GenerationConfig

# What `generate()` does where nothing limits a translation.
DEFAULT_LENGTH = 20
# Rules that other engines have by other names or not at all, and the values that are none.
RULES: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, False),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1.0),
    "forced_bos_token_id": (None,),
    "begin_suppress_tokens": (None, []),
}


def fixed_limit(generation_config: GenerationConfig) -> int | None:
    """The most tokens of a translation, without the decoder's first, where that does not depend on its source."""
    if generation_config.max_new_tokens is not None:
        return generation_config.max_new_tokens
    if generation_config.max_length is not None:
        return generation_config.max_length - 1
    return DEFAULT_LENGTH if generation_config.max_length_offset is None else None


def longest(generation_config: GenerationConfig, source: int, positions: int | None = None) -> int:
    """
    The most tokens of one translation, without the decoder's first, and without a last one that has to be `</s>`.

    Args:
        generation_config ([`GenerationConfig`]): its settings.
        source (`int`): tokens of the source.
        positions (`int`, *optional*): rows of a table of positions.
    """
    limit = fixed_limit(generation_config)
    if limit is None:
        limit = source + generation_config.max_length_offset
    if positions is not None:
        limit = min(limit, positions - 1)
    return limit - must_end(generation_config)


def must_end(generation_config: GenerationConfig) -> bool:
    """Whether what is at its longest ends with `</s>`."""
    return generation_config.forced_eos_token_id is not None


def never(generation_config: GenerationConfig) -> list[list[int]]:
    """What is in no translation: sequences of ids."""
    return [*(generation_config.bad_words_ids or []), *([id_] for id_ in generation_config.suppress_tokens or [])]


def start_token_id(generation_config: GenerationConfig, config: Any) -> int:
    """The decoder's first token."""
    start = generation_config.decoder_start_token_id
    return config.decoder_start_token_id if start is None else start


def rules_left_behind(generation_config: GenerationConfig, known: Collection[str]) -> list[str]:
    """A sentence about the rules that are set, if there are any beside those that the other engine knows."""
    found = [
        f"{name}={value}"
        for name, none in RULES.items()
        if name not in known and (value := getattr(generation_config, name, None)) not in none
    ]
    if not found:
        return []
    return [f"The search of the generation config also has {', '.join(found)}, which is not carried over."]
