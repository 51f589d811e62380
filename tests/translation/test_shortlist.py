"""Searches among the entries of a shortlist, against searches of a model to which all other entries are improbable."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.translation.shortlist import FILE, Shortlist

from ..conversion.test_ctranslate2 import random_sentences, save_random
from ..model.test_search import EOS, random_model, sentences


def random_shortlist(vocab_size: int = 90, candidates: int = 3) -> Shortlist:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, vocab_size, (vocab_size, candidates), generator=generator)
    return Shortlist(torch.tensor([5, 8, 13]), torch.cat((torch.arange(vocab_size)[:, None], rows), dim=1))


def write_shortlist(folder: Path, frequent: list[str], translations: dict[str, list[str]]) -> None:
    (folder / FILE).write_text(json.dumps({"frequent": frequent, "translations": translations}))


def test_the_entries_are_those_of_all_sources() -> None:
    rows = torch.arange(10)[:, None].repeat(1, 3)
    rows[4, 1:], rows[6, 1] = torch.tensor([7, 2]), 9
    shortlist = Shortlist(torch.tensor([3]), rows)
    assert shortlist.entries(torch.tensor([[4, 1], [6, 0]])).tolist() == [0, 1, 2, 3, 4, 6, 7, 9]
    assert shortlist.entries(torch.tensor([4]), torch.tensor([8])).tolist() == [2, 3, 4, 7, 8]


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 3, "repetition_penalty": 1.3, "suppress_tokens": [5]},
        {"num_beams": 1, "no_repeat_ngram_size": 2, "forced_eos_token_id": EOS},
        {"num_beams": 2, "ensemble": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("fields", [{}, {"lm_head_bias": True}, {"d_model": 24, "num_heads": 2}], ids=str)
def test_searches_are_those_of_a_model_without_the_other_entries(settings, fields) -> None:
    settings = dict(settings) | {"return_dict_in_generate": True}
    models = [random_model(seed, **fields) for seed in (0, 1)[: 1 + settings.pop("ensemble", False)]]
    without = [random_model(seed, **(fields | {"lm_head_bias": True})) for seed in range(len(models))]
    inputs, shortlist = sentences(6), random_shortlist()
    entries = shortlist.entries(inputs["input_ids"], torch.tensor([EOS]))
    assert 20 < len(entries) < 80
    for model, other in zip(models, without, strict=True):
        other.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad():
            is_in = torch.zeros(90, dtype=torch.bool).index_fill(0, entries, True)
            other.lm_head.bias.masked_fill_(~is_in, -1e9)
    more = [{"ensemble": each[1:]} if len(each) > 1 else {} for each in (models, without)]
    found = models[0].generate(**inputs, **settings, **more[0], shortlist=shortlist)
    expected = without[0].generate(**inputs, **settings, **more[1])
    assert torch.equal(found.sequences, expected.sequences)
    assert set(found.sequences[:, 1:].flatten().tolist()) <= {*entries.tolist(), 0}
    if "num_return_sequences" in settings:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
        alone = models[0].generate(**inputs, **settings)
        assert not torch.equal(alone.sequences, found.sequences)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shortlist": [5]}, "shortlist must be a Shortlist, but it is a list"),
        ({"shortlist": random_shortlist(91)}, "is for 91 entries, but the model has 90"),
        ({"do_sample": True}, "plain greedy or beam search, but the settings ask for sample"),
        ({"output_scores": True, "return_dict_in_generate": True}, "search, but output_scores=True was given"),
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, "shortlist needs input_ids .*, but inputs_embeds was given"),
        (
            {"prefix_allowed_tokens_fn": lambda *_: [40]},
            "with a PrefixConstrainedLogitsProcessor: leave one of them out",
        ),
        ({"sequence_bias": {(40,): 9.0}}, "with a SequenceBiasLogitsProcessor"),
        ({"shortlist": Shortlist(torch.tensor([EOS]), torch.full((90, 1), EOS))}, "has 1 entries for this batch, but"),
    ],
    ids=["list", "vocabulary", "sample", "scores", "embeds", "prefix", "bias", "few"],
)
def test_calls_that_would_ignore_a_shortlist_are_refused(settings, words) -> None:
    inputs = {} if "inputs_embeds" in settings else sentences(2)
    with pytest.raises(ValueError, match=words):
        random_model().generate(**inputs, **({"shortlist": random_shortlist(), "num_beams": 1} | settings))


def test_a_pipeline_searches_among_the_entries_of_its_folder(tmp_path) -> None:
    folder, lines = tmp_path / "model", random_sentences()[:6]
    save_random(folder)
    model, tokenizer = load_translator(folder)
    words = tokenizer.convert_ids_to_tokens(tokenizer(lines[0])["input_ids"])
    write_shortlist(folder, ["</s>", words[0]], {words[1]: [words[0]]})
    arguments: dict[str, Any] = {"tokenizer": tokenizer, "num_beams": 1}
    pipe, whole = (VaswaniTranslationPipeline(model, shortlist=is_on, **arguments) for is_on in (True, False))
    settings = {"return_tensors": True, "min_new_tokens": 5, "max_new_tokens": 5}
    few = {*tokenizer.convert_tokens_to_ids(words), model.config.decoder_start_token_id, tokenizer.eos_token_id}

    def ids(pipe, **more) -> list[int]:
        return pipe(lines[0], **settings, **more)[0]["translation_token_ids"].tolist()

    assert set(ids(pipe)) <= few and not set(ids(whole)) <= few
    # A call may have its own, or none.
    assert ids(pipe, shortlist=None) == ids(whole)
    assert ids(whole, shortlist=Shortlist.load(str(folder), tokenizer, model.config.vocab_size)) == ids(pipe)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no shortlist.json: hf-vaswani shortlist writes it"),
        ("{", "shortlist.json is no shortlist, or it is damaged"),
        ("[]", "is no shortlist, or it is damaged"),
        ('{"frequent": 3, "translations": {}}', "is no shortlist, or it is damaged"),
        ('{"frequent": ["nowhere"], "translations": {}}', "another vocabulary: the model has no entry 'nowhere'"),
        ('{"frequent": [3], "translations": {}}', "another vocabulary: the model has no entry 3"),
    ],
)
def test_files_that_are_no_shortlist_are_refused(tmp_path, content, words) -> None:
    folder = tmp_path / "model"
    save_random(folder)
    if content is not None:
        (folder / FILE).write_text(content)
    model, tokenizer = load_translator(folder)
    with pytest.raises(ValueError, match=words):
        VaswaniTranslationPipeline(model, tokenizer, shortlist=True)
