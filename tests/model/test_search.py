"""Sampling, greedy and beam search against transformers' own, which the same call falls back to."""

import itertools

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from hf_vaswani import VaswaniForCausalLM, VaswaniForConditionalGeneration
from hf_vaswani.model import search_vaswani
from hf_vaswani.model.configuration_vaswani import CACHE
from hf_vaswani.model.search_vaswani import best_tokens
from hf_vaswani.serving.batcher import EndCriteria
from hf_vaswani.translation.quantization import to_int8

from ..conftest import dear
from ..networks import tiny_model

PAD, BOS, EOS = 0, 1, 2


def random_model(seed: int = 0, vocab_size: int = 90, **fields) -> VaswaniForConditionalGeneration:
    """Returns a model whose translations vary, also in length."""
    sizes = {"vocab_size": vocab_size, "d_ff": 32, "encoder_layers": 1}
    model = tiny_model(seed, eos=2.5, **(sizes | fields))
    model.generation_config.max_length_offset = 10
    return model


def sentences(count: int, padded: bool = True, vocab_size: int = 90) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, vocab_size, (count, 12), generator=generator)
    lengths = torch.randint(2, 13, (count,), generator=generator) if padded else torch.full((count,), 12)
    ids[torch.arange(12) >= lengths[:, None]] = PAD
    ids[torch.arange(count), lengths - 1] = EOS
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def random_gpt(seed: int = 0, **fields) -> VaswaniForCausalLM:
    """Returns a language model whose texts vary, also in length."""
    model = tiny_model(seed, eos=1.0, kind=VaswaniForCausalLM, **({"vocab_size": 90, "d_ff": 32} | fields))
    model.generation_config.max_new_tokens = 20
    return model


def prompts(count: int, padded: bool = True) -> dict[str, torch.Tensor]:
    """Returns sentences with the padding on the left, and without their ends."""
    inputs = {name: tensor.flip(1) for name, tensor in sentences(count, padded).items()}
    inputs["input_ids"].masked_fill_(inputs["input_ids"] == EOS, 5)
    return inputs


# A model, its inputs, and the length of what its outputs begin with: a decoder on its own repeats the prompt.
KINDS = {"translation": (random_model, sentences, 1), "text": (random_gpt, prompts, 12)}


def fast_and_stock(monkeypatch, model, inputs, fast: bool = True, **settings) -> list:
    """Returns the outputs of both searches, and asserts whether `generate()` takes the fast one by itself."""
    found, taken = [], []
    choose = search_vaswani.fast_search_inputs

    def spy(*args, **kwargs):
        taken.append(choose(*args, **kwargs))
        return taken[-1]

    for choice in (spy, lambda *args, **kwargs: None):
        monkeypatch.setattr(search_vaswani, "fast_search_inputs", choice)
        torch.manual_seed(0)
        found.append(model.generate(**inputs, **settings, return_dict_in_generate=True))
    monkeypatch.setattr(search_vaswani, "fast_search_inputs", choose)
    assert [arguments is not None for arguments in taken] == [fast]
    return found


def scores_of(model, inputs, **settings) -> torch.Tensor:
    return model.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True).sequences_scores


def assert_same(found: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor | None = None) -> None:
    """Asserts equal sequences, except that rounding may swap two hypotheses with almost equal scores."""
    assert found.shape == expected.shape
    for row in (found != expected).any(dim=1).nonzero()[:, 0].tolist():
        assert scores is not None and row
        assert (scores - scores[row]).abs().lt(1e-6).sum() > 1, f"row {row}"


TRANSFORMERS = {"length_penalty_type": "power", "finish_candidates": "top"}
SETTINGS = [
    {},
    TRANSFORMERS,
    TRANSFORMERS | {"early_stopping": True},
    {"early_stopping": False, "length_penalty": 2.0},
    {"max_new_tokens": 9, "min_new_tokens": 4},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": [[5], [7, 8]]},
    {"forced_bos_token_id": 9, "suppress_tokens": [11, 12], "eos_token_id": [2, 30]},
    {"forced_eos_token_id": 2, "max_length_offset": 3},
    {"max_length_offset": None, "max_length": 30},
]


OF_TEXTS = [{}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 0.6}, *SETTINGS[4:6]]
OF_TEXTS += [{"max_length": 30, "eos_token_id": [2, 30]}]
CALLS = [("translation", 7, settings) for settings in SETTINGS] + [("text", 7, settings) for settings in OF_TEXTS]
CALLS += [dear(*each) for each in itertools.product(KINDS, [1, 64], SETTINGS[:1])]


@pytest.mark.variants(3)
@pytest.mark.parametrize(("kind", "batch", "settings"), CALLS, ids=str)
@pytest.mark.parametrize(("beams", "returned"), [(1, 1), dear(4, 1), (4, 3), dear(10, 10)])
def test_it_finds_what_transformers_search_finds(monkeypatch, beams, returned, kind, batch, settings) -> None:
    if beams == 1:
        settings = {k: v for k, v in settings.items() if k not in ("early_stopping", "length_penalty")}
    settings = settings | {"num_beams": beams, "num_return_sequences": returned}
    build, inputs_of, prompt = KINDS[kind]
    model, lengths = build(), set()
    for padded in (False, True):
        inputs = inputs_of(batch, padded)
        fast, stock = fast_and_stock(monkeypatch, model, inputs, **settings)
        assert type(fast) is type(stock)
        if beams > 1:
            expected = scores_of(model, inputs, **settings)
            torch.testing.assert_close(fast.sequences_scores, expected, atol=1e-5, rtol=0)
            assert (fast.beam_indices == stock.beam_indices).float().mean() > 0.99
        assert_same(fast.sequences, stock.sequences, fast.sequences_scores if beams > 1 else None)
        lengths |= {[*row, EOS].index(EOS) for row in fast.sequences[:, prompt:].tolist()}
    assert batch == 1 or len(lengths) > 1


MODELS = [
    {"norm_position": "pre"},
    {"position_encoding": "learned", "max_position_embeddings": 70},
    {"sinusoid_layout": "tensor2tensor", "scale_embedding": False, "position_offset": 40},
    {"d_k": 6, "d_v": 10, "attention_bias": True, "activation_function": "gelu"},
    {"share_embeddings": False, "encoder_layers": 2, "decoder_layers": 1},
    {"share_embeddings": False, "tie_word_embeddings": False},
    {"decoder_start_token_id": PAD},
    {"embedding_norm": True, "type_vocab_size": 2},
    {"pad_token_id": EOS},
]


OF_DECODERS = [*MODELS[:4], {"tie_word_embeddings": False}, {"encoder_layers": 3}]


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [*(("translation", each) for each in MODELS), *(("text", each) for each in OF_DECODERS)],
    ids=str,
)
@pytest.mark.parametrize("beams", [1, 4])
def test_every_kind_of_model(monkeypatch, kind, fields, beams) -> None:
    build, inputs_of, _ = KINDS[kind]
    for seed in range(3):
        fast, stock = fast_and_stock(monkeypatch, build(seed, **fields), inputs_of(9), num_beams=beams)
        assert torch.equal(fast.sequences, stock.sequences)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("beams", [1, 4])
def test_padding_on_the_left_and_a_beginning_that_is_given(monkeypatch, beams, implementation) -> None:
    given = torch.randint(3, 90, (9, 5), generator=torch.Generator().manual_seed(1))
    given[:, 0] = BOS
    inputs = {name: tensor.flip(1) for name, tensor in sentences(9).items()} | {"decoder_input_ids": given}
    model = random_model()
    model.set_attn_implementation(implementation)
    # A pipeline hands its tokenizer to each call, which only stopping criteria read.
    fast, stock = fast_and_stock(monkeypatch, model, inputs, num_beams=beams, tokenizer=object())
    assert torch.equal(fast.sequences, stock.sequences) and torch.equal(fast.sequences[:, :5], given)


@pytest.mark.variants(2)
@pytest.mark.parametrize("beams", [4, 10])
def test_half_precision_differs_by_its_rounding(monkeypatch, beams) -> None:
    model, inputs = random_model().to(torch.bfloat16), sentences(64)
    fast, stock = fast_and_stock(monkeypatch, model, inputs, num_beams=beams)
    length = min(fast.sequences.shape[1], stock.sequences.shape[1])
    same = (fast.sequences[:, :length] == stock.sequences[:, :length]).all(dim=1)
    # Two of transformers' own attention implementations do not agree better.
    assert same.float().mean() > 0.75
    difference = fast.sequences_scores - scores_of(model, inputs, num_beams=beams)
    # The last candidate of one search may be missing in the other.
    assert (difference.abs() < 0.2).float().mean() > 0.95


@pytest.mark.parametrize("beams", [1, 4])
def test_long_outputs_grow_what_is_kept(monkeypatch, beams) -> None:
    settings = {"num_beams": beams, "max_new_tokens": 150, "no_repeat_ngram_size": 2}
    for model, inputs, prompt in ((random_model(), sentences(3), 1), (random_gpt(), prompts(3), 12)):
        model.lm_head.bias.data[EOS] = -100
        fast, stock = fast_and_stock(monkeypatch, model, inputs, **settings)
        assert fast.sequences.shape == (3, prompt + 150) and torch.equal(fast.sequences, stock.sequences)


class OfSentences(LogitsProcessor):
    """Forbids each sentence another token, by the index of its rows."""

    def __init__(self, beams: int) -> None:
        self.beams, self.calls = beams, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores))
        assert len(input_ids) == len(rows) and len(rows) % self.beams == 0
        self.calls += 1
        return scores.index_put((rows, 70 + rows // self.beams), torch.tensor(-torch.inf))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_processor_of_the_callers_sees_every_row(monkeypatch, beams) -> None:
    model, inputs = random_model(), sentences(20)
    plain = model.generate(**inputs, num_beams=beams)
    settings = {"num_beams": beams, "logits_processor": [OfSentences(beams)]}
    fast, stock = fast_and_stock(monkeypatch, model, inputs, **settings)
    assert torch.equal(fast.sequences, stock.sequences) and fast.sequences.tolist() != plain.tolist()


class NothingIsLeft(LogitsProcessor):
    """Forbids every token after the second."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, EOS] = -torch.inf
        return scores if input_ids.shape[1] < 3 else torch.full_like(scores, -torch.inf)


def test_a_sentence_without_an_end_is_returned_empty() -> None:
    found = random_model().generate(**sentences(3), num_beams=2, logits_processor=[NothingIsLeft()])
    assert found.tolist() == [[BOS]] * 3


class EndsAlone(StoppingCriteria):
    """A criterion of the caller's, which may read the tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def hooked(model) -> None:
    model.model.decoder.register_forward_hook(lambda *args: None)


def patched(model) -> None:
    model.model.decoder.positions.forward = model.model.decoder.positions.forward


UNSUPPORTED = [
    {"output_attentions": True},
    {"output_hidden_states": True},
    {"output_logits": True},
    {"output_scores": True},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"stopping_criteria": StoppingCriteriaList([EndsAlone()])},
    hooked,
    patched,
    nn.Module.train,
]


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "case", UNSUPPORTED, ids=lambda case: "-".join(case) if isinstance(case, dict) else case.__name__
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 4])
def test_unsupported_calls_fall_back_to_transformers(monkeypatch, beams, kind, case) -> None:
    build, inputs_of, _ = KINDS[kind]
    model, settings = build(), {"num_beams": beams}
    if isinstance(case, dict):
        settings |= case
    else:
        case(model)
    fast_and_stock(monkeypatch, model, inputs_of(3), fast=False, **settings)


@pytest.mark.parametrize("beams", [1, 4])
def test_unsupported_inputs_fall_back_to_transformers(monkeypatch, beams) -> None:
    model, text = random_model(), random_gpt()
    empty = sentences(3)
    empty["attention_mask"][1] = 0
    ids = sentences(3)["input_ids"]
    first = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
    embeds, positions = {"inputs_embeds": torch.randn(2, 3, 16)}, {"position_ids": torch.arange(12).expand(3, 12) + 1}
    for each, inputs in ((model, empty), (text, embeds), (text, prompts(3) | positions), (text, sentences(3))):
        one, other = fast_and_stock(monkeypatch, each, inputs, fast=False, num_beams=beams)
        assert torch.equal(one.sequences, other.sequences)
    again = {"input_ids": ids, "decoder_input_ids": first.sequences, CACHE: first[CACHE]}
    settings = {"max_new_tokens": 1} if beams == 1 else {"do_sample": True, "num_beams": beams}
    fast_and_stock(monkeypatch, model, again if beams == 1 else sentences(3), fast=False, **settings)


def test_a_search_ends_when_its_time_is_up(monkeypatch) -> None:
    for model, inputs in ((random_model(), sentences(5)), (random_gpt(), prompts(5))):
        model.lm_head.bias.data[EOS] = -100
        for beams in (1, 3):
            settings = {"num_beams": beams, "max_new_tokens": 9}
            # Behind the first step, whichever search it is.
            fast, stock = fast_and_stock(monkeypatch, model, inputs, max_time=1e-9, **settings)
            assert torch.equal(fast.sequences, stock.sequences)
            whole = model.generate(**inputs, max_time=60.0, **settings)
            assert whole.shape[1] == fast.sequences.shape[1] + 8
            assert torch.equal(model.generate(**inputs, **settings), whole)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_search_can_be_ended_from_outside(monkeypatch, beams) -> None:
    model, inputs = random_model(), sentences(5)
    model.lm_head.bias.data[EOS] = -100
    left: list[int] = []

    def settings() -> dict[str, object]:
        left[:] = [3]
        return {"num_beams": beams, "max_new_tokens": 9, "stopping_criteria": [EndCriteria(is_over)]}

    def is_over() -> bool:
        left[0] -= 1
        return not left[0]

    fast = model.generate(**inputs, **settings())
    assert fast.shape == (5, 1 + 3)
    with monkeypatch.context() as without:
        without.setattr(search_vaswani, "fast_search_inputs", lambda *args, **kwargs: None)
        assert torch.equal(model.generate(**inputs, **settings()), fast)
    ensemble = model.generate(**inputs, **settings(), ensemble=[random_model(1)])
    assert ensemble.shape == (5, 1 + 3)


def test_autocast_to_bfloat16_is_fast_and_to_float16_is_transformers(monkeypatch) -> None:
    model, inputs = random_model(), sentences(30)
    for beams in (1, 2):
        with torch.autocast("cpu", dtype=torch.float16):
            fast_and_stock(monkeypatch, model, inputs, fast=False, num_beams=beams)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fast, _ = fast_and_stock(monkeypatch, model, inputs, num_beams=beams)
            fast_and_stock(monkeypatch, random_gpt(), prompts(5, True), num_beams=beams)
            # With replaced layers, and several models.
            assert to_int8(random_model()).generate(**sentences(3), num_beams=beams).shape[0] == 3
            assert model.generate(**sentences(3), num_beams=beams, ensemble=[random_model(1)]).shape[0] == 3
        # Random predictions are near to each other, and rounding changes some of them.
        first = [row[:3].tolist() for row in fast.sequences]
        plain = [row[:3].tolist() for row in model.generate(**inputs, num_beams=beams)]
        assert sum(one == two for one, two in zip(first, plain, strict=True)) > 15


# ---- Sampling


DRAWN = [
    {},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    {"min_p": 0.01, "repetition_penalty": 1.2},
    {"num_return_sequences": 3, "max_new_tokens": 5},
]


@pytest.mark.variants(2)
@pytest.mark.parametrize("settings", DRAWN, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_the_same_tokens_are_drawn(monkeypatch, padded, settings) -> None:
    for model, inputs in ((random_model(), sentences(9, padded)), (random_gpt(), prompts(9, padded))):
        fast, stock = fast_and_stock(monkeypatch, model, inputs, do_sample=True, **settings)
        assert torch.equal(fast.sequences, stock.sequences)
        greedy = model.generate(**inputs, max_new_tokens=20)
        assert greedy.tolist() != fast.sequences[:: settings.get("num_return_sequences", 1)].tolist()


@pytest.mark.parametrize("beams", [1, 4])
def test_learned_positions_count_tokens_and_end_where_their_table_ends(monkeypatch, beams) -> None:
    """The prompt has two columns of padding: its tokens and the new ones are two fewer than the columns."""
    model = random_gpt(position_encoding="learned", max_position_embeddings=20)
    model.lm_head.bias.data[EOS] = -100
    inputs = {name: tensor[:1] for name, tensor in prompts(1, padded=False).items()}
    inputs["input_ids"][:, :2], inputs["attention_mask"][:, :2] = PAD, 0
    # The last token is written, and not read.
    fast, stock = fast_and_stock(monkeypatch, model, inputs, num_beams=beams, max_new_tokens=11)
    assert fast.sequences.shape == (1, 23) and torch.equal(fast.sequences, stock.sequences)
    for search in (model.generate, lambda **given: model.generate(**given, use_cache=False)):
        assert torch.equal(search(**inputs, num_beams=beams, max_new_tokens=50), fast.sequences)
    with pytest.raises(ValueError, match="longest prompt has 22 tokens, but the model has only 20 positions"):
        model.generate(torch.full((1, 22), 5))


# ---- Parts


@pytest.mark.parametrize("hypotheses", [1, 5])
@pytest.mark.parametrize("vocab_size", [20, 60, 320, 1000, 1023])
@pytest.mark.parametrize("k", [1, 8, 20])
def test_the_best_tokens(hypotheses, vocab_size, k) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    numbers = torch.randn(3, hypotheses, vocab_size, generator=generator)
    offsets = torch.randn(3, hypotheses, generator=generator)
    part = torch.randn(3, hypotheses, vocab_size + 7, generator=generator)[:, :, :vocab_size]
    for scores in (numbers, numbers.masked_fill(numbers > -2, -torch.inf), part):
        best, rows, tokens = best_tokens(scores, offsets, k)
        expected = (scores + offsets[:, :, None]).flatten(1)
        assert torch.equal(best, expected.topk(k).values)
        places = rows * vocab_size + tokens
        assert torch.equal(best, expected.gather(1, places)) and all(len(set(p)) == k for p in places.tolist())
