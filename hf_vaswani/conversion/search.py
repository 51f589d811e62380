"""What a generation config says, for engines that have a search of their own."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..files import read_json
from ..generation_vaswani import CHOICES
from .sides import IDS

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
# Numbers, by the least that each may be.
COUNTS = {"num_beams": 1, "max_length": 1, "max_new_tokens": 1, "min_length": 0, "min_new_tokens": 0}
NUMBERS = ("length_penalty", "repetition_penalty")
# How deep ids lie in lists.
DEPTHS = {"suppress_tokens": 1, "begin_suppress_tokens": 1, "bad_words_ids": 2}


def check_settings(folder: Path) -> None:
    """
    Refuses values in `config.json` and `generation_config.json` that transformers takes and cannot use.

    Args:
        folder (`Path`): has one of the two, or both.

    Raises:
        ValueError: with the file, the name and the value.
    """
    size: Any = None
    for path in (folder / "config.json", folder / "generation_config.json"):
        settings = read_json(path) if path.exists() else {}
        size = size or settings.get("decoder_vocab_size") or settings.get("vocab_size")
        for name, value in settings.items():
            if value is None:
                continue
            expected = _expected(name, value)
            if expected:
                raise ValueError(f"{path} has {name} {value!r}, but it must be {expected}.")
            for id_ in _flat(value) if name in (*IDS, *DEPTHS) else ():
                if isinstance(size, int) and id_ >= size:
                    raise ValueError(f"{path} has the id {id_} as {name}, but the vocabulary has {size} entries.")


def _expected(name: str, value: Any) -> str | None:
    """What a value should be that it is not."""
    if name in COUNTS and not _is_count(value, COUNTS[name]):
        return f"a whole number of at least {COUNTS[name]}"
    if name in NUMBERS and type(value) not in (int, float):
        return "a number"
    if name in CHOICES and value not in CHOICES[name]:
        return " or ".join(map(repr, CHOICES[name]))
    if name in IDS and not all(_is_count(id_) for id_ in _flat(value)):
        return "an id, a whole number of at least 0"
    if name in DEPTHS:
        lists = value if DEPTHS[name] == 2 else [value]
        if not isinstance(lists, list) or not all(isinstance(ids, list) and all(map(_is_count, ids)) for ids in lists):
            return f"a list of {'lists of ' if DEPTHS[name] == 2 else ''}ids"
    return None


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _flat(value: Any) -> list[Any]:
    """An id, or all ids of lists."""
    return [id_ for each in value for id_ in _flat(each)] if isinstance(value, list) else [value]


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
