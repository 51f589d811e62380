"""A search step by step, as it was run: candidates, running and finished hypotheses, and why it stopped."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..model.rules_vaswani import MISSING, SEARCH_SETTINGS, BeamSearchRules, search_call, special_ids
from ..model.search_vaswani import Alive, Step, beam_search, fast_search_inputs, find_obstacle, single_search
from ..model.sentences_vaswani import evaluation_mode

# Candidates of a step of greedy search or sampling that are recorded, beside the token that was taken.
SINGLE_CANDIDATES = 5
MODES = ("greedy_search", "sample", "beam_search")


@dataclass(frozen=True)
class Candidate:
    """
    A continuation of a running hypothesis by one token.

    Attributes:
        parent (`int`): the hypothesis, by its rank among those that were running.
        token (`int`): the token.
        log_prob (`float`): log-probability of the token, given the hypothesis.
        total (`float`): log-probability of the hypothesis with it.
        ends (`bool`): the hypothesis ends with it: it is `</s>`, or the maximum length is reached.
        rank (`int`, *optional*): its rank among the hypotheses that are running after the step.
        finished (`bool`): it became a finished hypothesis, and was one after this step.
    """

    parent: int
    token: int
    log_prob: float
    total: float
    ends: bool
    rank: int | None = None
    finished: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """
    A finished hypothesis.

    Attributes:
        ids (`list[int]`): its tokens, without the decoder's prompt.
        total (`float`): its log-probability.
        penalty (`float`): the length penalty, by which it is divided.
        score (`float`): the quotient.
        is_cut (`bool`): it reached the maximum length without `</s>`.
        step (`int`), candidate (`int`): where it ended.
    """

    ids: list[int]
    total: float
    penalty: float
    score: float
    is_cut: bool
    step: int
    candidate: int


@dataclass(frozen=True)
class SearchStep:
    """
    One step of a search.

    Attributes:
        candidates (`list[Candidate]`): the best continuations of all running hypotheses, in descending order.
        finished (`list[tuple[int, int]]`): the finished hypotheses after the step, best first: step and candidate.
        upper_bound (`float`, *optional*): the best score that a running hypothesis can still reach with its present
            log-probability; `None` if none is running.
        threshold (`float`, *optional*): the score that it must exceed for the search to go on; `None` as long as too
            few hypotheses have finished.
    """

    candidates: list[Candidate]
    finished: list[tuple[int, int]] = field(default_factory=list)
    upper_bound: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class SearchRecord:
    """
    A search.

    Attributes:
        settings (`dict`): `num_beams`; of beam search also the rows of `SEARCH_SETTINGS` that it alone reads, and of
            other searches `do_sample`.
        max_length (`int`): the maximum number of tokens.
        steps (`list[SearchStep]`): the steps.
        hypotheses (`list[Hypothesis]`): the finished hypotheses, best first. The first are those that `generate()`
            returns. Greedy search and sampling have one, whose penalty is 1.
        stop (`str`): why it stopped, as a sentence.
    """

    settings: dict[str, Any]
    max_length: int
    steps: list[SearchStep]
    hypotheses: list[Hypothesis]
    stop: str

    def path(self, step: int, candidate: int) -> list[Candidate]:
        """Returns the candidates that make up a hypothesis, from its first token to this candidate of this step."""
        found = [self.steps[step].candidates[candidate]]
        for earlier in reversed(self.steps[:step]):
            found.append(next(each for each in earlier.candidates if each.rank == found[-1].parent))
        return found[::-1]

    def ids(self, step: int, candidate: int) -> list[int]:
        """Returns the tokens of a candidate's hypothesis, it included."""
        return [each.token for each in self.path(step, candidate)]


def record_search(model: Any, input_ids: torch.Tensor, **settings: Any) -> SearchRecord:
    """
    Runs the search of `generate()` for one text, and records it.

    Args:
        model ([`PreTrainedModel`]): a Vaswani model that generates text, used in evaluation mode.
        input_ids (`torch.LongTensor` of shape `(1, source)`): the source, or the prompt of a decoder on its own.
        **settings: settings of `generate()`, by default those of the model.

    Raises:
        ValueError: there are several texts; only transformers' own searches can do what the settings ask for; or the
            model computes NaN.
    """
    if len(input_ids) != 1:
        raise ValueError(f"A search is recorded for one text, but input_ids has {len(input_ids)} rows.")
    for name in ("assistant_model", "ensemble", "shortlist"):
        if settings.get(name) is not None:
            raise ValueError(f"A search with {name} cannot be recorded.")
    if settings.get("num_beams") == 1 and (settings.get("num_return_sequences") or 1) > 1:
        raise ValueError("One beam has one answer to record: leave num_return_sequences out.")
    recorder: list[_BeamRecorder | _SingleRecorder] = []

    def search(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        arguments = (input_ids, generation_config, logits_processor, stopping_criteria)
        obstacle = find_obstacle((model,), input_ids, generation_config, stopping_criteria, False, model_kwargs)
        mode = generation_config.get_generation_mode().value
        if mode not in MODES:
            obstacle = f"the settings ask for {mode.replace('_', ' ')}"
        inputs = None if obstacle else fast_search_inputs(model, *arguments, **model_kwargs)
        if inputs is None:
            raise ValueError(f"Greedy search, sampling and beam search can be recorded, but {obstacle}.")
        if generation_config.num_beams > 1:
            rules = BeamSearchRules.from_config(generation_config, input_ids)
            beams = _BeamRecorder(generation_config, rules)
            recorder.append(beams)
            return beam_search(input_ids, generation_config, inputs, rules, beams.observe)
        single = _SingleRecorder(generation_config, input_ids.shape[1])
        recorder.append(single)
        return single_search(input_ids, generation_config, inputs, observe=single.observe)

    with evaluation_mode(model):
        model.generate(input_ids, attention_mask=torch.ones_like(input_ids), custom_generate=search, **settings)
    return recorder[0].record()


def _settings(generation_config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(generation_config, name) for name in names}


class _BeamRecorder:
    """Collects the steps of a beam search for one sentence."""

    def __init__(self, generation_config: Any, rules: BeamSearchRules) -> None:
        self.rules, self.num_beams = rules, generation_config.num_beams
        read = [name for name, setting in SEARCH_SETTINGS.items() if setting.beams_only]
        self.settings = _settings(generation_config, "num_beams", *read)
        self.steps: list[SearchStep] = []
        self.running = [0.0]
        self.all_end = self.enough = False

    def observe(self, step: Step, log_probs: torch.Tensor, ends: torch.Tensor, alive: Alive) -> None:
        """Records a step, as [`beam_search`] hands it over."""
        _check(log_probs)
        length = len(self.steps) + 1
        upper_bound, threshold = self.rules.bounds(alive.running_scores, alive.scores, alive.is_finished, length)
        count = step.tokens.shape[1]
        positions = alive.end_positions[0][alive.is_finished[0]].tolist()
        finished = [(position // count, position % count) for position in positions]
        ranks = {candidate: rank for rank, candidate in enumerate(step.chosen[0].tolist())}
        candidates = []
        each = zip(
            step.parents[0].tolist(), step.tokens[0].tolist(), log_probs[0].tolist(), ends[0].tolist(), strict=True
        )
        for i, (parent, token, total, is_end) in enumerate(each):
            # With few entries, there are fewer continuations than places.
            if total <= MISSING / 10:
                continue
            is_finished = (length - 1, i) in finished
            before = self.running[parent]
            candidates.append(
                Candidate(parent, token, total - before, total, is_end, None if is_end else ranks.get(i), is_finished)
            )
        self.running = alive.running_scores[0].tolist()
        self.all_end = all(each.ends for each in candidates)
        self.enough = bool(alive.is_finished.all())
        # Both are missing where no hypothesis is running, or too few have finished.
        is_running, is_reached = self.running[0] > MISSING / 10, float(threshold) > MISSING / 10
        found = float(upper_bound) if is_running else None, float(threshold) if is_reached else None
        self.steps.append(SearchStep(candidates, finished, *found))

    def record(self) -> SearchRecord:
        """Returns what was recorded."""
        max_length = int(self.rules.max_lengths)
        found = SearchRecord(self.settings, max_length, self.steps, [], self._stop(max_length))
        eos = set(self.rules.eos_token_ids.tolist())
        for step, candidate in self.steps[-1].finished:
            ids = found.ids(step, candidate)
            total, penalty = self.steps[step].candidates[candidate].total, float(self.rules.penalty(len(ids)))
            is_cut = ids[-1] not in eos
            found.hypotheses.append(Hypothesis(ids, total, penalty, total / penalty, is_cut, step, candidate))
        return found

    def _stop(self, max_length: int) -> str:
        """Returns why the search stopped, in the order in which [`beam_search`] asks."""
        last, length = self.steps[-1], len(self.steps)
        settings = self.rules.settings
        if settings.early_stopping is True and self.enough:
            return f"{self.num_beams} hypotheses have finished, and early_stopping is True."
        if length >= max_length:
            return f"The maximum length of {_tokens(max_length)} is reached."
        if self.all_end or last.upper_bound is None or last.threshold is None:
            return "All candidates of the step end."
        is_ahead = settings.early_stopping == "never" and settings.length_penalty > 0
        where = f"at the maximum length of {_tokens(max_length)}" if is_ahead else "at its present length"
        counted = settings.num_return_sequences if settings.early_stopping == "never" else self.num_beams
        which = "the best finished hypothesis" if counted == 1 else f"the last of the {counted} best finished ones"
        return (
            f"No running hypothesis can overtake the finished ones: with its present log-probability, the best would "
            f"have a score of {last.upper_bound:.3f} {where}, and {which} has {last.threshold:.3f}."
        )


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _check(scores: torch.Tensor) -> None:
    """Raises a `ValueError` if scores are NaN."""
    if scores.isnan().any():
        raise ValueError("The model computes NaN: its weights are damaged.")


class _SingleRecorder:
    """Collects the steps of a greedy search, or of sampling, for one text."""

    def __init__(self, generation_config: Any, prompt: int) -> None:
        self.settings = _settings(generation_config, "num_beams", "do_sample")
        self.max_length = int(search_call().max_lengths[0]) - prompt
        self.eos = set(special_ids(generation_config)[0])
        self.steps: list[SearchStep] = []
        self.total = 0.0

    def observe(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Records a step: logits of shape `(1, entries)`, and the token that was taken, of shape `(1,)`."""
        _check(logits)
        log_probs = logits[0].float().log_softmax(dim=-1)
        taken = int(tokens[0])
        best = log_probs.topk(min(SINGLE_CANDIDATES, len(log_probs))).indices.tolist()
        candidates = []
        for token in [*best, *([] if taken in best else [taken])]:
            log_prob = float(log_probs[token])
            if log_prob == -torch.inf and token != taken:
                continue
            is_end = token in self.eos or len(self.steps) + 1 >= self.max_length
            rank = 0 if token == taken and not is_end else None
            total = self.total + log_prob
            candidates.append(Candidate(0, token, log_prob, total, is_end, rank, token == taken and is_end))
        self.total += float(log_probs[taken])
        self.steps.append(SearchStep(candidates))

    def record(self) -> SearchRecord:
        """Returns what was recorded."""
        step = len(self.steps) - 1
        candidate, last = next((i, each) for i, each in enumerate(self.steps[step].candidates) if each.finished)
        is_cut = last.token not in self.eos
        stop = (
            f"The maximum length of {_tokens(self.max_length)} is reached." if is_cut else "The token </s> was taken."
        )
        found = SearchRecord(self.settings, self.max_length, self.steps, [], stop)
        found.hypotheses.append(
            Hypothesis(found.ids(step, candidate), last.total, 1.0, last.total, is_cut, step, candidate)
        )
        return found
