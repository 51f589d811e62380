"""Recorded searches, against what `generate()` returns and a search written anew."""

import pytest
import torch

from hf_vaswani import VaswaniForCausalLM
from hf_vaswani.visualization.search_record import SearchRecord, record_search

from ..networks import random_model, tiny_model

SOURCE = torch.tensor([[5, 9, 17, 30, 12, 2]])


@pytest.mark.variants(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4},
        {"num_beams": 2, "early_stopping": True},
        {"num_beams": 3, "early_stopping": False, "length_penalty": 0.0},
        {"num_beams": 3, "length_penalty_type": "power", "finish_candidates": "top"},
        {"num_beams": 3, "max_new_tokens": 3},
        {"num_beams": 3, "no_repeat_ngram_size": 1},
    ],
    ids=str,
)
def test_the_finished_hypotheses_are_those_of_generate(seed, settings) -> None:
    model = random_model(seed)
    settings = settings | {"num_return_sequences": settings["num_beams"]}
    found = record_search(model, SOURCE, **settings)
    expected = model.generate(SOURCE, return_dict_in_generate=True, **settings)
    real = expected.sequences_scores > -1e8
    assert len(found.hypotheses) == int(real.sum())
    for hypothesis, ids, score in zip(found.hypotheses, expected.sequences, expected.sequences_scores, strict=False):
        assert hypothesis.ids == ids[1 : len(hypothesis.ids) + 1].tolist()
        assert hypothesis.score == pytest.approx(float(score), abs=1e-5)
        assert hypothesis.score == pytest.approx(hypothesis.total / hypothesis.penalty)
        path = found.path(hypothesis.step, hypothesis.candidate)
        assert sum(each.log_prob for each in path) == pytest.approx(hypothesis.total, abs=1e-4)
        assert hypothesis.is_cut == (hypothesis.ids[-1] != model.config.eos_token_id)


def log_probs(model, prefix: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token, without a cache."""
    ids = torch.tensor([[model.config.decoder_start_token_id, *prefix]])
    with torch.no_grad():
        return model(input_ids=SOURCE, decoder_input_ids=ids, use_cache=False).logits[0, -1].log_softmax(dim=-1)


def kept_of(record: SearchRecord, step: int) -> list[int]:
    ranked = {each.rank: i for i, each in enumerate(record.steps[step].candidates) if each.rank is not None}
    return [ranked[rank] for rank in sorted(ranked)]


@pytest.mark.parametrize("seed", range(3))
def test_each_step_has_the_best_continuations_of_all_running_hypotheses(seed) -> None:
    model, beams = random_model(seed), 3
    found = record_search(model, SOURCE, num_beams=beams)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    for number, step in enumerate(found.steps):
        every = []
        for parent, (prefix, total) in enumerate(running):
            scores = log_probs(model, prefix)
            every += [(total + float(each), parent, token) for token, each in enumerate(scores)]
        every.sort(reverse=True)
        assert len(step.candidates) == 2 * beams
        for candidate, (total, parent, token) in zip(step.candidates, every, strict=False):
            assert (candidate.parent, candidate.token) == (parent, token)
            assert candidate.total == pytest.approx(total, abs=1e-4)
        kept = kept_of(found, number)
        # Those that do not end go on, in their order.
        alive = [i for i, each in enumerate(step.candidates) if not each.ends]
        assert kept == alive[:beams]
        running = [(found.ids(number, i), step.candidates[i].total) for i in kept]


def test_finished_hypotheses_stay_until_better_ones_come() -> None:
    found = record_search(random_model(1), SOURCE, num_beams=3)
    for number, step in enumerate(found.steps):
        scores = []
        for at, candidate in step.finished:
            each = found.steps[at].candidates[candidate]
            assert each.ends and each.finished
            scores.append(each.total / ((5 + at + 1) / 6) ** 0.6)
        assert scores == sorted(scores, reverse=True)
        new = {i for i, each in enumerate(step.candidates) if each.finished}
        assert new == {candidate for at, candidate in step.finished if at == number}
    assert [(each.step, each.candidate) for each in found.hypotheses] == found.steps[-1].finished


def stopped_by_scores(**settings) -> SearchRecord:
    """Returns the first record of several models that ended before the maximum length."""
    records = (record_search(tiny_model(seed, eos=3.0), SOURCE, num_beams=3, **settings) for seed in range(40))
    return next(record for record in records if len(record.steps) < record.max_length)


def test_it_stops_when_the_best_hope_is_not_above_the_bar() -> None:
    found = stopped_by_scores()
    last, before = found.steps[-1], found.steps[-2]
    assert last.upper_bound is not None and last.threshold is not None
    assert found.stop == (
        f"No running hypothesis can overtake the finished ones: with its present log-probability, the best would have "
        f"a score of {last.upper_bound:.3f} at the maximum length of 56 tokens, and the best finished hypothesis has "
        f"{last.threshold:.3f}."
    )
    assert last.upper_bound <= last.threshold == pytest.approx(found.hypotheses[0].score, abs=1e-5)
    assert before.threshold is None or before.upper_bound > before.threshold
    found = stopped_by_scores(early_stopping=False)
    assert "at its present length" in found.stop
    assert "the last of the 3 best finished ones has" in found.stop
    assert found.steps[-1].threshold == pytest.approx(found.hypotheses[2].score, abs=1e-5)


def test_other_reasons_to_stop() -> None:
    model = random_model(0)
    found = stopped_by_scores(early_stopping=True)
    assert found.stop == "3 hypotheses have finished, and early_stopping is True."
    assert len(found.hypotheses) == 3
    stop = record_search(model, SOURCE, num_beams=3, max_new_tokens=2).stop
    assert stop == "The maximum length of 2 tokens is reached."
    stop = record_search(model, SOURCE, num_beams=1, max_new_tokens=1).stop
    assert stop == "The maximum length of 1 token is reached."
    assert record_search(tiny_model(eos=torch.inf), SOURCE, num_beams=1).stop == "The token </s> was taken."


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "top_k": 3, "temperature": 1.5}])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_search_and_sampling(seed, settings) -> None:
    model = random_model(seed)
    torch.manual_seed(seed)
    found = record_search(model, SOURCE, num_beams=1, **settings)
    torch.manual_seed(seed)
    expected = model.generate(SOURCE, num_beams=1, **settings)[0, 1:].tolist()
    (hypothesis,) = found.hypotheses
    assert hypothesis.ids == expected
    assert (hypothesis.penalty, hypothesis.score) == (1.0, hypothesis.total)
    for number, step in enumerate(found.steps):
        taken = [each for each in step.candidates if each.rank == 0 or each.finished]
        assert [each.token for each in taken] == expected[number : number + 1]
        if not settings:
            assert taken[0] is step.candidates[0]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_decoder_on_its_own(num_beams) -> None:
    model, prompt = tiny_model(kind=VaswaniForCausalLM), torch.tensor([[5, 9, 17]])
    found = record_search(model, prompt, max_new_tokens=5, num_beams=num_beams)
    expected = model.generate(prompt, max_new_tokens=5, num_beams=num_beams)[0, 3:].tolist()
    assert found.hypotheses[0].ids == expected[: len(found.hypotheses[0].ids)]
    assert found.max_length == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2, "use_cache": False}, "can be recorded, but use_cache=False was given"),
        ({"num_beams": 2, "do_sample": True}, "but the settings ask for beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "but the settings ask for contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "but the settings ask for assisted generation"),
        ({"assistant_model": object()}, "A search with assistant_model cannot be recorded"),
        ({"num_beams": 1, "do_sample": True, "num_return_sequences": 2}, "One beam has one answer"),
        ({"input_ids": SOURCE.repeat(2, 1)}, "for one text, but input_ids has 2 rows"),
    ],
)
def test_other_searches_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        record_search(random_model(0), **({"input_ids": SOURCE} | settings))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_damaged_weights_are_named(num_beams) -> None:
    model = random_model(0)
    model.lm_head.weight[:] = torch.nan
    with pytest.raises(ValueError, match="computes NaN"):
        record_search(model, SOURCE, num_beams=num_beams)


def test_what_is_missing_has_no_number() -> None:
    found = record_search(random_model(0), SOURCE, num_beams=3, max_new_tokens=1)
    # No hypothesis runs on at the maximum length.
    assert found.steps[-1].upper_bound is None
    allowed = [5, 7, 2]
    suppressed = [token for token in range(51) if token not in allowed]
    for num_beams in (1, 4):
        found = record_search(
            random_model(0), SOURCE, num_beams=num_beams, suppress_tokens=suppressed, max_new_tokens=3
        )
        for step in found.steps:
            assert {each.token for each in step.candidates} <= set(allowed)
            assert all(each.log_prob > -1e6 for each in step.candidates)
    only_end = [token for token in range(51) if token != 2]
    found = record_search(random_model(0), SOURCE, num_beams=2, suppress_tokens=only_end)
    assert found.stop == "All candidates of the step end."
