"""Beam search of Section 6.1 against a plain implementation and exhaustive search; settings of `generate()`."""

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMixin, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.model.generation_vaswani import (
    CHANGED_HOOKS,
    HOOKS,
    FastSearchMixin,
    VaswaniGenerationMixin,
    changed_hooks,
)
from hf_vaswani.model.heads_vaswani import CausalGenerationMixin
from hf_vaswani.model.rules_vaswani import search_call

from .. import networks
from ..conftest import ROOT, dear

PAD, BOS, EOS = 0, 1, 2


# Small enough to enumerate all outputs.
tiny_model = partial(
    networks.tiny_model,
    eos=1.0,
    vocab_size=8,
    d_model=8,
    d_ff=16,
    encoder_layers=1,
    decoder_layers=1,
    dropout=0.0,
)


def a_batch(*lengths: int, side: str = "right", vocab_size: int = 8) -> dict[str, torch.Tensor]:
    """Returns random sources of these lengths, `</s>` included, padded on one side."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        tokens = torch.randint(3, vocab_size, (length,), generator=generator)
        tokens[-1] = EOS
        (row[-length:] if side == "left" else row[:length]).copy_(tokens)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def alone(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    kept = inputs["attention_mask"][row].bool()
    return {name: tensor[row : row + 1, kept] for name, tensor in inputs.items()}


def search(model, inputs, **settings) -> list[tuple[float, list[int]]]:
    """Returns scores and generated tokens, padding included."""
    output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    prompt = settings["decoder_input_ids"].shape[1] if "decoder_input_ids" in settings else 1
    return list(zip(output.sequences_scores.tolist(), output.sequences[:, prompt:].tolist(), strict=True))


def assert_same(found, expected) -> None:
    """Asserts equal hypotheses up to padding: transformers' beam search pads with `</s>` if the pad token is 0."""
    assert len(found) == len(expected)
    for (score, tokens), (expected_score, expected_tokens) in zip(found, expected, strict=True):
        assert tokens[: len(expected_tokens)] == expected_tokens
        assert set(tokens[len(expected_tokens) :]) <= {PAD, EOS}
        assert score == pytest.approx(expected_score, abs=2e-5)


# ---- Plain beam search and exhaustive search, from the formulas


Rows = list[list[float]]


class Language(LogitsProcessor):
    """Draws a distribution for every prefix: those of a tiny model are too similar to distinguish all rules."""

    def __init__(self, seed: int, spread: float = 2.0, eos: float = 0.0, vocab_size: int = 8) -> None:
        self.seed, self.spread, self.eos, self.vocab_size = seed, spread, eos, vocab_size

    def rows(self, prefixes: list[list[int]]) -> Rows:
        rows = []
        for prefix in prefixes:
            draw = random.Random(f"{self.seed} {prefix}")
            logits = torch.tensor([draw.gauss(0, self.spread) for _ in range(self.vocab_size)])
            logits[EOS] += self.eos
            rows.append(torch.log_softmax(logits, dim=0).tolist())
        return rows

    def __call__(self, input_ids, scores):
        return torch.tensor(self.rows(input_ids[:, 1:].tolist()))

    def search(self, **settings) -> list[tuple[float, list[int]]]:
        model = tiny_model(vocab_size=self.vocab_size)
        return search(model, {"input_ids": torch.tensor([[EOS]])}, logits_processor=[self], **settings)


@torch.no_grad()
def rows_of(model: VaswaniForConditionalGeneration, source: torch.Tensor) -> Callable[[list[list[int]]], Rows]:
    def rows(prefixes: list[list[int]]) -> Rows:
        target = torch.tensor([[BOS, *prefix] for prefix in prefixes])
        logits = model(input_ids=source.expand(len(prefixes), -1), decoder_input_ids=target).logits[:, -1]
        return torch.log_softmax(logits.float(), dim=-1).tolist()

    return rows


def penalty(length: int, alpha: float, kind: str) -> float:
    return ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha


def grow(alive, rows):
    for (log_prob, tokens), row in zip(alive, rows([tokens for _, tokens in alive]), strict=True):
        for token, value in enumerate(row):
            yield log_prob + value, [*tokens, token]


def plain_beam_search(rows, longest, num_beams=4, alpha=0.6, kind="gnmt", finish="all", stop="never", returned=1):
    """Returns scores and tokens of the `returned` best hypotheses, by the rules in the docstring of the module."""
    alive, finished, cut = [(0.0, [])], [], []
    for length in range(1, longest + 1):
        candidates = sorted(grow(alive, rows), reverse=True)[: 2 * num_beams]
        for place, (log_prob, tokens) in enumerate(candidates):
            hypothesis = (log_prob / penalty(length, alpha, kind), tokens)
            if tokens[-1] == EOS or finish == "top":
                if (tokens[-1] == EOS or length == longest) and (finish == "all" or place < num_beams):
                    finished.append(hypothesis)
            elif length == longest:
                cut.append(hypothesis)
        finished = sorted(finished, reverse=True)[:num_beams]
        alive = [candidate for candidate in candidates if candidate[1][-1] != EOS][:num_beams]
        best, full = alive[0][0], len(finished) == num_beams
        if stop == "never":
            hoped = best / penalty(longest if alpha > 0 else length, alpha, kind)
            done = len(finished) >= returned and finished[returned - 1][0] >= hoped
        else:
            done = full and (stop is True or finished[-1][0] >= best / penalty(length, alpha, kind))
        if done:
            break
    return (finished + cut)[:returned]


def all_outputs(rows, longest: int) -> list[tuple[float, list[int]]]:
    """Returns every finished output up to a length, and every one that is cut there, with log-probabilities."""
    alive, outputs = [(0.0, [])], []
    for length in range(1, longest + 1):
        grown = list(grow(alive, rows))
        outputs += [one for one in grown if one[1][-1] == EOS or length == longest]
        alive = [one for one in grown if one[1][-1] != EOS]
    return outputs


# ---- Length penalty, candidates, early stopping


RULES = list(itertools.product(("gnmt", "power"), ("all", "top"), ("never", False, True)))
# A quarter of them, with each value of each rule.
SOME_RULES = [rule if RULES.index(rule) % 4 == 3 else dear(*rule) for rule in RULES]


def settings_of(num_beams, alpha, kind, finish, stop, returned) -> dict:
    names = ("num_beams", "length_penalty", "length_penalty_type", "finish_candidates", "early_stopping")
    return dict(zip(names, (num_beams, alpha, kind, finish, stop), strict=True)) | {"num_return_sequences": returned}


@pytest.mark.parametrize(("kind", "finish", "stop"), SOME_RULES)
def test_hypotheses_and_scores_are_those_of_a_plain_search(kind, finish, stop) -> None:
    draw = random.Random(f"{kind} {finish} {stop}")
    for seed in range(10):
        num_beams, alpha = draw.randint(2, 5), draw.choice([-0.5, 0.0, 0.3, 0.6, 1.0, 2.0])
        rules = (num_beams, alpha, kind, finish, stop, draw.randint(1, num_beams))
        offset = draw.randint(0, 6)
        model, inputs = tiny_model(seed, eos=draw.choice([-2.0, 0.0, 1.0, 2.0])), a_batch(draw.randint(2, 6))
        longest = inputs["input_ids"].shape[1] + offset
        expected = plain_beam_search(rows_of(model, inputs["input_ids"]), longest, *rules)
        assert_same(search(model, inputs, **settings_of(*rules), max_length_offset=offset), expected)
        language = Language(seed, spread=draw.choice([1, 2, 4]), eos=draw.choice([-1.0, 0.0, 1.0]))
        expected = plain_beam_search(language.rows, 2 + offset, *rules)
        assert_same(language.search(**settings_of(*rules), max_length_offset=1 + offset), expected)


def test_the_papers_settings_are_the_defaults() -> None:
    for seed in range(6):
        model, inputs = tiny_model(seed, eos=0.0), a_batch(5)
        expected = plain_beam_search(rows_of(model, inputs["input_ids"]), 55, 4, 0.6, "gnmt", "all", "never", 1)
        assert_same(search(model, inputs, num_beams=4), expected)
        language = Language(seed)
        expected = plain_beam_search(language.rows, 51, 4, 0.6, "gnmt", "all", "never", 1)
        assert_same(language.search(num_beams=4), expected)


@pytest.mark.parametrize(
    "other", [{"alpha": 1.0}, {"kind": "power"}, {"finish": "top"}, {"stop": True}, {"num_beams": 3}]
)
def test_every_rule_changes_translations(other) -> None:
    """Otherwise the tests above could pass without it."""
    usual = {"num_beams": 2, "alpha": 2.0}
    pairs = [
        (
            plain_beam_search(Language(seed).rows, 8, **usual),
            plain_beam_search(Language(seed).rows, 8, **(usual | other)),
        )
        for seed in range(20)
    ]
    assert any(usual[0][1] != changed[0][1] for usual, changed in pairs)


def test_missing_beams_do_not_finish() -> None:
    """At first only one beam has a hypothesis; if few tokens are allowed, the others must not become results."""
    allowed = {(): [3], (3,): [EOS, 4], (3, 4): [EOS]}
    found = search(
        tiny_model(),
        a_batch(3),
        num_beams=2,
        num_return_sequences=2,
        early_stopping=True,
        prefix_allowed_tokens_fn=lambda _, ids: allowed.get(tuple(ids[1:].tolist()), [EOS]),
    )
    assert sorted(tokens for _, tokens in found) == [[3, EOS, EOS], [3, 4, EOS]]
    assert all(score > -100 for score, _ in found)


@pytest.mark.parametrize(("kind", "alpha"), [("gnmt", 0.6), dear("gnmt", 2.0), ("power", 1.0), dear("gnmt", -1.0)])
def test_a_wide_beam_finds_the_best_of_all_outputs(kind, alpha) -> None:
    settings = {"num_beams": 64, "length_penalty_type": kind, "length_penalty": alpha}
    bests = []
    for seed in range(6):
        model, source = tiny_model(seed, vocab_size=5, eos=-1.0), a_batch(3, vocab_size=5)["input_ids"]
        language = Language(seed, vocab_size=5)
        for rows, find in (
            (rows_of(model, source), partial(search, model, {"input_ids": source}, max_length_offset=1)),
            (language.rows, partial(language.search, max_length_offset=3)),
        ):
            outputs = [(log_p / penalty(len(tokens), alpha, kind), tokens) for log_p, tokens in all_outputs(rows, 4)]
            best, best_finished = max(outputs), max(one for one in outputs if one[1][-1] == EOS)
            bests.append(best == best_finished)
            assert_same(find(**settings), [best_finished])
            finished = sorted((one for one in outputs if one[1][-1] == EOS), reverse=True)[:3]
            assert_same(find(**settings, num_return_sequences=3), finished)
            assert_same(find(**settings, finish_candidates="top"), [best])
    assert set(bests) == {True, False} or alpha < 0


@pytest.mark.parametrize("stop", [False, True, "never"])
def test_transformers_rules_give_what_transformers_gives(stop) -> None:
    hooks = ("_beam_search", "_update_finished_beams", "_check_early_stop_heuristic")
    plain = type("Plain", (VaswaniForConditionalGeneration,), {hook: vars(GenerationMixin)[hook] for hook in hooks})
    for seed in range(6):
        model, inputs = tiny_model(seed, vocab_size=20), a_batch(5, 3, 2, vocab_size=20)
        settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "early_stopping": stop}
        settings |= {"length_penalty": 0.8}
        found = search(model, inputs, **settings, length_penalty_type="power", finish_candidates="top")
        model.__class__ = plain
        # transformers returns scores of hypotheses only together with those of each step.
        assert_same(found, search(model, inputs, **settings, output_scores=True))


def test_length_does_not_count_the_decoders_prompt() -> None:
    model, inputs = tiny_model(1, eos=0.0), a_batch(4)
    prompt = torch.tensor([[BOS, 5, 6, 7]])
    for kind in ("gnmt", "power"):
        settings = {"num_beams": 3, "length_penalty_type": kind, "length_penalty": 1.0, "max_length_offset": 2}
        [(score, tokens)] = search(model, inputs, decoder_input_ids=prompt, **settings)
        rows = [rows_of(model, inputs["input_ids"])([[5, 6, 7, *tokens[:i]]])[0] for i in range(len(tokens))]
        log_prob = sum(row[token] for row, token in zip(rows, tokens, strict=True))
        assert score == pytest.approx(log_prob / penalty(len(tokens), 1.0, kind), abs=1e-5)
        # The limit does not count it either.
        never = tiny_model(1, eos=-math.inf)
        assert never.generate(**inputs, decoder_input_ids=prompt, **settings).shape == (1, 4 + 6)


def count_steps(model, monkeypatch, **arguments) -> int:
    steps = []
    forward = model.model.decoder.forward
    monkeypatch.setattr(model.model.decoder, "forward", lambda *args, **kw: steps.append(1) or forward(*args, **kw))
    model.generate(**arguments)
    return len(steps)


def test_search_goes_on_only_while_the_returned_ones_may_improve(monkeypatch) -> None:
    """The search takes more steps for more results, and fewer than the maximum length."""
    inputs = a_batch(4)
    one = count_steps(tiny_model(0, eos=2.0), monkeypatch, **inputs, num_beams=4)
    four = count_steps(tiny_model(0, eos=2.0), monkeypatch, **inputs, num_beams=4, num_return_sequences=4)
    assert one < four < 54


def test_cut_hypotheses_stay_behind_while_other_sentences_go_on() -> None:
    class FewOutputs(LogitsProcessor):
        """Allows only `</s>` and `3 3 ...` for the first sentence, where the latter is better."""

        def __call__(self, input_ids, scores):
            scores[:3] = -math.inf
            scores[:3, 3] = -0.1
            scores[:3, EOS] = -5.0 if input_ids.shape[1] == 1 else -math.inf
            return scores

    settings = {"num_beams": 3, "num_return_sequences": 3, "max_length_offset": 0, "logits_processor": [FewOutputs()]}
    found = search(tiny_model(0, eos=-math.inf), a_batch(2, 6), **settings)
    assert found[0][1][0] == EOS
    assert found[1][1][:2] == [3, 3]
    assert [score for score, _ in found[:2]] == pytest.approx([-5.0, -0.2 / (7 / 6) ** 0.6])
    # The third hypothesis is missing.
    assert found[2][0] < -1e8


# ---- Maximum length


MODES = [{}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}]


def lengths_of(sequences: torch.Tensor) -> list[int]:
    """Returns numbers of generated tokens, if `</s>` is only padding; without `</s>` beam search pads with -1."""
    return [sum(token not in (PAD, EOS, -1) for token in row) for row in sequences[:, 1:].tolist()]


@pytest.mark.variants(2)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_sentence_has_its_own_limit(mode, side) -> None:
    model, inputs = tiny_model(0, eos=-math.inf), a_batch(5, 2, 7, side=side)
    model.generation_config.suppress_tokens = [PAD]
    assert lengths_of(model.generate(**inputs, **mode)) == [55, 52, 57]
    assert lengths_of(model.generate(**inputs, **mode, max_length_offset=3)) == [8, 5, 10]
    assert lengths_of(model.generate(**alone(inputs, 1), **mode, max_length_offset=3)) == [5]
    if mode:
        several = model.generate(**inputs, **mode, max_length_offset=3, num_return_sequences=2)
        assert lengths_of(several) == [8, 8, 5, 5, 10, 10]
    model.generation_config.eos_token_id = None
    assert lengths_of(model.generate(**inputs, **mode, max_length_offset=3)) == [8, 5, 10]
    # Without a mask, padding counts as tokens, as it does in the model.
    assert lengths_of(model.generate(inputs["input_ids"], **mode, max_length_offset=3)) == [10, 10, 10]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_limit_without_source_ids(mode) -> None:
    model, inputs = tiny_model(0, eos=-math.inf), a_batch(5, 2)
    model.generation_config.suppress_tokens = [PAD]
    embeds, mask = model.get_input_embeddings()(inputs["input_ids"]), inputs["attention_mask"]
    same = model.generate(**inputs, **mode).tolist()
    # `generate()` modifies the encoder's output, so each call needs another one.
    for source in (lambda: {"inputs_embeds": embeds}, lambda: {"encoder_outputs": model.get_encoder()(**inputs)}):
        assert lengths_of(model.generate(**source(), **mode, attention_mask=mask, max_length_offset=4)) == [9, 6]
        assert lengths_of(model.generate(**source(), **mode, max_length_offset=4)) == [9, 9]
        if "do_sample" not in mode:
            assert model.generate(**source(), **mode, attention_mask=mask).tolist() == same


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=str)
def test_other_limits_replace_it(mode) -> None:
    model, inputs = tiny_model(0, eos=-math.inf), a_batch(5, 2)
    model.generation_config.suppress_tokens = [PAD]
    assert lengths_of(model.generate(**inputs, **mode, max_new_tokens=4)) == [4, 4]
    assert lengths_of(model.generate(**inputs, **mode, max_length=4)) == [3, 3]
    assert lengths_of(model.generate(**inputs, generation_config=GenerationConfig(max_length=4, **mode))) == [3, 3]
    with pytest.warns(UserWarning, match="default `max_length`"):
        assert lengths_of(model.generate(**inputs, **mode, max_length_offset=None)) == [20, 20]
    with pytest.warns(UserWarning, match="default `max_length`"):
        config = GenerationConfig(max_length_offset=None, **mode)
        assert lengths_of(model.generate(**inputs, generation_config=config)) == [20, 20]
    model.generation_config.max_length = 6
    assert lengths_of(model.generate(**inputs, **mode)) == [5, 5]
    model.generation_config.update(max_length=None, max_new_tokens=6)
    assert lengths_of(model.generate(**inputs, **mode)) == [6, 6]


def test_a_learned_table_limits_the_output() -> None:
    model = tiny_model(0, eos=-math.inf, position_encoding="learned", max_position_embeddings=12)
    model.generation_config.suppress_tokens = [PAD]
    inputs = a_batch(5, 2)
    assert lengths_of(model.generate(**inputs, max_length_offset=8)) == [11, 10]
    assert lengths_of(tiny_model(0, eos=-math.inf, max_position_embeddings=12).generate(**inputs))[0] > 12


@pytest.mark.parametrize(
    ("side", "stop", "finish"),
    [
        each if i in (0, 3, 5, 10) else dear(*each)
        for i, each in enumerate(itertools.product(("left", "right"), ("never", False, True), ("all", "top")))
    ],
)
def test_a_translation_does_not_depend_on_its_batch(side, stop, finish) -> None:
    """Sentences have different limits; some are cut and others end early."""
    ended = set()
    for seed in range(3):
        model, inputs = tiny_model(seed, eos=-1.0), a_batch(2, 9, 4, 3, 6, side=side)
        beams = {"num_beams": 4, "num_return_sequences": 2, "max_length_offset": 1}
        beams |= {"early_stopping": stop, "finish_candidates": finish}
        together, greedy = search(model, inputs, **beams), model.generate(**inputs, max_length_offset=1).tolist()
        for row in range(5):
            expected = search(model, alone(inputs, row), **beams)
            assert_same(together[2 * row : 2 * row + 2], expected)
            ended |= {tokens[-1] == EOS for _, tokens in expected}
            tokens = model.generate(**alone(inputs, row), max_length_offset=1)[0].tolist()
            assert greedy[row] == tokens + [PAD] * (len(greedy[row]) - len(tokens))
    assert ended == {True, False}


# ---- Ensembles


@pytest.mark.parametrize(("kind", "finish", "stop"), SOME_RULES)
def test_an_ensemble_goes_by_the_mean_of_the_probabilities(kind, finish, stop) -> None:
    differ = 0
    for seed in range(5):
        models = [
            tiny_model(3 * seed, eos=1.0),
            tiny_model(3 * seed + 1, eos=1.0, d_model=12, decoder_layers=2),
            tiny_model(3 * seed + 2, position_encoding="learned"),
        ]
        inputs, rules = a_batch(4), (3, 0.6, kind, finish, stop, 2)
        each = [rows_of(model, inputs["input_ids"]) for model in models]

        def mean(prefixes, each=each):
            rows = torch.tensor([rows(prefixes) for rows in each], dtype=torch.float64)
            return rows.exp().mean(dim=0).log().tolist()

        expected = plain_beam_search(mean, 7, *rules)
        settings = settings_of(*rules) | {"max_length_offset": 3}
        assert_same(search(models[0], inputs, **settings, ensemble=models[1:]), expected)
        differ += search(models[0], inputs, **settings)[0][1] != expected[0][1]
        [greedy] = models[0].generate(**inputs, max_length_offset=3, ensemble=models[1:]).tolist()
        expected = plain_beam_search(mean, 7, 1, 0.0, "gnmt", "top", True)
        assert greedy[1:] == expected[0][1]
    assert differ


def test_an_ensemble_of_sentences_of_unequal_length() -> None:
    models, inputs = [tiny_model(seed) for seed in (0, 4)], a_batch(2, 9, 4, 3)
    settings = {"num_beams": 3, "max_length_offset": 2, "ensemble": models[1:]}
    found = search(models[0], inputs, **settings)
    for row in range(4):
        assert_same(found[row : row + 1], search(models[0], alone(inputs, row), **settings))


class Never(StoppingCriteria):
    """Reads the tokens, and ends nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_unsupported_calls_with_an_ensemble_are_rejected() -> None:
    model, other, inputs = tiny_model(0), tiny_model(1), a_batch(4, 4)
    only = "ensemble needs input_ids and plain greedy or beam search, but"
    for settings, reason in (
        ({"do_sample": True}, "the settings ask for sample"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True was given"),
        ({"use_cache": False}, "use_cache=False was given"),
        ({"stopping_criteria": [Never()]}, "the stopping criterion Never was given"),
    ):
        with pytest.raises(ValueError, match=f"{only} {reason}"):
            model.generate(**inputs, ensemble=[other], **settings)
    with pytest.raises(ValueError, match=f"{only} the settings ask for assisted generation"):
        model.generate(**a_batch(4), ensemble=[other], assistant_model=other)
    with pytest.raises(ValueError, match="one vocabulary, but item 1 has 9 entries and this model has 8"):
        model.generate(**inputs, ensemble=[tiny_model(1, vocab_size=9)])
    with pytest.raises(ValueError, match="needs input_ids"):
        model.generate(inputs_embeds=torch.zeros(1, 3, 8), ensemble=[other])
    with pytest.raises(ValueError, match="ensemble must be a list of models, but it is a VaswaniFor"):
        model.generate(**inputs, ensemble=other)
    with pytest.raises(ValueError, match="must contain Vaswani models, but item 2 is a Linear"):
        model.generate(**inputs, ensemble=[other, nn.Linear(2, 2)])
    other.train()
    with pytest.raises(ValueError, match=f"{only} item 1 of it is in training mode"):
        model.generate(**inputs, ensemble=[other], num_beams=2)


# ---- Settings: precedence, and where they are saved


def test_settings_are_kept(tmp_path) -> None:
    model = tiny_model()
    own = {"length_penalty_type": "gnmt", "max_length_offset": 50, "finish_candidates": "all"}
    assert own.items() <= vars(model.generation_config).items()
    assert model.generation_config.num_beams is None
    changed = {"length_penalty_type": "power", "max_length_offset": None, "finish_candidates": "top", "num_beams": 3}
    changed |= {"length_penalty": 0.3, "early_stopping": True}
    model.generation_config.update(**changed)
    model.save_pretrained(tmp_path)
    assert changed.items() <= json.loads((tmp_path / "generation_config.json").read_text()).items()
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert changed.items() <= vars(loaded.generation_config).items()
    assert VaswaniForConditionalGeneration.can_generate()


@pytest.mark.parametrize("content", ['{"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}', None])
def test_an_older_checkpoint_gets_the_papers_settings(tmp_path, content) -> None:
    tiny_model(2).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if content:
        (tmp_path / "generation_config.json").write_text(content)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generation_config.length_penalty_type == "gnmt"
    ((score, tokens),) = search(loaded, a_batch(4), num_beams=4)
    # Products round by where their matrices lie in memory.
    assert [(pytest.approx(score, abs=1e-5), tokens)] == search(tiny_model(2), a_batch(4), num_beams=4)


def test_the_call_comes_before_its_config_and_that_before_the_models() -> None:
    model, inputs = tiny_model(3, eos=0.0), a_batch(4)

    def score(**settings) -> float:
        return search(model, inputs, **settings)[0][0]

    gnmt, power = score(num_beams=4), score(num_beams=4, length_penalty_type="power", length_penalty=1.0)
    assert gnmt != pytest.approx(power)
    # Without an alpha, each type has its default.
    assert score(num_beams=4, length_penalty=0.6) == gnmt
    assert score(num_beams=4, length_penalty_type="power") == power
    assert score(generation_config=GenerationConfig(num_beams=4)) == gnmt
    assert score(generation_config=GenerationConfig(num_beams=4, length_penalty_type="power")) == power
    ids = {"decoder_start_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    model.generation_config = GenerationConfig(num_beams=4, **ids)
    assert score() == gnmt
    assert score(length_penalty_type="power") == power
    model.generation_config.length_penalty_type = "power"
    assert score() == power
    assert score(generation_config=GenerationConfig(length_penalty_type="gnmt")) == gnmt
    model.generation_config.length_penalty = 0.6
    assert score(length_penalty_type="gnmt") == gnmt


@pytest.mark.process
def test_nothing_is_printed(tmp_path) -> None:
    program = f"""if True:
        import torch, transformers
        from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
        transformers.logging.disable_progress_bar()
        sizes = dict(vocab_size=8, d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1,
                     max_position_embeddings=4)
        model = VaswaniForConditionalGeneration(VaswaniConfig(**sizes))
        for num_beams in (None, 4):
            model.generation_config.update(num_beams=num_beams)
            model.save_pretrained({str(tmp_path)!r})
            model = VaswaniForConditionalGeneration.from_pretrained({str(tmp_path)!r}).eval()
            ids = torch.tensor([[3, 4, 2]])
            for settings in ({{}}, dict(num_beams=1), dict(num_beams=3), dict(do_sample=True), dict(max_new_tokens=9),
                             dict(num_beams=3, length_penalty=1.0, length_penalty_type="power")):
                model.generate(ids, **settings)
            model.generate(ids, generation_config=transformers.GenerationConfig(num_beams=2))
            # transformers itself warns that an assistant gets both a config and keywords.
            transformers.generation.utils.logger.warning_once = lambda text: None
            model.generate(ids, num_beams=1, assistant_model=model)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# ---- Other modes of `generate()`


def test_assisted_decoding_is_greedy_decoding() -> None:
    for seed, eos in ((0, 0.0), (1, 1.0), (2, -math.inf)):
        model, inputs = tiny_model(seed, eos=eos, encoder_layers=2, decoder_layers=2), a_batch(4)
        assistant = tiny_model(seed + 10, eos=eos)
        expected = model.generate(**inputs).tolist()
        assert model.generate(**inputs, assistant_model=assistant).tolist() == expected
        assert model.generate(**inputs, assistant_model=assistant, max_length_offset=1).tolist() == [expected[0][:6]]


def test_streamers_processors_and_criteria_of_the_caller() -> None:
    model, inputs = tiny_model(0, eos=-math.inf), a_batch(4, 2)

    class Recorder(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(-1)

    recorder = Recorder()
    output = model.generate(**alone(inputs, 0), max_length_offset=2, streamer=recorder)
    assert recorder.tokens == [*output[0].tolist(), -1]

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] > 3)

    for num_beams in (1, 3):
        criteria = StoppingCriteriaList([AfterThree()])
        assert model.generate(**inputs, num_beams=num_beams, stopping_criteria=criteria).shape == (2, 4)
        assert model.generate(**inputs, num_beams=num_beams, max_time=0.0).shape == (2, 2)
        only = model.generate(**inputs, num_beams=num_beams, prefix_allowed_tokens_fn=lambda *_: [5], max_new_tokens=3)
        assert only.tolist() == [[BOS, 5, 5, 5]] * 2


# Both searches: `output_scores` falls back to transformers' own.
@pytest.mark.parametrize("more", [{}, {"output_scores": True}], ids=str)
def test_settings_of_threads_do_not_meet(more) -> None:
    model, inputs = tiny_model(3, eos=0.0), a_batch(5, 3)
    settings = [
        settings_of(beams, alpha, kind, finish, "never", 2) | {"max_length_offset": 5} | more
        for beams, kind, alpha, finish in itertools.product((2, 3), ("gnmt", "power"), (0.3, 2.0), ("all", "top"))
    ]
    expected = [search(model, inputs, **setting) for setting in settings]
    assert len({str(hypotheses) for hypotheses in expected}) > 4
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda setting: search(model, inputs, **setting), settings * 2)) == expected * 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_search_within_a_search_has_rules_of_its_own(fails) -> None:
    """A processor runs another search with other rules at each step; both fall back to transformers' search."""
    model, inputs = tiny_model(3, eos=0.0), a_batch(5, 3)
    outer = settings_of(3, 2.0, "gnmt", "all", "never", 2) | {"max_length_offset": 5, "output_scores": True}
    inner = settings_of(2, 0.3, "power", "top", False, 1) | {"max_length_offset": 2, "output_scores": True}
    expected, expected_inside, inside = search(model, inputs, **outer), search(model, a_batch(4), **inner), []

    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 2:
                raise RuntimeError("not further")
            return scores

    class Translates(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if fails:
                with pytest.raises(RuntimeError, match="not further"):
                    search(model, a_batch(4), **inner, logits_processor=[Fails()])
            inside.append(search(model, a_batch(4), **inner))
            return scores

    assert search(model, inputs, **outer, logits_processor=[Translates()]) == expected
    assert len(inside) > 2 and all(found == expected_inside for found in inside)
    with pytest.raises(LookupError):
        search_call()


def test_changed_methods_of_transformers_are_found() -> None:
    class WithoutStep(GenerationMixin):
        def _update_finished_beams(self, topk_log_probs):
            """Lacks most parameters."""

    assert changed_hooks(WithoutStep) == ["_update_finished_beams"]
    assert changed_hooks(object) == list(HOOKS)
    assert changed_hooks(GenerationMixin) == CHANGED_HOOKS == []
    # The mixin overrides each of them, and only one other private method of transformers, whose absence is harmless.
    overridden = {*vars(VaswaniGenerationMixin), *vars(FastSearchMixin), *vars(CausalGenerationMixin)}
    private = {name for name in overridden if name.startswith("_") and hasattr(GenerationMixin, name)}
    harmless = {"_maybe_prepare_encoder_kwargs_for_generation"}
    assert {name for name in private if not name.startswith("__")} == set(HOOKS) | harmless


ANOTHER_TRANSFORMERS = """
import sys, torch
from transformers.generation import GenerationMixin
theirs = GenerationMixin._prepare_generated_length
def renamed(self, generation_config, has_default_max_length, input_ids_length, the_inputs=None, **kwargs):
    kwargs["inputs_tensor"] = kwargs.get("inputs_tensor", the_inputs)
    return theirs(self, generation_config, has_default_max_length, input_ids_length=input_ids_length, **kwargs)
GenerationMixin._prepare_generated_length = renamed
if sys.argv[2] == "plug-in":
    import hf_vaswani
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[2] != "plug-in")
ids = torch.arange(3, 12)[None]
print(model(input_ids=ids, labels=ids).loss.item() > 0)
print(model.generate(ids, num_beams=3, length_penalty_type="gnmt").tolist())
try:
    model.generate(ids, ensemble=[model])
except ValueError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["plug-in", "remote code"])
def test_with_another_transformers_its_own_search_takes_over(tmp_path, how) -> None:
    """A saved model loads and trains, and `generate()` warns about the fallback."""
    model = tiny_model(3, eos=0.0, vocab_size=20)
    model.save_pretrained(tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", ANOTHER_TRANSFORMERS, str(tmp_path / "model"), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    loss, found, refusal = done.stdout.splitlines()
    assert loss == "True" and "ensemble needs input_ids and plain greedy or beam search, but transformers" in refusal
    assert done.stderr.count("has changed _prepare_generated_length") == 1
    # The result equals that of transformers' rules in this version, with the same limit.
    ids = torch.arange(3, 12)[None]
    rules = {"length_penalty_type": "power", "finish_candidates": "top", "early_stopping": False}
    expected = model.generate(ids, num_beams=3, **rules, max_new_tokens=9 + model.generation_config.max_length_offset)
    assert json.loads(found) == expected.tolist()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("length_penalty_type", "wu", '"gnmt" or "power"'),
        ("finish_candidates", "some", '"all" or "top"'),
        ("max_length_offset", -1, "None or a whole number of at least 0"),
        ("max_length_offset", 1.5, "None or a whole number of at least 0"),
        ("max_length_offset", math.nan, "a finite number"),
        ("length_penalty", -11, "a number from -10 to 10"),
        ("length_penalty", "x", "a number from -10 to 10"),
        ("length_penalty", -math.inf, "a finite number"),
        ("repetition_penalty", math.nan, "a finite number"),
        ("num_beams", 0, "a whole number of at least 1"),
        ("num_return_sequences", 0, "a whole number of at least 1"),
        ("max_length", "x", "a whole number of at least 1"),
        ("max_new_tokens", 1.5, "a whole number of at least 1"),
        ("max_length_ofset", 1, None),
    ],
    ids=str,
)
def test_settings_that_no_search_can_use_are_rejected_by_name(name, value, expected) -> None:
    words = name if expected is None else f"{name} must be {expected}, but it is {value!r}."
    with pytest.raises(ValueError, match=re.escape(words)):
        tiny_model(3).generate(**a_batch(2, 1), **{"num_beams": 2} | {name: value})
