"""What a conversion goes from and to, so that both sides can be asked the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files import read_json
from ..model.modeling_vaswani import VaswaniForConditionalGeneration

# Logits of shape (batch, target, vocab_size) of source ids, their mask and decoder ids, each (batch, length).
Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Translate = Callable[[Sequence[str]], list[str]]


@dataclass
class Foreign:
    """
    A model of another format, as far as it can run here.

    Args:
        name (`str`): what runs it, as `transformers' MarianMTModel`.
        logits (`Logits`, *optional*): what it computes, if it tells.
        translate (`Translate`, *optional*): greedy translations, if it can run.
        notes (`list[str]`): what is not the same on the other side, one sentence each.
        is_rounded (`bool`): whether its weights are of another precision, so that it computes something near.
    """

    name: str
    logits: Logits | None = None
    translate: Translate | None = None
    notes: list[str] = field(default_factory=list)
    is_rounded: bool = False


@dataclass
class Converted:
    """A model that came in: ours, its tokenizer, and the one that it was."""

    model: VaswaniForConditionalGeneration
    tokenizer: Any
    foreign: Foreign


def model_type(folder: Path) -> str | None:
    """
    What `config.json` of a folder calls its model, if there is one.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / "config.json"
    return read_json(path).get("model_type") if path.is_file() else None
