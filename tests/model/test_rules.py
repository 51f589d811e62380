"""The rules of beam search by hand; `test_generation.py` has whole searches by them."""

import math

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from hf_vaswani.model.rules_vaswani import (
    MISSING,
    SEARCH_SETTINGS,
    BeamSearchRules,
    SearchSetting,
    SourceLengthCriteria,
    length_penalty,
)

EOS = 2


def rules_of(max_lengths=((5,),), eos_token_ids=(EOS,), alpha=0.0, **settings) -> BeamSearchRules:
    """Without a length penalty, for one sentence of at most 5 tokens."""
    usual = {"length_penalty_type": "power", "finish_candidates": "all", "early_stopping": "never"}
    usual |= {"num_beams": 2, "num_return_sequences": 1, "length_penalty": alpha}
    limits = torch.tensor(max_lengths)
    return BeamSearchRules(
        GenerationConfig(**usual | settings), torch.tensor(eos_token_ids), limits, int(limits.min())
    )


def test_length_penalty_by_hand() -> None:
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 1.0) == 2
    assert length_penalty(13, 0.6) == pytest.approx(1.9331820)
    assert length_penalty(13, 0.0) == length_penalty(13, 0.0, "power") == 1
    assert length_penalty(4, 0.5, "power") == 2
    assert length_penalty(torch.tensor([1, 7, 13]), 2.0).tolist() == [1, 4, 9]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        (SearchSetting(3, at_least=1), None, None),
        (SearchSetting(3, at_least=1), 0, "None or a whole number of at least 1"),
        (SearchSetting(3, off=1, at_least=1), None, "a whole number of at least 1"),
        (SearchSetting(at_least=1), None, None),
        (SEARCH_SETTINGS["length_penalty"], True, "a number from -10 to 10"),
        (SEARCH_SETTINGS["length_penalty"], 10.5, "a number from -10 to 10"),
        (SEARCH_SETTINGS["finish_candidates"], None, '"all" or "top"'),
        (SearchSetting(), math.inf, "a finite number"),
    ],
    ids=str,
)
def test_values_of_a_setting(setting, value, expected) -> None:
    assert setting.expected(value) == expected


def test_each_sentence_stops_at_its_own_length() -> None:
    criteria = SourceLengthCriteria(torch.tensor([4, 3]))
    found = [criteria(torch.zeros(4, length, dtype=torch.long), None).tolist() for length in (2, 3, 4)]
    assert found == [[False] * 4, [False, False, True, True], [True] * 4]


def test_a_candidate_ends_at_an_end_token_or_at_its_sentences_limit() -> None:
    rules = rules_of(max_lengths=[[2], [3]], eos_token_ids=[2, 7])
    tokens = torch.tensor([[5, 2], [7, 6]])
    assert rules.ends(tokens, 1).tolist() == [[False, True], [True, False]]
    assert rules.ends(tokens, 2).tolist() == [[True, True], [True, False]]
    assert rules.keep(torch.tensor([1])).ends(tokens[1:], 2).tolist() == [[True, False]]
    assert rules.keep(torch.tensor([1])).shortest_limit == 3


@pytest.mark.parametrize("stop", [False, True, "never"])
@pytest.mark.parametrize("alpha", [0.0, 0.8, -0.5])
def test_transformers_decides_the_same_by_its_own_rules(stop, alpha) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = []
    for length in range(1, 5):
        running = torch.randn(40, 2, generator=generator).sub(2).sort(dim=1, descending=True).values
        is_finished = torch.randint(2, (40, 2), generator=generator).bool().sort(dim=1, descending=True).values
        scores = torch.randn(40, 2, generator=generator).sub(2).where(is_finished, MISSING)
        can_improve = torch.randint(2, (40, 1), generator=generator).bool()
        settings = {"alpha": alpha, "early_stopping": stop, "num_return_sequences": 2}
        rules = rules_of(**settings, max_lengths=[[5]] * 40)
        draws.append(rules.may_improve(can_improve, running, scores, is_finished, length))
        expected = GenerationMixin._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=can_improve,
            running_beam_scores=running,
            beam_scores=scores,
            is_sent_finished=is_finished,
            cur_len=length + 3,
            max_length=8,
            decoder_prompt_len=3,
            early_stopping=stop,
            length_penalty=alpha,
        )
        assert torch.equal(draws[-1], expected)
    assert 0 < torch.cat(draws).float().mean() < 1
