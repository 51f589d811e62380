"""Interface of the formats: the functions that each of them has, and the records they exchange with `convert`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from ..files import read_json
from ..model.modeling_vaswani import VaswaniForConditionalGeneration

# (source ids, attention mask, decoder ids), each of shape (batch, length) -> logits of shape
# (batch, target, vocab_size).
Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Translate = Callable[[Sequence[str]], list[str]]


@dataclass
class Foreign:
    """
    A model of another format, as far as it can run here.

    Args:
        name (`str`): library that runs it, for example `transformers' MarianMTModel`.
        logits (`Logits`, *optional*): computes its logits for Vaswani ids.
        translate (`Translate`, *optional*): translates greedily.
        notes (`list[str]`): known differences from the Vaswani model, one sentence each.
        is_rounded (`bool`): True if its weights have a lower precision, so that logits are only close.
    """

    name: str
    logits: Logits | None = None
    translate: Translate | None = None
    notes: list[str] = field(default_factory=list)
    is_rounded: bool = False


@dataclass
class Converted:
    """A foreign model as a Vaswani model with its tokenizer, together with the original."""

    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    foreign: Foreign


@dataclass
class Loaded:
    """
    A Vaswani model that was loaded from a folder.

    Args:
        model ([`VaswaniForConditionalGeneration`]): model in float32 and evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        folder (`Path`): folder with the files of both.
    """

    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    folder: Path


class Source(Protocol):
    """Module of a format that can be read."""

    def recognize(self, path: Path) -> bool:
        """Returns whether a file or folder looks like this format."""

    def load(self, path: Path) -> Converted:
        """Reads a model that [`recognize`] has accepted."""


class Target(Protocol):
    """Module of a format that can be written."""

    # Number formats of the weights that `save` accepts, besides `None` for float32.
    QUANTIZATIONS: tuple[str, ...]

    def save(self, loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
        """Writes a model to a folder, without changing it, and returns it as read back from there."""


def model_type(folder: Path) -> str | None:
    """
    Returns the `model_type` in the `config.json` of a folder, or `None` without such a file.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / "config.json"
    return read_json(path).get("model_type") if path.is_file() else None


def check_quantization(quantization: str | None, supported: Collection[str] = ()) -> None:
    """
    Checks the number format of the weights.

    Args:
        quantization (`str`, *optional*): number format, or `None` for float32.
        supported (`Collection[str]`): number formats that the target supports.

    Raises:
        ValueError: The target does not support it.
    """
    if quantization is None:
        return
    if not supported:
        raise ValueError(f"--quantization {quantization} is only supported with --to ctranslate2.")
    if quantization not in supported:
        raise ValueError(f"--quantization must be one of {', '.join(supported)}, but it is {quantization!r}.")
