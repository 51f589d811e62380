"""Sampling, and greedy and beam search of Section 6.1, on [`EnsembleDecoder`]: the tokens of transformers' searches.

Calls that need more than token ids and scores of hypotheses stay with transformers: [`fast_search_inputs`] decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria
from transformers.generation.utils import GenerateBeamOutput, GenerateNonBeamOutput

from .cache_vaswani import TOKENS_AT_A_TIME, EnsembleDecoder, find_change
from .configuration_vaswani import CACHE, NAMES_OF_THE_CACHE
from .kernels_vaswani import fast_products
from .rules_vaswani import MISSING, BeamSearchRules, SourceLengthCriteria, is_one_of, search_call, special_ids

# On a CPU, `best_tokens` compares the maxima of groups of this size first, if there are at least so many scores.
GROUP_SIZE = 16
MIN_SCORES_TO_GROUP = 2**15
# Finished sentences leave the batch once they make up this fraction of it: removing them copies all others.
MIN_FINISHED_FRACTION = 1 / 8
# Stands for the tokens where a criterion does not read them: on the CPU, so that no GPU has to be waited for.
NO_TOKENS = torch.zeros(1, 0, dtype=torch.long, device="cpu")
# Settings that only transformers' searches support.
TRANSFORMERS_ONLY = (
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("cache_implementation", "prefill_chunk_size"),
)
# Arguments of the model that a search reads, and the tokenizer of pipelines, which only stopping criteria read.
MODEL_KWARGS = {"use_cache", "encoder_outputs", "attention_mask", "position_ids", "logits_to_keep", "tokenizer"}
# transformers' processors that treat each row by itself, and so do not notice that finished sentences have left the
# batch. By their names, because the import of this file must not depend on them.
ROW_BY_ROW = {
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ExponentialDecayLengthPenalty"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("SequenceBiasLogitsProcessor", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
    *("LogitNormalization", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"),
}


# ---- Calls that the fast search takes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FastSearchInputs:
    """A decoder with the prompts of a search, and what else the call says about the next tokens."""

    config: Any  # [`VaswaniConfig`] of the model, the first of those that translate together
    decoder: EnsembleDecoder
    num_candidates: int  # of each sentence in a step of beam search
    logits_processor: LogitsProcessorList
    is_row_by_row: bool  # every logits processor treats each row by itself, and alike
    entries: torch.Tensor | None  # the only ones of the vocabulary that are searched, ascending; None for all
    clocks: Sequence[StoppingCriteria]  # criteria that are asked after each step, see [`is_clock`]

    def process(self, sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Applies the logits processors to scores of shape `(rows, entries)` after sequences `(rows, length)`."""
        if self.entries is None:
            return self.logits_processor(sequences, scores)
        whole = scores.new_full((len(scores), self.config.vocab_size), -torch.inf)
        whole[:, self.entries] = scores
        return self.logits_processor(sequences, whole)[:, self.entries]

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """Returns the token ids of places among the entries."""
        return places if self.entries is None else self.entries[places]

    def is_over(self) -> bool:
        """Returns whether a search must end with the hypotheses that it has: its time is up."""
        return any(bool(clock(NO_TOKENS, NO_TOKENS).all()) for clock in self.clocks)


def fast_search_inputs(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Sequence[StoppingCriteria],
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> FastSearchInputs | None:
    """
    Returns the inputs of [`beam_search`] and [`single_search`] after prompts of shape `(batch * beams, prompt)`, or
    `None` if the call asks for more than they can do. An ensemble and a shortlist then raise a `ValueError`.
    """
    call, num_beams = search_call(), generation_config.num_beams
    models = (model, *call.ensemble)
    obstacle = find_obstacle(models, input_ids, generation_config, stopping_criteria, synced_gpus, model_kwargs)
    if obstacle is not None:
        call.refuse(obstacle)
        return None
    entries = listed_entries(generation_config, logits_processor)
    # transformers has repeated each sentence for each beam.
    prompts, mask = input_ids[::num_beams], model_kwargs.get("attention_mask")
    mask = None if mask is None else mask[::num_beams]
    if model.config.is_encoder_decoder:
        encoded = [model_kwargs["encoder_outputs"][0][::num_beams]]
        for other in models[1:]:
            with fast_products(other.get_encoder(), call.inputs):
                encoded.append(other.get_encoder()(input_ids=call.inputs, attention_mask=mask)[0])
        decoder = EnsembleDecoder(models, encoded, mask, num_beams, entries)
        decoder.unread = [*prompts.split(1, dim=1)]
    else:
        read = model.model.decoder(prompts, mask, use_cache=True)
        decoder = EnsembleDecoder(models, [read.last_hidden_state[:, -1:]], mask, num_beams, None, read[CACHE].layers)
    # Prompts of different lengths make a processor count the rows.
    is_row_by_row = all(
        is_of_transformers(processor, ROW_BY_ROW)
        and not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
        for processor in logits_processor
    )
    num_candidates = max(2, 1 + len(special_ids(generation_config)[0])) * num_beams
    # One hypothesis reads the prompt for all, unless it has too few continuations or a processor counts the rows.
    if not is_row_by_row or (model.config.vocab_size if entries is None else len(entries)) < num_candidates:
        decoder.logits()
        decoder.states = [states.repeat_interleave(num_beams, dim=0) for states in decoder.states]
    clocks = [criterion for criterion in stopping_criteria if is_clock(criterion)]
    return FastSearchInputs(model.config, decoder, num_candidates, logits_processor, is_row_by_row, entries, clocks)


def listed_entries(generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> torch.Tensor | None:
    """Returns the entries of the vocabulary that the shortlist of a call selects, ascending; `None` without one."""
    call, (ends, _) = search_call(), special_ids(generation_config)
    if call.shortlist is None:
        return None
    for processor in logits_processor:
        # Others may allow or favour only tokens that are not on the list.
        if not is_of_transformers(processor, ROW_BY_ROW - {"SequenceBiasLogitsProcessor"}):
            raise ValueError(f"shortlist cannot be used with a {type(processor).__name__}: leave one of them out.")
    needed = (ends, generation_config.forced_bos_token_id, generation_config.forced_eos_token_id)
    always = torch.cat([torch.as_tensor(each).flatten().cpu() for each in needed if each is not None])
    entries: torch.Tensor = call.shortlist.entries(call.inputs, always)
    # Each running hypothesis needs a continuation that is not the end.
    if len(entries) < (least := 1 + len(ends)):
        raise ValueError(f"The shortlist has {len(entries)} entries for this batch, but a search needs {least}.")
    return entries


def find_obstacle(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    stopping_criteria: Sequence[StoppingCriteria],
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Returns a clause that names something in a call that only transformers' searches can do, or `None`."""
    given = [f"{name}={value!r}" for name in TRANSFORMERS_ONLY if (value := getattr(generation_config, name))]
    if generation_config.do_sample and generation_config.num_beams > 1:
        given.append("do_sample=True")
    if synced_gpus or not model_kwargs.get("use_cache"):
        given.append("synced_gpus=True" if synced_gpus else "use_cache=False")
    # A cache of the caller's may have entries, and must have more of them afterwards.
    if getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        given.append(CACHE)
    known = MODEL_KWARGS | {*NAMES_OF_THE_CACHE}
    given += [name for name, value in model_kwargs.items() if value is not None and name not in known]
    for criterion in stopping_criteria:
        if not repeats(criterion, generation_config) and not is_clock(criterion):
            given.append(f"the stopping criterion {type(criterion).__name__}")
    if given:
        return f"{given[0]} was given"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    # Attention to a sentence without tokens is undefined: each implementation computes something else.
    if mask is not None and not (mask.dim() == 2 and mask.any(dim=1).all()):
        return "attention_mask is not a matrix with a token in each row"
    if positions is not None:
        # Those that a causal model counts by itself.
        visible = torch.ones_like(positions) if mask is None else (mask != 0).long()
        if not torch.equal(positions, (visible.cumsum(dim=-1) - 1) * visible):
            return "position_ids was given"
        if not visible[..., -1].all():
            return "a text is padded on the right"
    for number, model in enumerate(models):
        if change := find_change(model):
            return f"{f'item {number} of it' if number else 'this model'} {change}"
    device = input_ids.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.bfloat16:
        return f"autocast to {torch.get_autocast_dtype(device)} is enabled"
    return None


def repeats(criterion: StoppingCriteria, generation_config: GenerationConfig) -> bool:
    """Returns whether a stopping criterion says what the config of the call, or the limits of its sentences, say."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == generation_config.max_length
    if is_of_transformers(criterion, {"EosTokenCriteria"}):
        return criterion.eos_token_id.flatten().tolist() == special_ids(generation_config)[0]
    return type(criterion) is SourceLengthCriteria


def is_clock(criterion: StoppingCriteria) -> bool:
    """Returns whether a criterion ends all sentences at once: `max_time`, or one that says `reads_tokens = False`."""
    return getattr(criterion, "reads_tokens", True) is False or is_of_transformers(criterion, {"MaxTimeCriteria"})


def is_of_transformers(each: Any, names: set[str]) -> bool:
    """Returns whether an object is of a class of transformers with one of these names."""
    return type(each).__name__ in names and type(each).__module__.split(".")[0] == "transformers"


# ---- Parts of all searches ---------------------------------------------------------------------------------------


def best_tokens(scores: torch.Tensor, offsets: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
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
    in_groups = groups * GROUP_SIZE
    maxima = scores[:, :, :in_groups].unflatten(2, (GROUP_SIZE, groups)).amax(dim=2) + offsets[:, :, None]
    best_groups = maxima.flatten(1).topk(k, sorted=False).indices  # [sentences, k]
    first = best_groups // groups * vocab_size + best_groups % groups
    places = (first[:, :, None] + torch.arange(0, in_groups, groups, device=scores.device)).flatten(1)
    if in_groups < vocab_size:
        # The last tokens of the vocabulary, which are in no group.
        rows = torch.arange(0, hypotheses * vocab_size, vocab_size, device=scores.device)
        rest = torch.arange(in_groups, vocab_size, device=scores.device) + rows[:, None]
        places = torch.cat((places, rest.flatten().expand(sentences, -1)), dim=1)
    candidates = scores.flatten(1).gather(1, places) + offsets.gather(1, places // vocab_size)
    best, chosen = candidates.topk(k)
    places = places.gather(1, chosen)
    return best, places // vocab_size, places % vocab_size


def split(unfinished: torch.Tensor, remaining: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices of the unfinished sentences and of the others, in order, without reading from a device."""
    order = unfinished.to(torch.uint8).argsort(descending=True, stable=True)
    return order[:remaining], order[remaining:]


def as_output(inputs: FastSearchInputs, generation_config: GenerationConfig, **found: torch.Tensor) -> Any:
    """Returns sequences; with `return_dict_in_generate` transformers' output for the kind of search and of model."""
    if not generation_config.return_dict_in_generate:
        return found["sequences"]
    kinds = get_args(GenerateNonBeamOutput if generation_config.num_beams == 1 else GenerateBeamOutput)
    return kinds[inputs.config.is_encoder_decoder](**found)  # of one stack, and of both


# ---- Beam search -------------------------------------------------------------------------------------------------


@dataclass
class Alive:
    """State of the sentences that a beam search has not finished, the first dimension of each tensor."""

    numbers: torch.Tensor  # indices in the batch, [sentences]
    can_improve: torch.Tensor  # see [`BeamSearchRules.may_improve`], [sentences, 1]
    running_scores: torch.Tensor  # log-probabilities of the running hypotheses, [sentences, beams]
    running_sequences: torch.Tensor  # their tokens, updated only for logits processors, [sentences, beams, length]
    scores: torch.Tensor  # of the best finished hypotheses, with the length penalty, [sentences, beams]
    is_finished: torch.Tensor  # which of these exist, [sentences, beams]
    end_positions: torch.Tensor  # where: step * candidates of a step + candidate, or -1, [sentences, beams]

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

    def advance(
        self, rules: BeamSearchRules, log_probs: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, length: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Takes the candidates of a step, of shape `(sentences, candidates)`: those that end may finish, and the best of
        the others run on. Returns the indices of these, of shape `(sentences, beams)`, and which sentences go on.
        """
        candidates = tokens.shape[1]
        self.running_scores, chosen = log_probs.where(~ends, MISSING).topk(self.scores.shape[1])
        self.scores, self.is_finished, kept = rules.finish(
            self.can_improve, self.scores, self.is_finished, log_probs, tokens, ends, length
        )
        these = (torch.arange(candidates, device=tokens.device) + (length - 1) * candidates).expand_as(tokens)
        self.end_positions = torch.cat((self.end_positions, these), dim=1).gather(1, kept)
        self.can_improve = rules.may_improve(
            self.can_improve, self.running_scores, self.scores, self.is_finished, length
        )
        unfinished = self.can_improve[:, 0] & ~ends.all(dim=1)
        if rules.settings.early_stopping is True:
            unfinished &= ~self.is_finished.all(dim=1)
        return chosen, unfinished


@dataclass
class Step:
    """Candidates of one step of a beam search, for the sentences that were not finished."""

    rows: torch.Tensor  # of each sentence of the batch, its row in the other tensors, [batch]
    tokens: torch.Tensor  # last tokens of the candidates, [sentences, candidates]
    parents: torch.Tensor  # hypotheses that the candidates extend, [sentences, candidates]
    chosen: torch.Tensor  # candidates that became running hypotheses, [sentences, beams]


def beam_search(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    inputs: FastSearchInputs,
    rules: BeamSearchRules,
    observe: Callable[[Step, torch.Tensor, torch.Tensor, Alive], None] | None = None,
) -> Any:
    """
    Searches for the best translations (Section 6.1), as `GenerationMixin._beam_search` does with the same rules, after
    a prompt of shape `(batch * beams, prompt)`. `observe` is called with each step, its candidates' log-probabilities
    and which of them end, and the sentences after the step. Returns sequences of shape `(batch * num_return_sequences,
    length)`, scores and indices, see [`as_output`].
    """
    decoder, prompt = inputs.decoder, input_ids.view(-1, generation_config.num_beams, input_ids.shape[1])
    alive, history, done = Alive.at_the_start(prompt), list[Step](), list[Alive]()
    rows = alive.numbers
    while True:
        log_probs = decoder.log_probs()
        beams = len(log_probs) // len(alive.numbers)  # 1 as long as all hypotheses of a sentence are the same
        if inputs.logits_processor:
            log_probs = inputs.process(alive.running_sequences[:, :beams].flatten(0, 1), log_probs)
        log_probs = log_probs.reshape(len(alive.numbers), beams, -1)  # [sentences, beams, entries]
        # From here on [sentences, candidates].
        log_probs, parents, places = best_tokens(log_probs, alive.running_scores[:, :beams], inputs.num_candidates)
        tokens, length = inputs.tokens(places), len(history) + 1
        ends = rules.ends(tokens, length)
        if inputs.is_over():
            ends = torch.ones_like(ends)
        chosen, unfinished = alive.advance(rules, log_probs, tokens, ends, length)
        history.append(Step(rows, tokens, parents, chosen))
        if observe is not None:
            observe(history[-1], log_probs, ends, alive)
        remaining = int(unfinished.sum())
        if remaining == 0:
            break
        parents, tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        decoder.reorder(parents)
        if inputs.logits_processor:
            sequences = torch.take_along_dim(alive.running_sequences, parents[:, :, None], dim=1)
            alive.running_sequences = torch.cat((sequences, tokens[:, :, None]), dim=2)
        if inputs.is_row_by_row and remaining <= (1 - MIN_FINISHED_FRACTION) * len(unfinished):
            kept, left = split(unfinished, remaining)
            done.append(alive.keep(left))
            alive, rules, tokens = alive.keep(kept), rules.keep(kept), tokens[kept]
            rows = torch.zeros_like(rows).index_copy(0, alive.numbers, torch.arange(remaining, device=rows.device))
            decoder.keep(kept)
        decoder.read(tokens)
    return as_output(inputs, generation_config, **read_back([*done, alive], history, prompt, generation_config))


def read_back(
    parts: Sequence[Alive], history: Sequence[Step], prompt: torch.Tensor, generation_config: GenerationConfig
) -> dict[str, torch.Tensor]:
    """
    Follows the hypotheses to return from their last tokens to their first, by the final states of all sentences.
    Returns sequences, their scores, and the rows of `batch * beams` that each token extended, padded with -1.
    """
    returned, num_beams = generation_config.num_return_sequences, prompt.shape[1]
    order = torch.cat([part.numbers for part in parts]).argsort()
    end_positions, scores, is_finished = (
        torch.cat([getattr(part, name) for part in parts])[order, :returned].flatten()
        for name in ("end_positions", "scores", "is_finished")
    )
    ends, pad = special_ids(generation_config)
    # As in transformers: the pad id of greedy search and sampling, but `</s>` where that is 0 or missing.
    fill = (pad or ends[0]) if ends else -1
    candidates = history[0].tokens.shape[1]
    last, candidate = end_positions.where(is_finished, -1) // candidates, end_positions % candidates
    sentences = torch.arange(len(last), device=last.device) // returned
    parents, tokens, indices = torch.zeros_like(last), list[torch.Tensor](), list[torch.Tensor]()
    for number in range(int(last.max()), -1, -1):
        step = history[number]
        rows = step.rows[sentences]
        candidate = torch.where(last > number, step.chosen[rows, parents], candidate)
        parents = step.parents[rows, candidate]
        tokens.append(step.tokens[rows, candidate].where(last >= number, fill)[:, None])
        indices.append((parents + sentences * num_beams).where(last >= number, -1).int()[:, None])
    sequences = torch.cat((prompt[:, :returned].flatten(0, 1), *tokens[::-1]), dim=1)
    beam_indices = torch.cat((last.new_empty(len(last), 0).int(), *indices[::-1]), dim=1)
    return {"sequences": sequences, "sequences_scores": scores, "beam_indices": beam_indices}


# ---- Greedy search and sampling ----------------------------------------------------------------------------------


def single_search(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    inputs: FastSearchInputs,
    streamer: Any = None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> Any:
    """
    Takes the best token at each step, or draws one with `do_sample`, as `GenerationMixin._sample` does, after a prompt
    of shape `(batch, prompt)`. The streamer receives the tokens of each step; `observe` is called with its logits,
    `(sentences, entries)`, and tokens, `(sentences,)`. Returns sequences `(batch, length)`, see [`as_output`].
    """
    device, (batch, length) = input_ids.device, input_ids.shape
    decoder, do_sample = inputs.decoder, generation_config.do_sample
    # Tokens are drawn for all rows: with fewer of them, other random numbers would be drawn than by transformers.
    may_leave = inputs.is_row_by_row and not do_sample
    ends, pad = special_ids(generation_config)
    fill, eos = pad or 0, input_ids.new_tensor(ends, dtype=torch.long)
    # Rows of `sequences` that are in the decoder, and their limits: several rows of a sentence if they are drawn.
    numbers, max_lengths = torch.arange(batch, device=device), search_call().max_lengths.to(device)
    max_lengths = max_lengths.repeat_interleave(batch // len(max_lengths))
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    sequences, no_offsets = input_ids, torch.zeros(batch, 1, device=device)
    while True:
        if length == sequences.shape[1]:
            sequences = torch.nn.functional.pad(sequences, (0, max(TOKENS_AT_A_TIME, length)), value=fill)
        logits = decoder.logits()
        if inputs.logits_processor:
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
        if may_leave and remaining <= (1 - MIN_FINISHED_FRACTION) * len(unfinished):
            decoder.keep(kept := split(unfinished, remaining)[0])
            numbers, max_lengths, tokens = numbers[kept], max_lengths[kept], tokens[kept]
            unfinished = unfinished[kept]
        decoder.read(tokens[:, None])
    if streamer is not None:
        streamer.end()
    return as_output(inputs, generation_config, sequences=sequences[:, :length])
