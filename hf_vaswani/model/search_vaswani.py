"""Sampling, and greedy and beam search of Section 6.1, on [`EnsembleDecoder`].

They return the tokens of transformers' own searches, in less time. A call that needs more than token ids and
scores of hypotheses stays with transformers: [`fast_search_inputs`] decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from .cache_vaswani import EnsembleDecoder, Prompt, find_change
from .configuration_vaswani import CACHE, NAMES_OF_THE_CACHE
from .kernels_vaswani import fast_products
from .rules_vaswani import MISSING, BeamSearchRules, SourceLengthCriteria, is_one_of, search_call, special_ids

# Length of the output buffer of greedy search at first; it doubles when it is full.
FIRST_LENGTH = 16
# On a CPU, `best_tokens` compares the maxima of groups of this size first, if there are at least so many scores.
GROUP_SIZE = 16
MIN_SCORES_TO_GROUP = 2**15
# Finished sentences leave the batch once they make up this fraction of it: removing them copies all others.
MIN_FINISHED_FRACTION = 1 / 8
# Settings that only transformers' searches support.
TRANSFORMERS_ONLY = (
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "cache_implementation",
    "prefill_chunk_size",
)
# Stands for the tokens where a criterion does not read them.
NO_TOKENS = torch.zeros(1, 0, dtype=torch.long, device="cpu")
# Arguments of the model that a search reads, and the tokenizer of pipelines, which only stopping criteria read.
MODEL_KWARGS = {
    *NAMES_OF_THE_CACHE,
    "encoder_outputs",
    "attention_mask",
    "use_cache",
    "tokenizer",
    "position_ids",
    "logits_to_keep",
}
# transformers' processors that treat each row by itself, and so do not notice that finished sentences have left the
# batch. By their names, because the import of this file must not depend on them.
ROW_BY_ROW = {
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
}


# ---- Calls that the fast search takes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FastSearchInputs:
    """Inputs of a search, beside the decoder's prompt and the generation config."""

    models: Sequence[Any]  # a [`VaswaniForConditionalGeneration`], several that translate together, or a causal model
    logits_processor: LogitsProcessorList
    encoder_states: Sequence[torch.Tensor]  # of each model's encoder, [batch, source, d_model]
    source_mask: torch.Tensor | None  # 1 for tokens, 0 for padding, [batch, source]
    prompt: Prompt | None = None  # what a causal model has read
    # The only entries of the vocabulary that are searched, ascending; None for all.
    entries: torch.Tensor | None = None
    clocks: Sequence[StoppingCriteria] = ()  # criteria that are asked after each step, see [`is_clock`]

    @property
    def vocab_size(self) -> int:
        """Number of entries that are searched."""
        return int(self.models[0].config.vocab_size) if self.entries is None else len(self.entries)

    def process(self, sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Applies the logits processors, if there are any, to scores of the next tokens, of shape `(rows, entries)`,
        after sequences of shape `(rows, length)`.
        """
        if self.entries is None:
            return self.logits_processor(sequences, scores)
        whole = scores.new_full((len(scores), self.models[0].config.vocab_size), -torch.inf)
        whole[:, self.entries] = scores
        return self.logits_processor(sequences, whole)[:, self.entries]

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the token ids of places among the entries."""
        return places if self.entries is None else self.entries[places]

    def is_over(self) -> bool:
        """Returns whether a search must end with the hypotheses that it has: its time is up."""
        # A tensor on the CPU, whose answer no GPU has to be waited for.
        return any(bool(clock(NO_TOKENS, NO_TOKENS).all()) for clock in self.clocks)

    @property
    def is_row_by_row(self) -> bool:
        """True if every logits processor treats each row by itself, and alike."""
        # Prompts of different lengths make a processor count the rows.
        return not any(
            not is_of_transformers(type(processor), ROW_BY_ROW)
            or isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
            for processor in self.logits_processor
        )


def fast_search_inputs(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> FastSearchInputs | None:
    """
    Returns the inputs of [`beam_search`] and [`single_search`], or `None` if only transformers' searches can do what
    a call of `generate()` asks for.

    Raises:
        ValueError: only transformers' searches can do it, but the call has an ensemble or a shortlist.
    """
    call = search_call()
    models = (model, *call.ensemble)
    obstacle = find_obstacle(models, input_ids, generation_config, stopping_criteria, synced_gpus, model_kwargs)
    if obstacle is not None:
        call.refuse(obstacle)
        return None
    entries = searched_entries(generation_config, logits_processor)
    clocks = [criterion for criterion in stopping_criteria if is_clock(criterion)]
    # transformers has repeated each sentence for each beam.
    of_each = slice(None, None, generation_config.num_beams)
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask[of_each]
    if not model.config.is_encoder_decoder:
        prompt = Prompt.read(model.model.decoder, input_ids[of_each], mask, model_kwargs[CACHE])
        return FastSearchInputs(models, logits_processor, [prompt.states[:, None]], None, prompt, clocks=clocks)
    encoder_states = [model_kwargs["encoder_outputs"][0][of_each]]
    for other in models[1:]:
        with fast_products(other.get_encoder(), call.inputs):
            encoder_states.append(other.get_encoder()(input_ids=call.inputs, attention_mask=mask)[0])
    return FastSearchInputs(models, logits_processor, encoder_states, mask, entries=entries, clocks=clocks)


def searched_entries(
    generation_config: GenerationConfig, logits_processor: LogitsProcessorList
) -> torch.Tensor | None:
    """
    Returns the entries of the vocabulary that the shortlist of a call selects, in ascending order; `None` without one.

    Raises:
        ValueError: the call has a processor that cannot be used with a shortlist, or too few entries are selected.
    """
    call = search_call()
    if call.shortlist is None:
        return None
    for processor in logits_processor:
        # Others may allow or favour only tokens that are not on the list.
        if not is_of_transformers(type(processor), ROW_BY_ROW - {"SequenceBiasLogitsProcessor"}):
            raise ValueError(f"shortlist cannot be used with a {type(processor).__name__}: leave one of them out.")
    ends, _ = special_ids(generation_config)
    needed = (ends, generation_config.forced_bos_token_id, generation_config.forced_eos_token_id)
    always = torch.cat([torch.as_tensor(each).flatten().cpu() for each in needed if each is not None])
    entries: torch.Tensor = call.shortlist.entries(call.inputs, always)
    # Each running hypothesis needs a continuation that is not the end.
    least = 1 + len(ends)
    if len(entries) < least:
        raise ValueError(f"The shortlist has {len(entries)} entries for this batch, but a search needs {least}.")
    return entries


def find_obstacle(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Returns a clause that names something in a call that only transformers' searches can do, or `None`."""
    for name in TRANSFORMERS_ONLY:
        if getattr(generation_config, name):
            return f"{name}={getattr(generation_config, name)!r} was given"
    if generation_config.do_sample and generation_config.num_beams > 1:
        return "do_sample=True was given"
    if synced_gpus or not model_kwargs.get("use_cache"):
        return f"{'synced_gpus=True' if synced_gpus else 'use_cache=False'} was given"
    # A cache of the caller's may have entries, and must have more of them afterwards.
    if getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        return f"{CACHE} was given"
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_KWARGS:
            return f"{name} was given"
    for criterion in stopping_criteria:
        if not is_supported_criterion(criterion, generation_config):
            return f"the stopping criterion {type(criterion).__name__} was given"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not is_usual(positions, model_kwargs.get("attention_mask")):
        return "position_ids was given"
    if positions is not None and not is_left_padded(model_kwargs.get("attention_mask")):
        return "a text is padded on the right"
    for number, model in enumerate(models):
        change = find_change(model)
        if change is not None:
            return f"{f'item {number} of it' if number else 'this model'} {change}"
    device = input_ids.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.bfloat16:
        return f"autocast to {torch.get_autocast_dtype(device)} is enabled"
    mask = model_kwargs.get("attention_mask")
    # Attention to a sentence without tokens is undefined: each implementation computes something else.
    if mask is not None and not (mask.dim() == 2 and mask.any(dim=1).all()):
        return "attention_mask is not a matrix with a token in each row"
    return None


def is_usual(positions: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Returns whether positions are those that a causal model counts by itself, of the tokens that a mask shows."""
    if mask is None or mask.dim() != 2:
        usual = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    else:
        usual = (mask.long().cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    return torch.equal(positions, usual)


def is_left_padded(mask: torch.Tensor | None) -> bool:
    """Returns whether each text of a mask ends in its last column."""
    return mask is None or bool((mask[:, -1] != 0).all())


def is_supported_criterion(criterion: StoppingCriteria, generation_config: GenerationConfig) -> bool:
    """Returns whether a stopping criterion repeats what the generation config of the call says, or is a clock."""
    if isinstance(criterion, MaxLengthCriteria):
        return type(criterion) is MaxLengthCriteria and criterion.max_length == generation_config.max_length
    if is_of_transformers(type(criterion), {"EosTokenCriteria"}):
        return criterion.eos_token_id.flatten().tolist() == special_ids(generation_config)[0].tolist()
    return type(criterion) is SourceLengthCriteria or is_clock(criterion)


def is_clock(criterion: StoppingCriteria) -> bool:
    """
    Returns whether a stopping criterion ends all sentences at once, whatever their tokens are: that of `max_time`, or
    one of the caller's with `reads_tokens = False`, such as [`EndCriteria`].
    """
    is_declared = getattr(criterion, "reads_tokens", True) is False
    return is_declared or is_of_transformers(type(criterion), {"MaxTimeCriteria"})


def is_of_transformers(kind: type, names: set[str]) -> bool:
    """Returns whether a class is one of transformers with one of these names."""
    return kind.__name__ in names and kind.__module__.split(".")[0] == "transformers"


# ---- Parts of all searches ---------------------------------------------------------------------------------------


def start_decoder(inputs: FastSearchInputs, prompt: torch.Tensor, num_candidates: int) -> EnsembleDecoder:
    """
    Returns a decoder that has read the prompt, of shape `(batch, beams, prompt)`, and will be asked for so many
    candidates of each sentence in the first step.
    """
    beams, length = prompt.shape[1:]
    decoder = EnsembleDecoder(inputs.models, inputs.encoder_states, inputs.source_mask, beams, inputs.entries)
    if inputs.prompt is not None:
        decoder.start(inputs.prompt)
    else:
        for column in range(length):
            decoder.read(prompt[:, :1, column])
    # One hypothesis reads the prompt for all, unless it has too few continuations or a processor counts the rows.
    if not inputs.is_row_by_row or inputs.vocab_size < num_candidates:
        decoder.repeat(beams)
    return decoder


def best_tokens(
    scores: torch.Tensor, offsets: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Selects the `k` best next tokens over all hypotheses of each sentence, by scores of shape `(sentences, hypotheses,
    entries)` and offsets of all scores of a hypothesis. Returns scores, hypotheses and entries, each of shape
    `(sentences, k)`, in descending order of scores.

    On a CPU `torch.topk` over all scores would take as long as computing them. Many scores are split into groups: the
    `k` groups with the greatest maxima contain the `k` best scores.
    """
    sentences, hypotheses, vocab_size = scores.shape
    # A processor of the caller's may return a view of a larger tensor.
    scores = scores.contiguous()
    groups = vocab_size // GROUP_SIZE
    if scores.numel() < MIN_SCORES_TO_GROUP and k == hypotheses == 1:
        # Faster than topk for a single token.
        best, places = scores[:, 0].max(dim=1, keepdim=True)
        return best + offsets, torch.zeros_like(places), places
    if scores.device.type != "cpu" or scores.numel() < MIN_SCORES_TO_GROUP or groups * hypotheses < 2 * k:
        best, places = (scores + offsets[:, :, None]).flatten(1).topk(k)
        return best, places // vocab_size, places % vocab_size
    # Group g has the tokens g, g + groups, g + 2 groups, ...: its maximum is one over a column of this view.
    row = hypotheses * vocab_size
    grouped = scores.as_strided((sentences, hypotheses, GROUP_SIZE, groups), (row, vocab_size, groups, 1))
    maxima = grouped.amax(dim=2) + offsets[:, :, None]  # [sentences, hypotheses, groups]
    best_groups = maxima.flatten(1).topk(k, sorted=False).indices  # [sentences, k]
    first = best_groups // groups * vocab_size + best_groups % groups
    within_group = torch.arange(0, groups * GROUP_SIZE, groups, device=scores.device)
    places = (first[:, :, None] + within_group).flatten(1)
    if groups * GROUP_SIZE < vocab_size:
        # The last tokens of the vocabulary, which are in no group.
        rows = torch.arange(0, row, vocab_size, device=scores.device)
        rest = torch.arange(groups * GROUP_SIZE, vocab_size, device=scores.device) + rows[:, None]
        places = torch.cat((places, rest.flatten().expand(sentences, -1)), dim=1)
    candidates = scores.view(sentences, row).gather(1, places) + offsets.gather(1, places // vocab_size)
    best, chosen = candidates.topk(k)
    places = places.gather(1, chosen)
    return best, places // vocab_size, places % vocab_size


def split(unfinished: torch.Tensor, remaining: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the indices of the sentences that are not finished, `remaining` of them, and of those that are, both in
    ascending order, without reading from a device.
    """
    order = unfinished.to(torch.uint8).argsort(descending=True, stable=True)
    return order[:remaining], order[remaining:]


# ---- Beam search -------------------------------------------------------------------------------------------------


@dataclass
class Alive:
    """State of the sentences that a beam search has not finished; the first dimension of each tensor."""

    numbers: torch.Tensor  # indices in the batch, [sentences]
    can_improve: torch.Tensor  # see [`BeamSearchRules.may_improve`], [sentences, 1]
    running_scores: torch.Tensor  # log-probabilities of the running hypotheses, [sentences, beams]
    running_sequences: torch.Tensor  # their tokens, updated only for logits processors, [sentences, beams, length]
    scores: torch.Tensor  # of the best finished hypotheses, with the length penalty, [sentences, beams]
    is_finished: torch.Tensor  # which of these exist, [sentences, beams]
    # Where these ended: index of the step * candidates of a step + index of the candidate; -1 if missing.
    end_positions: torch.Tensor  # [sentences, beams]

    @classmethod
    def at_the_start(cls, prompt: torch.Tensor) -> "Alive":
        """Returns the state before the first step: one hypothesis, the prompt of shape `(batch, beams, prompt)`."""
        numbers = torch.arange(len(prompt), device=prompt.device)
        missing = torch.full(prompt.shape[:2], MISSING, device=prompt.device)
        return cls(
            numbers=numbers,
            can_improve=torch.ones_like(numbers, dtype=torch.bool)[:, None],
            running_scores=missing.index_fill(1, numbers[:1], 0.0),
            running_sequences=prompt,
            scores=missing,
            is_finished=torch.zeros_like(missing, dtype=torch.bool),
            end_positions=torch.full_like(missing, -1, dtype=torch.long),
        )

    def keep(self, sentences: torch.Tensor) -> "Alive":
        """Returns the state of the sentences with these indices, of shape `(kept,)`."""
        return Alive(*(getattr(self, field.name).index_select(0, sentences) for field in fields(self)))

    def append(self, parents: torch.Tensor, tokens: torch.Tensor) -> None:
        """Extends the hypotheses `parents` by `tokens`, both of shape `(sentences, beams)`."""
        sequences = torch.take_along_dim(self.running_sequences, parents[:, :, None], dim=1)
        self.running_sequences = torch.cat((sequences, tokens[:, :, None]), dim=2)

    def finish(
        self, rules: BeamSearchRules, log_probs: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, length: int
    ) -> None:
        """Applies [`BeamSearchRules.finish`] and notes where the hypotheses ended."""
        self.scores, self.is_finished, kept = rules.finish(
            self.can_improve, self.scores, self.is_finished, log_probs, tokens, ends, length
        )
        candidates = tokens.shape[1]
        these = torch.arange((length - 1) * candidates, length * candidates, device=tokens.device).expand_as(tokens)
        self.end_positions = torch.cat((self.end_positions, these), dim=1).gather(1, kept)

    @staticmethod
    def decode_end_positions(end_positions: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the steps in which hypotheses ended, -1 if missing, and the indices of their candidates."""
        return end_positions // candidates, end_positions % candidates


@dataclass
class Step:
    """Candidates of one step of a beam search, for the sentences that were not finished."""

    rows: torch.Tensor  # of each sentence of the batch, its row in the other tensors, [batch]
    tokens: torch.Tensor  # last tokens of the candidates, [sentences, candidates]
    parents: torch.Tensor  # hypotheses that the candidates extend, [sentences, candidates]
    chosen: torch.Tensor  # candidates that became running hypotheses, [sentences, beams]


# Called with each step, its candidates' log-probabilities and which of them end, and the sentences after the step.
BeamObserver = Callable[[Step, torch.Tensor, torch.Tensor, Alive], None]


def beam_search(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    inputs: FastSearchInputs,
    rules: BeamSearchRules,
    observe: BeamObserver | None = None,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput | GenerateBeamDecoderOnlyOutput:
    """
    Searches for the best translations (Section 6.1), as `GenerationMixin._beam_search` does with the same rules, after
    a prompt of shape `(batch * beams, prompt)`. `observe` is called after each step.

    Returns:
        `torch.LongTensor` of shape `(batch * num_return_sequences, length)`; with `return_dict_in_generate`
        transformers' output for the kind of model, with these `sequences`, `sequences_scores` and `beam_indices`.
    """
    num_beams, logits_processor, row_by_row = (
        generation_config.num_beams,
        inputs.logits_processor,
        inputs.is_row_by_row,
    )
    num_candidates = max(2, 1 + len(rules.eos_token_ids)) * num_beams
    prompt = input_ids.view(-1, num_beams, input_ids.shape[1])
    decoder, alive = start_decoder(inputs, prompt, num_candidates), Alive.at_the_start(prompt)
    rows, history, done = alive.numbers, list[Step](), list[Alive]()
    while True:
        log_probs, parents, tokens = top_candidates(alive, decoder.log_probs(), inputs, num_candidates)
        length = len(history) + 1
        ends = rules.ends(tokens, length)
        if inputs.is_over():
            ends = torch.ones_like(ends)
        alive.running_scores, chosen = log_probs.where(~ends, MISSING).topk(num_beams)
        alive.finish(rules, log_probs, tokens, ends, length)
        history.append(Step(rows, tokens, parents, chosen))
        alive.can_improve = rules.may_improve(
            alive.can_improve, alive.running_scores, alive.scores, alive.is_finished, length
        )
        if observe is not None:
            observe(history[-1], log_probs, ends, alive)
        unfinished = alive.can_improve[:, 0] & ~ends.all(dim=1)
        if rules.settings.early_stopping is True:
            unfinished &= ~alive.is_finished.all(dim=1)
        remaining = int(unfinished.sum())
        if remaining == 0:
            break
        parents, tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        decoder.reorder(parents)
        if logits_processor:
            alive.append(parents, tokens)
        if row_by_row and remaining <= (1 - MIN_FINISHED_FRACTION) * len(unfinished):
            kept, left = split(unfinished, remaining)
            done.append(alive.keep(left))
            alive, rules, tokens = alive.keep(kept), rules.keep(kept), tokens[kept]
            places = torch.arange(remaining, device=rows.device)
            rows = torch.zeros_like(rows).index_copy(0, alive.numbers, places)
            decoder.keep(kept)
        decoder.read(tokens)
    sequences, scores, beam_indices = collect_results([*done, alive], history, prompt, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    kind = GenerateBeamEncoderDecoderOutput if inputs.prompt is None else GenerateBeamDecoderOnlyOutput
    return kind(sequences=sequences, sequences_scores=scores, beam_indices=beam_indices)


def top_candidates(
    alive: Alive, log_probs: torch.Tensor, inputs: FastSearchInputs, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Extends the running hypotheses by one token, by log-probabilities of shape `(sentences * beams, entries)`, or
    `(sentences, entries)` for the first beam of each sentence alone. Returns log-probabilities, extended beams and
    last tokens of the `k` best candidates, each of shape `(sentences, k)`.
    """
    sentences = len(alive.numbers)
    beams = len(log_probs) // sentences
    if inputs.logits_processor:
        log_probs = inputs.process(alive.running_sequences[:, :beams].flatten(0, 1), log_probs)
    best, parents, places = best_tokens(log_probs.reshape(sentences, beams, -1), alive.running_scores[:, :beams], k)
    return best, parents, inputs.tokens(places)


def collect_results(
    parts: Sequence[Alive], history: Sequence[Step], prompt: torch.Tensor, generation_config: GenerationConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns sequences, scores and beam indices of [`beam_search`] from the final states of all sentences."""
    returned, num_beams = generation_config.num_return_sequences, prompt.shape[1]
    order = torch.cat([part.numbers for part in parts]).argsort()
    end_positions, scores, is_finished = (
        torch.cat([getattr(part, name) for part in parts])[order, :returned].flatten()
        for name in ("end_positions", "scores", "is_finished")
    )
    ends, pad = special_ids(generation_config)
    # As in transformers: the pad id of greedy search and sampling, but `</s>` where that is 0 or missing.
    fill = (pad or int(ends[0])) if len(ends) else -1
    sequences, indices = read_back(history, end_positions.where(is_finished, -1), returned, num_beams, fill)
    return torch.cat((prompt[:, :returned].flatten(0, 1), sequences), dim=1), scores, indices


def read_back(
    history: Sequence[Step], end_positions: torch.Tensor, returned: int, num_beams: int, fill: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Follows the `returned` hypotheses of each sentence from their last tokens to their first, by the `end_positions` of
    [`Alive`], of shape `(batch * returned,)`. Returns tokens, padded with `fill`, and the rows of `batch * num_beams`
    that they extended, padded with -1; both of shape `(batch * returned, length of the longest)`.
    """
    last, candidate = Alive.decode_end_positions(end_positions, history[0].tokens.shape[1])
    sentences = torch.arange(len(last), device=last.device) // returned
    parents = torch.zeros_like(last)
    tokens: list[torch.Tensor] = []
    indices: list[torch.Tensor] = []
    for number in range(int(last.max()), -1, -1):
        step = history[number]
        rows = step.rows[sentences]
        candidate = torch.where(last > number, step.chosen[rows, parents], candidate)
        parents = step.parents[rows, candidate]
        tokens.append(step.tokens[rows, candidate].where(last >= number, fill))
        indices.append((parents + sentences * num_beams).where(last >= number, -1).int())
    if not tokens:
        return last.new_empty(len(last), 0), last.new_empty(len(last), 0).int()
    return torch.stack(tokens[::-1], dim=1), torch.stack(indices[::-1], dim=1)


# ---- Greedy search and sampling ----------------------------------------------------------------------------------


def single_search(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    inputs: FastSearchInputs,
    streamer: Any = None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateDecoderOnlyOutput:
    """
    Takes the best token at each step, or draws one with `do_sample`, as `GenerationMixin._sample` does, after a prompt
    of shape `(batch, prompt)`. The streamer receives the tokens of each step; `observe` is called with its logits, of
    shape `(sentences, entries)`, and the tokens that were taken, of shape `(sentences,)`.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`; with `return_dict_in_generate` transformers' output for the kind
        of model, with these `sequences`.
    """
    device, (batch, length) = input_ids.device, input_ids.shape
    logits_processor, do_sample = inputs.logits_processor, generation_config.do_sample
    # Tokens are drawn for all rows: with fewer of them, other random numbers would be drawn than by transformers.
    row_by_row = inputs.is_row_by_row and not do_sample
    ends, pad = special_ids(generation_config)
    fill, eos = pad or 0, ends.to(device)
    decoder = start_decoder(inputs, input_ids[:, None], num_candidates=1)
    # Rows of `sequences` that are in the decoder, and their limits: several rows of a sentence if they are drawn.
    numbers, max_lengths = torch.arange(batch, device=device), search_call().max_lengths.to(device)
    max_lengths = max_lengths.repeat_interleave(batch // len(max_lengths))
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    sequences, no_offsets = input_ids, torch.zeros(batch, 1, device=device)
    while True:
        if length == sequences.shape[1]:
            sequences = nn.functional.pad(sequences, (0, max(FIRST_LENGTH, length)), value=fill)
        logits = decoder.logits()
        if logits_processor:
            logits = inputs.process(sequences[numbers, :length], logits)
        if do_sample:
            places = torch.multinomial(logits.softmax(dim=1), num_samples=1)
        else:
            _, _, places = best_tokens(logits[:, None], no_offsets[: len(logits)], k=1)
        tokens = inputs.tokens(places[:, 0]).where(unfinished, fill)
        if observe is not None:
            observe(logits, tokens)
        sequences[numbers, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(sequences[:, length - 1].cpu())
        unfinished &= ~is_one_of(tokens, eos) & (length < max_lengths)
        remaining = int(unfinished.sum())
        if remaining == 0 or inputs.is_over():
            break
        if row_by_row and remaining <= (1 - MIN_FINISHED_FRACTION) * len(unfinished):
            kept, _ = split(unfinished, remaining)
            decoder.keep(kept)
            numbers, max_lengths, tokens = numbers[kept], max_lengths[kept], tokens[kept]
            unfinished = unfinished[kept]
        decoder.read(tokens[:, None])
    if streamer is not None:
        streamer.end()
    sequences = sequences[:, :length]
    if not generation_config.return_dict_in_generate:
        return sequences
    return (GenerateEncoderDecoderOutput if inputs.prompt is None else GenerateDecoderOnlyOutput)(sequences=sequences)
