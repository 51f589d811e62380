"""The incremental decoder against the decoder without a cache, and everything beside another default device."""

import contextlib
import copy

import pytest
import torch
import transformers

from hf_vaswani import VaswaniForConditionalGeneration, VaswaniTranslationPipeline
from hf_vaswani.model.decoding_vaswani import EnsembleDecoder, IncrementalDecoder

from ..conftest import dear
from .test_products import needs_bfloat16, pack_from
from .test_search import BOS, random_model, sentences

EOS = 2


@pytest.mark.variants(3)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("count", "beams"), [(4, 1), (4, 3), (14, 3)])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "d_k": 8, "d_v": 6}], ids=str)
def test_each_step_equals_the_decoder_without_a_cache(count, beams, fields, packed, monkeypatch) -> None:
    pack_from(monkeypatch, 1 if packed else 10**9)
    model, inputs = random_model(**fields), sentences(count)
    decoder = model.model.decoder
    states = model.model.encoder(**inputs).last_hidden_state
    with torch.no_grad():
        step = IncrementalDecoder(decoder, states, inputs["attention_mask"], beams)
        generator = torch.Generator().manual_seed(0)
        written = torch.full((count, 1, 1), BOS)
        step.step(written[:, :, 0])
        written = written.expand(count, beams, 1)
        which = torch.arange(count)
        for length in range(2, 40):
            tokens = torch.randint(3, 90, (*written.shape[:2], 1), generator=generator)
            written = torch.cat((written, tokens), dim=2)
            found = step.step(tokens[:, :, 0])
            expected = decoder(
                written.flatten(0, 1),
                encoder_hidden_states=states[which].repeat_interleave(beams, dim=0),
                encoder_attention_mask=inputs["attention_mask"][which].repeat_interleave(beams, dim=0),
            ).last_hidden_state[:, -1]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            parents = torch.randint(beams, written.shape[:2], generator=generator)
            step.reorder(parents)
            written = torch.take_along_dim(written, parents[:, :, None], dim=1)
            if length in (10, 30):
                kept = torch.arange(len(written) - 1)
                step.keep(kept)
                written, which = written[kept], which[kept]
        # Places that no hypothesis sees are removed.
        assert step.written < beams * 39 or beams == 1


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_bfloat16)], ids=["", "packed"])
@pytest.mark.parametrize("fields", [{}, {"norm_position": "pre"}, {"attention_bias": True}], ids=str)
def test_autocast_rounds_the_factors_of_products_alone(fields, packed, monkeypatch) -> None:
    """Outputs are in float32, near to those without autocast, and nearer than those of weights in bfloat16."""
    pack_from(monkeypatch, 1 if packed else 10**9)
    model, inputs = random_model(**fields), sentences(16)
    outputs = []
    for each, autocast in ((model, False), (model, True), (copy.deepcopy(model).bfloat16(), False)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = each.model.encoder(**inputs).last_hidden_state
            decoder = EnsembleDecoder([each], [states], inputs["attention_mask"], 3)
            decoder.read(torch.full((16, 1), BOS))
            generator, found = torch.Generator().manual_seed(0), []
            for _ in range(12):
                decoder.read(torch.randint(3, 90, (16, 3), generator=generator))
                found.append(torch.cat((decoder.states[0].float(), decoder.log_probs()), dim=1))
                assert decoder.states[0].dtype == each.dtype
        outputs.append(torch.stack(found))
    errors = [(outputs[0] - other).abs().mean().item() for other in outputs[1:]]
    assert 0 < errors[0] < 0.05 and errors[0] < errors[1]


# ---- Another default device


@contextlib.contextmanager
def everything_elsewhere():
    """Makes `meta` the default device: a tensor created without a device fails as it would beside a model on a GPU."""
    with torch.device("meta"):
        yield


WAYS = [
    {"num_beams": 1},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "repetition_penalty": 1.2},
    {"num_beams": 3, "max_new_tokens": 5},
    {"num_beams": 1, "ensemble": True},
    {"num_beams": 3, "ensemble": True},
    {"num_beams": 1, "do_sample": True},
    # These two fall back to transformers' own searches.
    {"num_beams": 1, "output_scores": True, "return_dict_in_generate": True},
    {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True},
]


@pytest.mark.variants(3)
@pytest.mark.parametrize("fields", [{}, {"position_encoding": "learned", "max_position_embeddings": 70}], ids=str)
@pytest.mark.parametrize("settings", WAYS, ids=str)
# `best_tokens` compares many tokens in groups.
@pytest.mark.parametrize("vocab_size", [dear(90), 1000])
def test_every_search_runs_where_the_model_is(settings, vocab_size, fields) -> None:
    models = [random_model(seed, vocab_size, **fields) for seed in range(2)]
    settings = settings | ({"ensemble": models[1:]} if "ensemble" in settings else {})
    found = []
    for place in (contextlib.nullcontext, everything_elsewhere):
        torch.manual_seed(0)
        inputs = sentences(40, vocab_size=vocab_size)
        with place():
            found.append(models[0].generate(**inputs, **settings))
    one, other = (getattr(each, "sequences", each) for each in found)
    assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("loss_only", [False, True])
def test_an_update_is_made_where_the_model_is(attention, loss_only) -> None:
    model, inputs = random_model().train(), sentences(9)
    model.set_attn_implementation(attention)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    found = []
    for place in (contextlib.nullcontext, everything_elsewhere):
        torch.manual_seed(0)
        model.zero_grad()
        with place():
            loss = model(**inputs, labels=labels, epsilon_ls=0.1, loss_only=loss_only).loss
            loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_pipeline_runs_where_the_model_is(tiny_run) -> None:
    """Starts from ids, which transformers' tokenizers create on the default device."""
    kinds = (VaswaniForConditionalGeneration, transformers.AutoTokenizer)
    model, tokenizer = (kind.from_pretrained(tiny_run / "model") for kind in kinds)
    translator = VaswaniTranslationPipeline(model, tokenizer, device="cpu")
    for text in ("one two", ""):
        encoding, found = translator.preprocess(text), []
        for place in (contextlib.nullcontext, everything_elsewhere):
            with place():
                found.append(translator._forward(dict(encoding), num_return_sequences=2))
        assert torch.equal(found[0]["output_ids"], found[1]["output_ids"]) and len(found[0]["output_ids"][0]) == 2


def test_translations_are_scored_where_the_model_is() -> None:
    model, inputs, found = random_model(), sentences(9), []
    for place in (contextlib.nullcontext, everything_elsewhere):
        with place(), torch.no_grad():
            output = model(**inputs, labels=inputs["input_ids"])
            found.append((output.logits, output.loss))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
