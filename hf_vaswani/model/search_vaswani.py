"""Greedy and beam search of `generate()` on [`IncrementalDecoder`].

They decide what transformers' searches decide; those that need more of it than the tokens are left to transformers
(see `generation_vaswani.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    logits_process,
)

from .decoding_vaswani import Predictor

# Tokens that an output has room for at first; then it doubles.
FIRST_LENGTH = 16
# Tokens of which the best one stands for all when the best ones are looked for.
GROUP_SIZE = 16
# Scores that are worth it.
WORTH_GROUPING = 2**15
# The part of the sentences that must be done before they are taken out, which moves the others.
WORTH_TAKING_OUT = 1 / 8
# What these do to a row has to do with that row alone: rows that are done may be missing.
ROW_BY_ROW = {
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
}


def best_tokens(
    scores: torch.Tensor, offsets: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The best tokens of all hypotheses of a sentence together. `torch.topk` of all of them would take as long on a CPU
    as making them does: the tokens are compared in groups, and then those in the `k` best groups with each other.

    Args:
        scores (`torch.Tensor` of shape `(sentences, hypotheses, vocab_size)`): of tokens.
        offsets (`torch.Tensor` of shape `(sentences, hypotheses)`): what is added to all scores of a hypothesis.
        k (`int`): how many; at most hypotheses x vocabulary.

    Returns:
        Their scores, their hypotheses and their ids, each of shape `(sentences, k)`, the best first.
    """
    sentences, hypotheses, vocab_size = scores.shape
    # A processor of the caller's may return a part of something larger.
    scores = scores.contiguous()
    groups = vocab_size // GROUP_SIZE
    if scores.numel() < WORTH_GROUPING and k == hypotheses == 1:
        # Faster than topk where there is but one.
        best, places = scores[:, 0].max(dim=1, keepdim=True)
        return best + offsets, torch.zeros_like(places), places
    if scores.device.type != "cpu" or scores.numel() < WORTH_GROUPING or groups * hypotheses < 2 * k:
        best, places = (scores + offsets[:, :, None]).flatten(1).topk(k)
        return best, places // vocab_size, places % vocab_size
    # Group g has the tokens g, g + groups, g + 2 groups, ...: to compare them is to compare rows of this view.
    row = hypotheses * vocab_size
    grouped = scores.as_strided((sentences, hypotheses, GROUP_SIZE, groups), (row, vocab_size, groups, 1))
    of_groups = grouped.amax(dim=2) + offsets[:, :, None]  # [sentences, hypotheses, groups]
    best_groups = of_groups.flatten(1).topk(k, sorted=False).indices  # [sentences, k]
    first = best_groups // groups * vocab_size + best_groups % groups
    in_a_group = torch.arange(0, groups * GROUP_SIZE, groups, device=scores.device)
    places = (first[:, :, None] + in_a_group).flatten(1)
    if groups * GROUP_SIZE < vocab_size:
        # Those that are in no group.
        rows = torch.arange(0, row, vocab_size, device=scores.device)
        rest = torch.arange(groups * GROUP_SIZE, vocab_size, device=scores.device) + rows[:, None]
        places = torch.cat((places, rest.flatten().expand(sentences, -1)), dim=1)
    candidates = scores.view(sentences, row).gather(1, places) + offsets.gather(1, places // vocab_size)
    best, chosen = candidates.topk(k)
    places = places.gather(1, chosen)
    return best, places // vocab_size, places % vocab_size


@dataclass
class Alive:
    """What a beam search knows of the sentences that are not done. The first dimension of everything is theirs."""

    numbers: torch.Tensor  # which of the batch they are, [sentences]
    longest: torch.Tensor  # tokens that they may get at most, [sentences, 1]
    is_open: torch.Tensor  # whether they may still get better, [sentences, 1]
    running_scores: torch.Tensor  # log-probabilities, [sentences, beams]
    running_sequences: torch.Tensor  # kept up for processors alone, [sentences, beams, length]
    scores: torch.Tensor  # of the best finished hypotheses, with the length penalty, [sentences, beams]
    is_finished: torch.Tensor  # whether there is such a one, [sentences, beams]
    where: torch.Tensor  # see [`read_back`], [sentences, beams]

    @classmethod
    def at_the_start(cls, prompt: torch.Tensor, longest: torch.Tensor) -> "Alive":
        """All sentences, of which one hypothesis is alive: the prompt, of shape `(sentences, beams, prompt)`."""
        sentences, num_beams = prompt.shape[:2]
        numbers = torch.arange(sentences, device=prompt.device)
        nothing = torch.full((sentences, num_beams), -1e9, device=prompt.device)
        return cls(
            numbers=numbers,
            longest=longest,
            is_open=torch.ones_like(longest, dtype=torch.bool),
            running_scores=nothing.index_fill(1, numbers[:1], 0.0),
            running_sequences=prompt,
            scores=nothing,
            is_finished=torch.zeros_like(nothing, dtype=torch.bool),
            where=torch.full_like(nothing, -1, dtype=torch.long),
        )

    def of(self, chosen: torch.Tensor) -> "Alive":
        """Those of some sentences, by a mask of shape `(sentences,)`."""
        return Alive(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass
class Step:
    """What a step of a beam search chose for the sentences that were not done."""

    rows: torch.Tensor  # of each sentence of the batch, its place in the others, [batch]
    tokens: torch.Tensor  # of the candidates, [sentences, candidates]
    parents: torch.Tensor  # the hypotheses that they go on from, [sentences, candidates]
    chosen: torch.Tensor  # the candidates that became the step's hypotheses, [sentences, beams]


def read_back(
    history: list[Step], where: torch.Tensor, returned: int, num_beams: int, fill: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Hypotheses from their last tokens to their first.

    Args:
        history (`list[Step]`): all steps.
        where (`torch.LongTensor` of shape `(batch * returned,)`): steps before the one in which a hypothesis ended,
            times candidates, plus the candidate that it was; -1 where there is none.
        returned (`int`): hypotheses of a sentence.
        num_beams (`int`): hypotheses of a sentence in a step.
        fill (`int`): the token behind a hypothesis.

    Returns:
        Their tokens, and the rows of `batch * num_beams` that these were chosen in, -1 behind; both of shape
        `(batch * returned, length of the longest)`.
    """
    candidates = history[0].tokens.shape[1]
    last, candidate = where // candidates, where % candidates
    sentences = torch.arange(len(where), device=where.device) // returned
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
        return where.new_empty(len(where), 0), where.new_empty(len(where), 0).int()
    return torch.stack(tokens[::-1], dim=1), torch.stack(indices[::-1], dim=1)


def beam_search(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    encoder_states: Sequence[torch.Tensor],
    source_mask: torch.Tensor | None,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """
    `GenerationMixin._beam_search`, by the rules that are in [`BeamSearchRules`] and `_check_early_stop_heuristic`.

    Args:
        models (`Sequence` of [`VaswaniForConditionalGeneration`]): one that translates, or several together.
        input_ids (`torch.LongTensor` of shape `(batch * beams, prompt)`): the decoder's prompt.
        logits_processor ([`LogitsProcessorList`]): takes log-probabilities.
        generation_config ([`GenerationConfig`]): of this call, with [`BeamSearchRules`] as `length_penalty`.
        encoder_states (`Sequence` of `torch.Tensor` of shape `(batch, source, d_model)`): from each encoder.
        source_mask (`torch.Tensor` of shape `(batch, source)`, *optional*): 1 for tokens, 0 for padding.

    Returns:
        `torch.LongTensor` of shape `(batch * num_return_sequences, length)`, or with `return_dict_in_generate`
        [`GenerateBeamEncoderDecoderOutput`] with these `sequences`, `sequences_scores` and `beam_indices`.
    """
    num_beams, early_stopping = generation_config.num_beams, generation_config.early_stopping
    rules = generation_config.length_penalty
    device, batch, prompt_length = input_ids.device, len(encoder_states[0]), input_ids.shape[1]
    num_candidates = max(2, 1 + len(rules.eos_token_ids)) * num_beams
    row_by_row = all(type(processor) in ROW_BY_ROW for processor in logits_processor)
    predictor = Predictor(models, encoder_states, source_mask, num_beams)
    prompt = input_ids.view(batch, num_beams, prompt_length)
    for column in range(prompt_length):
        predictor.read(prompt[:, :1, column])
    # Of a prompt there is one hypothesis: too little where it does not have enough tokens, or a processor counts rows.
    if not row_by_row or models[0].config.vocab_size < num_candidates:
        predictor.repeat(num_beams)
    alive = Alive.at_the_start(prompt, rules.longest)
    rows, history, done = alive.numbers, list[Step](), list[Alive]()
    while True:
        candidate_scores, parents, tokens = candidates_of(
            alive, predictor.log_probs(), logits_processor, num_candidates
        )
        length = len(history) + 1
        ends = torch.isin(tokens, rules.eos_token_ids) | (length >= alive.longest)
        alive.running_scores, chosen = candidate_scores.where(~ends, -1e9).topk(num_beams)
        alive.scores, alive.is_finished, kept = rules.finish(
            alive.is_open, alive.scores, alive.is_finished, candidate_scores, tokens, ends, length, early_stopping
        )
        these = torch.arange(len(history) * num_candidates, length * num_candidates, device=device)
        alive.where = torch.cat((alive.where, these.expand(len(tokens), -1)), dim=1).gather(1, kept)
        history.append(Step(rows, tokens, parents, chosen))
        alive.is_open = models[0]._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=alive.is_open,
            running_beam_scores=alive.running_scores,
            beam_scores=alive.scores,
            is_sent_finished=alive.is_finished,
            cur_len=prompt_length + length,
            max_length=generation_config.max_length,
            decoder_prompt_len=prompt_length,
            early_stopping=early_stopping,
            length_penalty=rules,
        )
        goes_on = alive.is_open[:, 0] & ~ends.all(dim=1)
        if early_stopping is True:
            goes_on &= ~alive.is_finished.all(dim=1)
        remaining = int(goes_on.sum())
        if remaining == 0:
            break
        parents, tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        predictor.reorder(parents)
        if logits_processor:
            sequences = models[0]._gather_beams(alive.running_sequences, parents)
            alive.running_sequences = torch.cat((sequences, tokens[:, :, None]), dim=2)
        if row_by_row and remaining <= (1 - WORTH_TAKING_OUT) * len(goes_on):
            done.append(alive.of(~goes_on))
            alive, tokens = alive.of(goes_on), tokens[goes_on]
            rows = rows.new_zeros(batch).index_copy(0, alive.numbers, torch.arange(remaining, device=device))
            rules = replace(rules, longest=alive.longest, shortest_limit=int(alive.longest.min()))
            predictor.keep(goes_on.nonzero()[:, 0])
        predictor.read(tokens)

    done.append(alive)
    return found_by(done, history, prompt, generation_config)


def found_by(
    done: list[Alive], history: list[Step], prompt: torch.Tensor, generation_config: GenerationConfig
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """What a beam search returns of sentences that were done one after the other."""
    returned, num_beams = generation_config.num_return_sequences, prompt.shape[1]
    order = torch.cat([part.numbers for part in done]).argsort()
    where, scores, is_finished = (
        torch.cat([getattr(part, name) for part in done])[order, :returned].flatten()
        for name in ("where", "scores", "is_finished")
    )
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    fill = -1 if eos is None else int(pad or eos[0])
    sequences, indices = read_back(history, where.where(is_finished, -1), returned, num_beams, fill)
    sequences = torch.cat((prompt[:, :returned].flatten(0, 1), sequences), dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores, beam_indices=indices)


def candidates_of(
    alive: Alive, log_probs: torch.Tensor, logits_processor: LogitsProcessorList, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The best hypotheses with one more token.

    Args:
        alive ([`Alive`]): the sentences.
        log_probs (`torch.Tensor` of shape `(sentences * beams, vocab_size)`): of the next token; or of the first beam
            of each sentence alone.
        logits_processor ([`LogitsProcessorList`]): changes them.
        k (`int`): how many.

    Returns:
        Their log-probabilities, the beams that they go on from, and their last tokens, each of shape `(sentences, k)`.
    """
    sentences = len(alive.numbers)
    beams = len(log_probs) // sentences
    if logits_processor:
        log_probs = logits_processor(alive.running_sequences[:, :beams].flatten(0, 1), log_probs)
    return best_tokens(log_probs.reshape(sentences, beams, -1), alive.running_scores[:, :beams], k)


def greedy_search(
    models: Sequence[Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    encoder_states: Sequence[torch.Tensor],
    source_mask: torch.Tensor | None,
    streamer: Any = None,
) -> torch.Tensor | GenerateEncoderDecoderOutput:
    """
    `GenerationMixin._sample` where nothing is drawn: the best token at each step.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, prompt)`): the decoder's prompt.
        streamer ([`BaseStreamer`], *optional*): gets each step's tokens.
        models, logits_processor, generation_config, encoder_states, source_mask: as in [`beam_search`]; processors
            take logits here.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`, or with `return_dict_in_generate`
        [`GenerateEncoderDecoderOutput`] with these `sequences`.
    """
    device, (batch, length) = input_ids.device, input_ids.shape
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    fill = 0 if pad is None else int(pad)
    eos = input_ids.new_empty(0) if eos is None else eos.to(device)
    predictor = Predictor(models, encoder_states, source_mask, num_beams=1)
    for column in range(length):
        predictor.read(input_ids[:, column, None])
    sequences, numbers = input_ids, torch.arange(batch, device=device)
    nothing = torch.zeros(batch, 1, device=device)
    max_lengths = generation_config._max_lengths.to(device)  # of the sentences in the decoder
    goes_on = torch.ones(batch, dtype=torch.bool, device=device)
    row_by_row = all(type(processor) in ROW_BY_ROW for processor in logits_processor)
    while True:
        if length == sequences.shape[1]:
            sequences = nn.functional.pad(sequences, (0, max(FIRST_LENGTH, length)), value=fill)
        logits = predictor.logits()
        if logits_processor:
            logits = logits_processor(sequences[numbers, :length], logits)
        _, _, tokens = best_tokens(logits[:, None], nothing[: len(logits)], k=1)
        tokens = tokens[:, 0].where(goes_on, fill)
        sequences[numbers, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(sequences[:, length - 1].cpu())
        goes_on &= ~torch.isin(tokens, eos) & (length < max_lengths)
        remaining = int(goes_on.sum())
        if remaining == 0:
            break
        if row_by_row and remaining <= (1 - WORTH_TAKING_OUT) * len(goes_on):
            predictor.keep(goes_on.nonzero()[:, 0])
            numbers, max_lengths, tokens = numbers[goes_on], max_lengths[goes_on], tokens[goes_on]
            goes_on = goes_on[goes_on]
        predictor.read(tokens[:, None])
    if streamer is not None:
        streamer.end()
    sequences = sequences[:, :length]
    return (
        GenerateEncoderDecoderOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences
    )
