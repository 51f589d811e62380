"""The rules of beam search by hand; `test_generation.py` has whole searches by them."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from hf_vaswani.model.rules_vaswani import MISSING, BeamSearchRules, SourceLengthCriteria, length_penalty

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


def finish(rules: BeamSearchRules, tokens: list[int], length: int = 1, **state) -> tuple[list, ...]:
    """Offers four candidates of one sentence, with log-probabilities -1, -2, -3 and -4, to two beams."""
    fresh = {"can_improve": torch.tensor([[True]]), "scores": torch.full((1, 2), MISSING)}
    fresh |= {"is_finished": torch.tensor([[False, False]])}
    last = torch.tensor([tokens])
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    found = rules.finish(
        **fresh | state, log_probs=log_probs, tokens=last, ends=rules.ends(last, length), length=length
    )
    return tuple(tensor[0].tolist() for tensor in found)


def test_the_best_finished_hypotheses_are_kept() -> None:
    tokens = [5, EOS, EOS, EOS]
    assert finish(rules_of(), tokens) == ([-2.0, -3.0], [True, True], [3, 4])
    # The first two of four candidates.
    assert finish(rules_of(finish_candidates="top"), tokens)[:2] == ([-2.0, MISSING], [True, False])
    kept = {"scores": torch.tensor([[-1.5, -2.5]]), "is_finished": torch.tensor([[True, True]])}
    assert finish(rules_of(), tokens, **kept) == ([-1.5, -2.0], [True, True], [0, 3])
    # Nothing is added to a sentence that is done.
    done = ([-1.5, -2.5], [True, True], [0, 1])
    assert finish(rules_of(early_stopping=True), tokens, **kept) == done
    assert finish(rules_of(), tokens, **kept, can_improve=torch.tensor([[False]])) == done


def test_cut_hypotheses_are_behind_finished_ones_or_compete_with_them() -> None:
    assert finish(rules_of(), [5, 6, EOS, 7], length=5) == ([-3.0, -1.0], [True, True], [4, 2])
    assert finish(rules_of(finish_candidates="top"), [5, 6, EOS, 7], length=5) == ([-1.0, -2.0], [True, True], [2, 3])


def may_improve(rules: BeamSearchRules, running: float, finished: list[float], length: int = 1) -> bool:
    scores = torch.tensor([finished + [MISSING] * (2 - len(finished))])
    state = {"can_improve": torch.tensor([[True]]), "running_scores": torch.tensor([[running, running - 1]])}
    found = rules.may_improve(**state, scores=scores, is_finished=scores > MISSING, length=length)
    assert not rules.may_improve(
        **state | {"can_improve": torch.tensor([[False]])}, scores=scores, is_finished=scores > MISSING, length=length
    )
    return found.item()


def test_a_sentence_is_done_when_nothing_better_can_follow() -> None:
    assert may_improve(rules_of(), -1.0, [])
    assert may_improve(rules_of(), -1.0, [-2.0])
    assert not may_improve(rules_of(), -2.0, [-1.0])
    assert not may_improve(rules_of(), -1.0, [-2.0], length=5)
    # As many as are returned; for transformers' rule, as there are beams.
    assert may_improve(rules_of(num_return_sequences=2), -2.0, [-1.0])
    assert may_improve(rules_of(early_stopping=False), -2.0, [-1.0])
    assert not may_improve(rules_of(early_stopping=False), -2.0, [-1.0, -1.5])


def test_only_never_looks_ahead_and_only_for_a_positive_alpha() -> None:
    # -2 may become -2 / 5 at the limit of 5 tokens; at 2 tokens it is -1.
    for alpha, stop, expected in ((1.0, "never", True), (1.0, False, False), (-1.0, "never", False)):
        assert may_improve(rules_of(alpha=alpha, early_stopping=stop), -2.0, [-0.5, -0.5], length=2) is expected


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
