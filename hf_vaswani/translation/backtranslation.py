"""
Back-translation (Sennrich et al., 2016; Edunov et al., 2018): synthetic sources for text in the target language.

The text is translated in blocks of sentences, see [`GrowingFile`]. What is drawn in a block depends on the seed and
the block's number alone, so that a stopped work goes on to the same pairs, on the same device and with the same token
budget.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer import backend
from ..files import tsv_cell
from ..model.sentences_vaswani import LanguageTags
from .lines import LineTranslator

# ---- The model ---------------------------------------------------------------------------------------------------


def check_direction(
    key: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_language: str,
    target_language: str,
) -> str:
    """
    Checks that a model translates from one language into another.

    Args:
        key (`str`), name (`str`): key of the recipe and name of the model in the error message.
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the model. One without `language_pairs`
            in its config is trusted.
        source_language (`str`), target_language (`str`): languages that it shall read and write.

    Returns:
        `str`: the language tag that its sentences need in front of them; empty if they need none.

    Raises:
        ValueError: the model translates in other directions, or has tags, but not this one.
    """
    pairs = [tuple(pair) for pair in getattr(model.config, "language_pairs", None) or ()]
    if pairs and (source_language, target_language) not in pairs:
        raise ValueError(
            f"{key} {name} translates {', '.join('-'.join(pair) for pair in pairs)}, but for the data section of this "
            f"recipe, it must translate {source_language}-{target_language}: give a model of this direction."
        )
    tags = LanguageTags(tokenizer)
    return tags.find(target_language) if tags.by_language else ""


def set_search(
    model: PreTrainedModel,
    method: Literal["sampling", "beam"],
    top_k: int | None = None,
    temperature: float = 1.0,
    num_beams: int = 4,
) -> None:
    """
    Sets how a model translates, in its generation config; its limits of length stay.

    Args:
        model ([`PreTrainedModel`]): changed in place.
        method (`str`): `"sampling"` or `"beam"`.
        top_k (`int`, *optional*), temperature (`float`): of sampling; by default from the whole distribution.
        num_beams (`int`): of beam search.
    """
    settings = model.generation_config
    settings.do_sample = method == "sampling"
    settings.num_beams = 1 if method == "sampling" else num_beams
    # The defaults of transformers would draw from 50 entries only.
    settings.top_k, settings.top_p, settings.temperature = None, None, None
    if method == "sampling":
        settings.top_k, settings.top_p, settings.temperature = top_k or 0, 1.0, temperature
    if settings.num_beams == 1:
        # They have no effect without a beam, and transformers would warn about each.
        settings.length_penalty = settings.early_stopping = None


def model_digest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the SHA-256 of a model's weights, architecture and vocabulary, in hexadecimal."""
    found = hashlib.sha256(backend(tokenizer, is_target=False).to_str().encode())
    found.update(json.dumps(settings_of(model.config), sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode())
        # Those of a layer with 8-bit weights are matrix and bias.
        for part in weight if isinstance(weight, tuple) else (weight,):
            if isinstance(part, torch.Tensor):
                plain: Any = part.int_repr() if part.is_quantized else part
                found.update(plain.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


# Settings that do not change what a model writes.
IDLE = {
    "transformers_version",
    "dtype",
    "architectures",
    "auto_map",
    "custom_pipelines",
    "language_pairs",
    "use_cache",
}
IDLE |= {"dropout", "attention_dropout", "activation_dropout", "initializer_range", "return_dict", "output_scores"}


def settings_of(config: PretrainedConfig | GenerationConfig) -> dict[str, Any]:
    """Returns the settings of a model or of its search that differ from the defaults of their class, as JSON."""
    defaults, given = type(config)().to_dict(), config.to_dict()
    found = {
        key: value
        for key, value in given.items()
        if value != defaults.get(key) and key not in IDLE and not key.startswith("_")
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


class Backtranslator:
    """
    Translates blocks of sentences.

    Args:
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the model, with its search set.
        tag (`str`): language tag to put in front of each sentence, or nothing.
        seed (`int`): seed of the sampling.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.

    Attributes:
        translator ([`LineTranslator`]): splits and counts sentences that are too long.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tag: str,
        seed: int,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.translator = LineTranslator([model], tokenizer, tokens_per_batch=tokens_per_batch)
        self.tag = tag
        self.seed = seed

    def __call__(self, block: int, sentences: list[str]) -> list[str]:
        """
        Returns each sentence of the block with this number behind its translation and a tab. A translation has
        neither line ends nor tabs.
        """
        torch.manual_seed(random.Random(f"{self.seed} {block}").getrandbits(63))
        found = self.translator([f"{self.tag} {sentence}" if self.tag else sentence for sentence in sentences])
        sources = (tsv_cell(candidates[0][1]).strip() for candidates in found)
        return [f"{source}\t{target}" for source, target in zip(sources, sentences, strict=True)]


def sentences_of(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that are not blank, as they fit in a cell of a TSV file."""
    texts = (tsv_cell(line).strip() for line in lines)
    return (text for text in texts if text)


def count_pairs(path: Path) -> tuple[int, int]:
    """Counts the pairs of a complete file, and those of them whose source is empty."""
    pairs = empty = 0
    with path.open("rb") as file:
        next(file)
        for line in file:
            pairs, empty = pairs + 1, empty + line.startswith(b"\t")
    return pairs, empty
