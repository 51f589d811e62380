"""What a conversion goes from and to, so that both sides can be asked the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..modeling_vaswani import VaswaniForConditionalGeneration

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
    """

    name: str
    logits: Logits | None = None
    translate: Translate | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Converted:
    """A model that came in: ours, its tokenizer, and the one that it was."""

    model: VaswaniForConditionalGeneration
    tokenizer: Any
    foreign: Foreign
