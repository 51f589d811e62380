"""The settings and rules of beam search (Section 6.1): length penalty, maximum lengths, finishing and stopping."""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, StoppingCriteria


class SearchSetting(NamedTuple):
    """
    A setting of the generation config that this model adds to those of transformers, or checks.

    Attributes:
        default: value where no call and no config has one, for settings that transformers does not have.
        off: value of such a setting with which the search is that of transformers.
        by_type (`dict`): value with more than one beam where no call and no config has one, by `length_penalty_type`.
        choices (`tuple`): the values that it may have; or it is a number,
        at_least, at_most (`int`): in this range, and whole if it has no upper end.
        beams_only (`bool`): only beam search reads it.
    """

    default: Any = None
    off: Any = None
    by_type: dict[str, Any] = {}
    choices: tuple[str, ...] = ()
    at_least: int | None = None
    at_most: int | None = None
    beams_only: bool = False

    def expected(self, value: Any) -> str | None:
        """Returns the values that are allowed, in words, or `None` if this value is one of them."""
        if self.choices:
            is_allowed, words = value in self.choices, " or ".join(f'"{choice}"' for choice in self.choices)
        elif isinstance(value, float) and not math.isfinite(value):
            is_allowed, words = False, "a finite number"
        elif value is None and self.off is None:
            return None
        elif self.at_most is not None and self.at_least is not None:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_allowed = is_number and self.at_least <= value <= self.at_most
            words = f"a number from {self.at_least} to {self.at_most}"
        else:
            is_allowed = self.at_least is None or (type(value) is int and value >= self.at_least)
            or_none = "None or " if self.default is not None and self.off is None else ""
            words = f"{or_none}a whole number of at least {self.at_least}"
        return None if is_allowed else words


# A recipe has a setting if it has a key of this name, and the record of a search has those that the search reads.
SEARCH_SETTINGS = {
    "num_beams": SearchSetting(at_least=1),
    # The exponent alpha. float32 can represent no length to a larger power.
    "length_penalty": SearchSetting(by_type={"gnmt": 0.6, "power": 1.0}, at_least=-10, at_most=10, beams_only=True),
    # The divisor of the log-probability of a hypothesis, see `length_penalty`; "power" is transformers' own. L counts
    # the generated tokens, `</s>` included and the decoder's prompt not.
    "length_penalty_type": SearchSetting("gnmt", "power", choices=("gnmt", "power"), beams_only=True),
    # "never", the rule of tensor2tensor: a sentence is done when no running hypothesis could still become one of the
    # `num_return_sequences` best, even if it kept its probability up to the maximum length. False, as in transformers,
    # compares with the `num_beams` best at the present length. True stops at `num_beams` finished hypotheses.
    "early_stopping": SearchSetting(by_type={"gnmt": "never", "power": False}, beams_only=True),
    # Which of the 2 x `num_beams` best candidates of a step may finish (with n ends of a sentence, (1 + n) x
    # `num_beams`). "all" as in tensor2tensor: cut hypotheses are returned only behind the finished ones. "top", the
    # first `num_beams`, as in transformers, where a cut hypothesis is finished and competes.
    "finish_candidates": SearchSetting("all", "top", choices=("all", "top"), beams_only=True),
    "num_return_sequences": SearchSetting(at_least=1, beams_only=True),
    # The maximum length of each sentence, relative to its source, `</s>` included. A sentence that reaches it is cut:
    # no `</s>` is appended. `max_length` and `max_new_tokens` override it, and None disables it.
    "max_length_offset": SearchSetting(50, at_least=0),
    "max_length": SearchSetting(at_least=1),
    "max_new_tokens": SearchSetting(at_least=1),
}
# The settings of this model alone, and their values with which its search is that of transformers.
DEFAULTS = {name: each.default for name, each in SEARCH_SETTINGS.items() if each.default is not None}
TRANSFORMERS_RULES = {name: SEARCH_SETTINGS[name].off for name in DEFAULTS}

# Score of a missing hypothesis, as in transformers. Every real log-probability is above a tenth of it.
MISSING = -1e9


def length_penalty(length: Any, alpha: float, length_penalty_type: str = "gnmt") -> Any:
    """Returns the divisor of a log-probability: ((5 + L) / 6)^alpha (Wu et al. 2016, equation 14), or L^alpha."""
    return ((5 + length) / 6) ** alpha if length_penalty_type == "gnmt" else length**alpha


class SourceLengthCriteria(StoppingCriteria):
    """Stops each sentence at its own maximum length, prompt included. The rows of one sentence are adjacent."""

    # transformers pads finished rows only if some criterion has this attribute.
    eos_token_id = None

    def __init__(self, max_lengths: torch.Tensor) -> None:
        self.max_lengths = max_lengths  # [batch]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Returns which rows of `input_ids`, of shape `(rows, length)`, are done, of shape `(rows,)`."""
        rows_per_sentence = input_ids.shape[0] // self.max_lengths.shape[0]
        return self.max_lengths.to(input_ids.device).repeat_interleave(rows_per_sentence) <= input_ids.shape[1]


def special_ids(generation_config: GenerationConfig) -> tuple[list[int], int | None]:
    """Returns the ids that end a text, and the id that pads its row."""
    ends, pad = generation_config.eos_token_id, generation_config.pad_token_id
    if isinstance(ends, torch.Tensor):
        ends = ends.flatten().tolist()
    ids = [] if ends is None else [*ends] if isinstance(ends, (list, tuple)) else [int(ends)]
    if pad is None and ids:
        pad = ids[0]
    return ids, None if pad is None else int(pad)


def is_one_of(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns which tokens are among a few ids of shape `(ids,)`; `torch.isin` takes several times as long."""
    return (tokens[..., None] == ids).any(dim=-1)


@dataclass(frozen=True)
class BeamSearchRules:
    """Scoring, finishing and stopping of one beam search: the settings of the call and the limits of its sentences."""

    settings: GenerationConfig
    eos_token_ids: torch.Tensor  # [ids]
    max_lengths: torch.Tensor  # maximum number of new tokens of each sentence, [sentences, 1]
    shortest_limit: int  # the least of these

    @classmethod
    def from_config(cls, generation_config: GenerationConfig, input_ids: torch.Tensor) -> "BeamSearchRules":
        """Reads the rules of a call, whose decoder has a prompt of shape `(rows, prompt)`."""
        eos_token_ids = input_ids.new_tensor(special_ids(generation_config)[0], dtype=torch.long)
        max_lengths = search_call().max_lengths[:, None].to(input_ids.device) - input_ids.shape[1]
        return cls(generation_config, eos_token_ids, max_lengths, int(max_lengths.min()))

    def keep(self, sentences: torch.Tensor) -> "BeamSearchRules":
        """Returns the rules for the sentences with these indices, of shape `(kept,)`."""
        max_lengths = self.max_lengths.index_select(0, sentences)
        return replace(self, max_lengths=max_lengths, shortest_limit=int(max_lengths.min()))

    def penalty(self, length: Any) -> Any:
        """Returns [`length_penalty`] with these settings."""
        return length_penalty(length, self.settings.length_penalty, self.settings.length_penalty_type)

    def ends(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """Returns which candidates of `length` tokens end, by their last tokens of shape `(sentences, candidates)`."""
        return is_one_of(tokens, self.eos_token_ids) | (length >= self.max_lengths)

    def finish(
        self,
        can_improve: torch.Tensor,  # [sentences, 1]
        scores: torch.Tensor,  # of the finished hypotheses, [sentences, beams]
        is_finished: torch.Tensor,  # which of them exist, [sentences, beams]
        log_probs: torch.Tensor,  # of the candidates, in descending order, [sentences, candidates]
        tokens: torch.Tensor,  # their last tokens, [sentences, candidates]
        ends: torch.Tensor,  # which of them end, [sentences, candidates]
        length: Any,  # their number of tokens, an integer or a tensor without dimensions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Merges the candidates that end into the finished hypotheses of sentences whose results can still improve
        (tensor2tensor's `grow_finished`). Returns the new `scores` and `is_finished`, and the indices of these
        hypotheses in the concatenation of the finished hypotheses and the candidates; each `(sentences, beams)`.
        """
        beams, candidates = scores.shape[1], log_probs.shape[1]
        ends = ends & can_improve & (log_probs > MISSING / 10)
        if self.settings.early_stopping is True:
            ends &= ~is_finished.all(dim=1, keepdim=True)
        if self.settings.finish_candidates == "top":
            ends[:, beams:] = False
        penalized = log_probs / self.penalty(length)

        def merge(kept: torch.Tensor, is_kept: torch.Tensor, hits: torch.Tensor) -> Any:
            best, chosen = torch.cat((kept, penalized.where(hits, MISSING)), dim=1).topk(beams)
            return best, torch.cat((is_kept, hits), dim=1).gather(1, chosen), chosen

        if self.settings.finish_candidates == "top" or (type(length) is int and length < self.shortest_limit):
            return merge(scores, is_finished, ends)
        is_cut = ends & ~is_one_of(tokens, self.eos_token_ids) & (length >= self.max_lengths)
        best, has_finished, chosen = merge(scores, is_finished, ends & ~is_cut)
        # Cut hypotheses rank behind finished ones, which get scores that no hypothesis has and float32 tells apart.
        ranks = torch.where(has_finished, -MISSING / 10 - 64.0 * torch.arange(beams, device=best.device), best)
        behind, has_ended, second = merge(ranks, has_finished, is_cut)
        every = torch.arange(beams + candidates, device=chosen.device).expand(len(chosen), -1)
        chosen = torch.cat((chosen, every[:, beams:]), dim=1).gather(1, second)
        # A finished sentence stays as it is: the next step would sort it by score again.
        return (
            torch.where(can_improve, torch.where(has_finished, best, behind), scores),
            torch.where(can_improve, has_ended, is_finished),
            torch.where(can_improve, chosen, every[:, :beams]),
        )

    def may_improve(
        self,
        can_improve: torch.Tensor,
        running_scores: torch.Tensor,
        scores: torch.Tensor,
        is_finished: torch.Tensor,
        length: int,
    ) -> torch.Tensor:
        """
        Returns which sentences can still get a better result (tensor2tensor's `_is_not_finished`), `(sentences, 1)`,
        by the descending log-probabilities of their running hypotheses of `length` tokens, `(sentences, beams)`.
        """
        hoped, least = self.bounds(running_scores, scores, is_finished, length)
        return can_improve & (hoped > least) & (length < self.max_lengths)

    def bounds(
        self, running_scores: torch.Tensor, scores: torch.Tensor, is_finished: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the highest score that a running hypothesis of each sentence is hoped to reach, and the score that it
        must exceed: that of the worst finished hypothesis that counts, or `MISSING` if there are too few of them.
        """
        look_ahead = self.settings.early_stopping == "never"
        if look_ahead:
            returned = self.settings.num_return_sequences
            scores, is_finished = scores[:, :returned], is_finished[:, :returned]
        # A negative alpha favours short hypotheses: the next token is the best hope.
        longest = self.max_lengths if look_ahead and self.settings.length_penalty > 0 else length
        worst = scores.amin(dim=1, keepdim=True).where(is_finished.all(dim=1, keepdim=True), MISSING)
        return running_scores[:, :1] / self.penalty(longest), worst


# ---- One call of generate() --------------------------------------------------------------------------------------

CALL: ContextVar["SearchCall"] = ContextVar("call")
# Returns the record of the call of `generate()` that runs in this thread.
search_call = CALL.get


@dataclass
class SearchCall:
    """Data of a call of `generate()`, its block, for which the methods that transformers calls have no argument."""

    mask: Any = None  # of the source or the prompt, [batch, source]
    ensemble: Sequence[Any] = ()  # other models that translate together with the model
    shortlist: Any = None  # chooses the entries of the vocabulary to search among
    inputs: Any = None  # ids of the source, [batch, source]
    max_lengths: Any = None  # maximum length of each target, the decoder's prompt included, [batch]
    rules: Any = None  # `BeamSearchRules` of the beam search of transformers that is running

    def refuse(self, reason: str) -> None:
        """Raises a `ValueError` if the call has an ensemble or a shortlist, which transformers' searches ignore."""
        for name in ("ensemble", "shortlist"):
            if getattr(self, name):
                raise ValueError(f"{name} needs input_ids and plain greedy or beam search, but {reason}.")

    def __enter__(self) -> None:
        self.token = CALL.set(self)

    def __exit__(self, *_: object) -> None:
        CALL.reset(self.token)
