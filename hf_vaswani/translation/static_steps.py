"""
The step of a search whose tensors have fixed places, so that it can be a CUDA graph: its buffers, its cache and its
decoder. `static_search` takes it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from ..model.cache_vaswani import EnsembleDecoder, IncrementalDecoder
from ..model.rules_vaswani import BeamSearchRules, is_one_of, special_ids
from ..model.search_vaswani import Alive, FastSearchInputs, best_tokens

# Logits processors of transformers that depend on no token before, and the first and the last length of a sequence at
# which they change scores; `None` for all lengths.
STATIC: dict[str, Callable[[Any], tuple[int, int]] | None] = {
    "SuppressTokensLogitsProcessor": None,
    "NoBadWordsLogitsProcessor": None,
    "SequenceBiasLogitsProcessor": None,
    "InfNanRemoveLogitsProcessor": None,
    "LogitNormalization": None,
    "TemperatureLogitsWarper": None,
    "TopKLogitsWarper": None,
    "TopPLogitsWarper": None,
    "ForcedBOSTokenLogitsProcessor": lambda processor: (1, 1),
    "ForcedEOSTokenLogitsProcessor": lambda processor: (processor.max_length - 1,) * 2,
    "SuppressTokensAtBeginLogitsProcessor": lambda processor: (processor.begin_index,) * 2,
    "MinLengthLogitsProcessor": lambda processor: (0, processor.min_length - 1),
    "MinNewTokensLengthLogitsProcessor": lambda processor: (
        0,
        processor.prompt_length_to_skip + processor.min_new_tokens - 1,
    ),
}


class Shape(NamedTuple):
    """The sizes of a step's buffers."""

    rows: int
    capacity: int  # positions of keys and values of the target
    source: int  # positions of keys and values of the source, 0 without one


# ---- Keys and values ---------------------------------------------------------------------------------------------


@dataclass
class SourceLayer:
    """Keys and values of the source in a layer, `(rows, heads, source, head_dim)`."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class SourceCache:
    """Keys and values of the source in all layers, of the form that an attention reads."""

    layers: list[SourceLayer]


class StaticCache:
    """
    A [`HypothesesCache`] in buffers of a fixed size. `like` has the layers, and is one or of this class. Keys and
    values are in its number format, unless another one is given.
    """

    def __init__(self, like: Any, shape: Shape, dtype: torch.dtype | None) -> None:
        rows, capacity, source = shape

        def buffer(states: torch.Tensor, length: int) -> torch.Tensor:
            return states.new_zeros(rows, states.shape[1], length, states.shape[3], dtype=dtype)

        # A decoder that has read nothing yet knows the source alone, whose keys and values are of the same sizes.
        layers = like.layers or [[each.keys, each.values] for each in like.cross_attention_cache.layers]
        self.layers = [[buffer(each, capacity) for each in layer] for layer in layers]
        self.cross_attention_cache = SourceCache(
            [
                SourceLayer(buffer(layer.keys, source), buffer(layer.values, source))
                for layer in like.cross_attention_cache.layers
            ]
        )
        self.is_updated = dict.fromkeys(range(len(self.layers)), True)
        # As in a `HypothesesCache`; those behind the positions that were written are hidden.
        self.mask = like.mask.new_zeros(rows, 1, like.mask.shape[2], capacity)
        self.own = like.own.clone()
        # Where the hypotheses write in this step, [beams].
        self.places = torch.arange(self.mask.shape[2], device=self.mask.device)

    def load(self, other: Any, sentences: torch.Tensor, places: torch.Tensor) -> None:
        """
        Takes over positions of some sentences: these indices, of shape `(kept,)` and `(kept, used)`. The hypotheses
        write behind them. The other cache may be this one.
        """
        kept, used = places.shape
        lowest = torch.finfo(self.mask.dtype).min
        mask = other.mask.index_select(0, sentences).take_along_dim(places[:, None, None], dim=3)
        self.mask.fill_(lowest)[:kept, :, :, :used] = mask
        for number, mine in enumerate(self.layers):
            for i, buffer in enumerate(mine):
                if used:
                    states = other.layers[number][i].index_select(0, sentences)
                    states = states.take_along_dim(places[:, None, :, None], dim=2)
                # Hidden positions have the weight 0, which only finite numbers turn into 0.
                buffer.zero_()
                if used:
                    buffer[:kept, :, :used] = states
        sources = (self.cross_attention_cache.layers, other.cross_attention_cache.layers)
        for ours, given in zip(*sources, strict=True):
            for buffer, states in ((ours.keys, given.keys), (ours.values, given.values)):
                moved = states.index_select(0, sentences)
                buffer.zero_()[:kept, :, : moved.shape[2]] = moved
        torch.arange(used, used + len(self.places), out=self.places)

    def make_room(self, new: int) -> torch.Tensor:
        """Returns the mask of what the hypotheses see, of shape `(rows, 1, beams, capacity)`."""
        return self.mask.index_copy_(3, self.places, self.own.expand(len(self.mask), 1, -1, -1))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Writes keys and values of shape `(rows, heads, beams, head_dim)`, and returns those of all positions."""
        for buffer, states in zip(self.layers[layer_idx], (keys, values), strict=True):
            buffer.index_copy_(2, self.places, states)
        return tuple(self.layers[layer_idx])

    def reorder(self, parents: torch.Tensor) -> None:
        """Replaces each hypothesis by another one of its sentence, given in shape `(rows, beams)`."""
        self.mask.copy_(self.mask.take_along_dim(parents[:, None, :, None], dim=2))

    def seen(self, sentences: torch.Tensor) -> torch.Tensor:
        """Returns which positions any hypothesis of these sentences sees, of shape `(kept, capacity)`."""
        return (self.mask[:, 0].index_select(0, sentences) == 0).any(dim=1)


class StaticDecoder(IncrementalDecoder):
    """An [`IncrementalDecoder`] whose tensors have fixed places. `like` is one, or another decoder of this class."""

    def __init__(self, like: IncrementalDecoder, shape: Shape) -> None:
        vars(self).update(vars(like))
        # Autocast rounds the keys of a long prompt on a CPU, too, but not those of the steps.
        self.cache: Any = StaticCache(like.cache, shape, like.cache.mask.dtype if like.are_all_plain else None)
        positions = self.decoder.positions
        # No hypothesis has more tokens than there are places.
        count = shape.capacity if positions.table is None else min(shape.capacity, positions.table.num_embeddings)
        self.encoding = positions.encode(torch.arange(count, device=self.cache.mask.device))
        self.lengths = torch.zeros(shape.rows, 1, dtype=torch.long, device=self.cache.mask.device)
        self.source = self.source_mask = None
        if self.decoder.has_source:
            # Its keys and values are known: no attention reads the states.
            self.source = self.cache.mask.new_zeros(shape.rows, 0, self.decoder.config.d_model)
            self.source_mask = self.cache.mask.new_zeros(shape.rows, 1, 1, shape.source)

    def load(self, other: IncrementalDecoder, sentences: torch.Tensor, places: torch.Tensor) -> None:
        """Takes over some sentences, see [`StaticCache.load`]. All have read the token at the last of the places."""
        lengths, source_mask, width = other.lengths, other.source_mask, 0
        self.cache.load(other.cache, sentences, places)
        if isinstance(lengths, torch.Tensor):
            lengths = lengths.index_select(0, sentences)
        self.lengths.zero_()[: len(sentences)] = lengths
        if (table := self.decoder.positions.table) is not None:
            # It may have been trained since.
            self.encoding.copy_(table.weight[: len(self.encoding)])
        if self.source_mask is not None:
            if sources := other.cache.cross_attention_cache.layers:
                width = sources[0].keys.shape[2]
            if source_mask is not None:
                source_mask = source_mask.index_select(0, sentences)
            self.source_mask.zero_()[..., width:] = torch.finfo(self.source_mask.dtype).min
            self.source_mask[: len(sentences), ..., :width] = 0 if source_mask is None else source_mask

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reads one token of each hypothesis, in shape `(rows, beams)`, as [`IncrementalDecoder.step`] does."""
        # A place outside the table would end all work of the process on the GPU.
        encoding = torch.nn.functional.embedding(self.lengths.clamp(max=len(self.encoding) - 1), self.encoding)
        states = self.compute(tokens, encoding, self.cache.make_room(tokens.shape[1]))
        self.lengths.add_(1)
        self.cache.places.add_(tokens.shape[1])
        return states


# ---- Steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticRules(BeamSearchRules):
    """[`BeamSearchRules`] for lengths that are tensors without dimensions."""

    is_over: torch.Tensor  # whether all hypotheses end now, a tensor without dimensions

    def penalty(self, length: Any) -> Any:
        """Returns [`length_penalty`]; of the one length of all candidates with Python's precision."""
        return super().penalty(length.double() if length.dim() == 0 else length)

    def ends(self, tokens: torch.Tensor, length: Any) -> torch.Tensor:
        """Returns which candidates end, see [`BeamSearchRules.ends`]: all of them if the time is up."""
        return super().ends(tokens, length) | self.is_over


class StaticStep:
    """
    A step of a search in buffers of one shape: it reads the last tokens of all hypotheses, and chooses the next ones.
    All its tensors stay in their places. `decoder` has read the prompts, or is that of another step.
    """

    def __init__(self, inputs: FastSearchInputs, generation_config: GenerationConfig, decoder: Any, shape: Shape):
        self.shape, self.settings, self.processors = shape, generation_config, list(inputs.logits_processor)
        self.decoder: EnsembleDecoder = copy.copy(decoder)
        self.one = StaticDecoder(decoder.decoders[0], shape)
        self.decoder.decoders, self.decoder.states, self.decoder.unread = [self.one], [], []
        self.device = self.one.lengths.device
        self.num_candidates = inputs.num_candidates
        # Of each row: finished sentences are not changed.
        self.rows = self.first_state(shape.rows)
        # Of all rows: tokens of the hypotheses after this step, the prompt's not; steps that any sentence needed;
        # unfinished sentences after the last step.
        self.length, self.needed, self.remaining = (self.zeros(dtype=torch.long) for _ in range(3))
        # Of a step since the search moved in: its place in what is recorded of them.
        self.number = self.zeros(1, dtype=torch.long)
        self.is_over = self.zeros(dtype=torch.bool)
        ends, pad = special_ids(generation_config)
        # Tokens after the prompt at which each processor begins and ceases to change scores.
        self.lengths = self.zeros(len(self.processors), 2, dtype=torch.long)
        self.eos_token_ids, self.pad = torch.tensor(ends, dtype=torch.long, device=self.device), pad or 0
        self.recorded = self.places_to_record(shape.capacity // self.beams)

    @property
    def beams(self) -> int:
        """The number of hypotheses of a sentence."""
        return len(self.one.cache.places)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns zeros on the device of the step."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def first_state(self, rows: int) -> dict[str, torch.Tensor]:
        """Returns the state of each row, `numbers`, `tokens`, `unfinished` and `max_lengths` among it."""
        raise NotImplementedError

    def places_to_record(self, steps: int) -> dict[str, torch.Tensor]:
        """Returns what the step records, by step."""
        raise NotImplementedError

    def run(self) -> None:
        """Takes the step."""
        raise NotImplementedError

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Applies the logits processors to scores of shape `(rows * beams, entries)`."""
        tokens = self.rows["tokens"].view(-1, 1)
        for processor, lengths in zip(self.processors, self.lengths, strict=True):
            acts_at = STATIC[type(processor).__name__]
            if acts_at is None:
                scores = processor(tokens, scores)
                continue
            # It looks at the length alone, and gets one at which it acts.
            example = tokens[:, :0] if (first := acts_at(processor)[0]) == 0 else tokens.expand(-1, first)
            changed = processor(example, scores)
            scores = changed.where((lengths[0] <= self.length) & (self.length <= lengths[1]), scores)
        return scores

    def close(self, unfinished: torch.Tensor) -> None:
        """Notes which sentences go on, and that the step is over."""
        self.needed.add_(self.rows["unfinished"].any())
        self.rows["unfinished"].copy_(unfinished)
        self.remaining.copy_(unfinished.sum())
        self.length.add_(1)
        self.number.add_(1)
        # They are in memory that the graphs share.
        self.decoder.states = []

    def record(self, **values: torch.Tensor) -> None:
        """Notes something of this step."""
        for name, value in values.items():
            self.recorded[name].index_copy_(0, self.number, value[None])

    def load(
        self, state: dict[str, torch.Tensor], length: torch.Tensor, needed: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Takes over the state of sentences, in the first rows, and what is the same for all of them."""
        for name, buffer in self.rows.items():
            buffer.zero_()[: len(state[name])] = state[name]
        self.length.copy_(length)
        self.needed.copy_(needed)
        self.lengths.copy_(lengths)
        self.number.zero_()
        self.is_over.zero_()

    @property
    def memory(self) -> int:
        """The number of bytes of keys and values, which have most of a step's memory."""
        layers = [*self.one.cache.layers]
        layers += [[each.keys, each.values] for each in self.one.cache.cross_attention_cache.layers]
        return sum(each.nbytes for layer in layers for each in layer)

    def state(self, sentences: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the state of the rows with these indices."""
        return {name: buffer.index_select(0, sentences) for name, buffer in self.rows.items()}


def alive_from(state: dict[str, torch.Tensor]) -> Alive:
    """Returns the sentences of a beam search by the state of their rows."""
    names = ("numbers", "can_improve", "running_scores", "tokens", "scores", "is_finished", "end_positions")
    return Alive(*(state[name] for name in names))


class BeamStep(StaticStep):
    """A step of beam search."""

    def first_state(self, rows: int) -> dict[str, torch.Tensor]:
        """Returns the fields of [`Alive`], with the last tokens for the sequences."""
        one = {"numbers": torch.long, "unfinished": torch.bool}
        column = {"max_lengths": torch.long, "can_improve": torch.bool}
        of_beams = {"tokens": torch.long, "running_scores": torch.float32, "scores": torch.float32}
        of_beams |= {"is_finished": torch.bool, "end_positions": torch.long}
        return (
            {name: self.zeros(rows, dtype=dtype) for name, dtype in one.items()}
            | {name: self.zeros(rows, 1, dtype=dtype) for name, dtype in column.items()}
            | {name: self.zeros(rows, self.beams, dtype=dtype) for name, dtype in of_beams.items()}
        )

    def places_to_record(self, steps: int) -> dict[str, torch.Tensor]:
        """Returns what [`Step`] has."""
        widths = {"tokens": self.num_candidates, "parents": self.num_candidates, "chosen": self.beams}
        return {name: self.zeros(steps, self.shape.rows, width, dtype=torch.long) for name, width in widths.items()}

    def run(self) -> None:
        """Takes the step, as [`beam_search`] does."""
        rows, length = self.rows, self.length + 1
        alive = alive_from(rows)
        rules = StaticRules(self.settings, self.eos_token_ids, rows["max_lengths"], 0, self.is_over)
        self.decoder.read(rows["tokens"])
        log_probs = self.decoder.log_probs()
        log_probs = self.process(log_probs).view(self.shape.rows, self.beams, -1)
        log_probs, parents, tokens = best_tokens(log_probs, alive.running_scores, self.num_candidates)
        ends = rules.ends(tokens, length)
        chosen, unfinished = alive.advance(rules, log_probs, tokens, ends, length)
        self.record(tokens=tokens, parents=parents, chosen=chosen)
        before = rows["unfinished"][:, None]
        for name in ("scores", "is_finished", "end_positions"):
            rows[name].copy_(getattr(alive, name).where(before, rows[name]))
        for name in ("can_improve", "running_scores"):
            rows[name].copy_(getattr(alive, name))
        rows["tokens"].copy_(tokens.gather(1, chosen))
        self.decoder.reorder(parents.gather(1, chosen))
        self.close(rows["unfinished"] & unfinished)


class SingleStep(StaticStep):
    """A step of greedy search or sampling."""

    def first_state(self, rows: int) -> dict[str, torch.Tensor]:
        """Returns the indices, last tokens and limits of the rows, and which go on."""
        state = {name: self.zeros(rows, dtype=torch.long) for name in ("numbers", "max_lengths")}
        return state | {
            "unfinished": self.zeros(rows, dtype=torch.bool),
            "tokens": self.zeros(rows, 1, dtype=torch.long),
        }

    def places_to_record(self, steps: int) -> dict[str, torch.Tensor]:
        """Returns the tokens."""
        return {"tokens": self.zeros(steps, self.shape.rows, dtype=torch.long)}

    def run(self) -> None:
        """Takes the step, as [`single_search`] does."""
        rows = self.rows
        self.decoder.read(rows["tokens"])
        logits = self.process(self.decoder.logits())
        if self.settings.do_sample:
            # As `torch.multinomial` draws, which first waits to see whether these are probabilities.
            probabilities = logits.softmax(dim=1)
            places = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=1, keepdim=True)
        else:
            _, _, places = best_tokens(logits[:, None], torch.zeros_like(logits[:, :1]), k=1)
        tokens = places[:, 0].where(rows["unfinished"], self.pad)
        self.record(tokens=tokens)
        rows["tokens"].copy_(tokens[:, None])
        self.close(
            rows["unfinished"] & ~is_one_of(tokens, self.eos_token_ids) & (self.length + 1 < rows["max_lengths"])
        )
