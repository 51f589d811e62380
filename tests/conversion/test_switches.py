"""Every switch of the config, in every way in which a translation model computes: equal, or refused by name."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion import marian
from hf_vaswani.conversion.convert import largest_difference
from hf_vaswani.conversion.engines import pipeline_engine
from hf_vaswani.conversion.protocol import Loaded
from hf_vaswani.translation.alignment import attention_to_source
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.visualization.explorer import explore
from hf_vaswani.visualization.search_record import record_search

from ..model.test_search import TRANSFORMERS, fast_and_stock
from .test_ctranslate2 import random_sentences, save_random

# Each with a value that is not the default, and one that MarianMTModel has of those that it can have.
SWITCHES: dict[str, dict[str, Any]] = {
    "d_k": {"d_k": 5, "d_v": 6},
    "d_v": {"d_v": 9},
    "layers": {"encoder_layers": 1, "decoder_layers": 3},
    "dropouts": {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3, "classifier_dropout": 0.3},
    "gelu": {"activation_function": "gelu"},
    "mish": {"activation_function": "mish"},
    "pre": {"norm_position": "pre"},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 64},
    "concatenated": {"sinusoid_layout": "concatenated"},
    "tensor2tensor": {"sinusoid_layout": "tensor2tensor"},
    "offset": {"position_offset": 2},
    "eps": {"layer_norm_eps": 0.05},
    "attention bias": {"attention_bias": True},
    "output bias": {"lm_head_bias": True},
    "no scale": {"scale_embedding": False},
    "two embeddings": {"share_embeddings": False},
    "untied": {"tie_word_embeddings": False},
    "segments": {"type_vocab_size": 3},
    "embedding norm": {"embedding_norm": True},
    "of other heads": {"lm_head_transform": True, "initializer_range": 0.3, "language_pairs": [["en", "de"]]},
    "alignment": {"alignment_layer": 0, "alignment_shift": True},
    "no cache": {"use_cache": False},
    "no pad": {"pad_token_id": None},
    "another pad": {"pad_token_id": 45, "bos_token_id": None},
    "two ends": {"eos_token_id": [2, 9]},
    "from pad": {"decoder_start_token_id": 0},
}
# Those that meet in one place: at the bottom of the stacks, in the embeddings, or in the attention.
PAIRS = [
    *(
        ("embedding norm", other)
        for other in ("pre", "learned", "segments", "no scale", "offset", "eps", "two embeddings")
    ),
    *(("segments", other) for other in ("learned", "no scale", "two embeddings", "pre")),
    *(("untied", other) for other in ("two embeddings", "output bias", "no scale", "embedding norm")),
    *(("d_k", other) for other in ("attention bias", "pre", "layers")),
    *(("no pad", other) for other in ("two embeddings", "untied", "two ends")),
    *((layout, other) for layout in ("concatenated", "tensor2tensor") for other in ("offset", "pre", "no scale")),
    ("learned", "pre"),
    ("from pad", "another pad"),
]
# The sizes are not those of the paper in any of these models; a model with one stack does not translate.
NO_SWITCHES = {"vocab_size", "d_model", "d_ff", "num_heads", "is_encoder_decoder", "is_decoder", "longest_sentence"}
# What MarianMTModel has, and this package's default is not.
MARIAN = {"layer_norm_eps": 1e-5, "activation_function": "relu"}
CASES = {"none": {}} | SWITCHES | {f"{one}, {two}": SWITCHES[one] | SWITCHES[two] for one, two in PAIRS}


@dataclass
class Case:
    """A model with random weights, its tokenizer, and the fields by which an error may refuse it."""

    fields: dict[str, Any]
    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def ids(self) -> dict[str, torch.Tensor]:
        """Returns a batch of sentences, padded on the right."""
        return dict(self.tokenizer(random_sentences(12), return_tensors="pt", padding=True))

    def refusal(self, error: Exception) -> None:
        """Asserts that an error names one of the fields."""
        assert re.search("|".join(self.fields) or "never", str(error)), error


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Case:
    return made(tmp_path_factory.mktemp("switch"), **CASES[request.param])


def made(folder: Path, **fields) -> Case:
    save_random(folder, **fields)
    return Case(fields, *load_translator(folder), folder)


def equal(ours: list, theirs: list) -> int:
    return sum(one == two for one, two in zip(ours, theirs, strict=True))


def without_padding(rows: torch.Tensor, case: Case) -> list[list[int]]:
    """Returns the tokens of each row up to its end."""
    ends = case.model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends
    found = []
    for row in rows.tolist():
        last = next((i for i, id_ in enumerate(row) if i and id_ in ends), len(row))
        found.append(row[: last + 1])
    return found


def test_every_switch_is_among_them() -> None:
    fields = set(inspect.get_annotations(VaswaniConfig)) - NO_SWITCHES
    assert fields == {name for switch in SWITCHES.values() for name in switch}
    default = VaswaniConfig()
    for switch in SWITCHES.values():
        assert all(getattr(default, name) != value for name, value in switch.items()), switch


@pytest.mark.variants(20)
def test_a_folder_has_the_whole_model(case, tmp_path) -> None:
    case.model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert not largest_difference(case.model, lambda *batch: logits_of(again, *batch))
    assert {name: getattr(again.config, name) for name in case.fields} == case.fields


def logits_of(model, ids, mask, targets) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits


@pytest.mark.variants(20)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_searches_of_both_and_of_an_ensemble(case, monkeypatch, num_beams) -> None:
    settings = TRANSFORMERS | {"num_beams": num_beams, "max_new_tokens": 12}
    has_cache = case.model.config.use_cache
    fast, stock = fast_and_stock(monkeypatch, case.model, case.ids(), has_cache, **settings)
    expected = without_padding(stock.sequences, case)
    assert equal(without_padding(fast.sequences, case), expected) >= len(expected) - 1
    try:
        of_two = case.model.generate(**case.ids(), ensemble=[case.model], **settings)
    except ValueError as error:
        case.refusal(error)
        assert not has_cache
        return
    assert equal(without_padding(of_two, case), expected) >= len(expected) - 1


@pytest.mark.variants(20)
def test_alignment_reads_the_attention_of_the_model(case) -> None:
    eager = AutoModelForSeq2SeqLM.from_pretrained(case.folder, attn_implementation="eager").eval()
    batch, labels = case.ids(), torch.randint(3, 40, (12, 6), generator=torch.Generator().manual_seed(2))
    layers = range(case.model.config.decoder_layers)
    with torch.no_grad():
        expected = eager(**batch, labels=labels, output_attentions=True).cross_attentions
    found = attention_to_source(case.model, batch, labels, layers)
    for layer in layers:
        torch.testing.assert_close(found[layer], expected[layer].mean(dim=1), atol=1e-5, rtol=0)


@pytest.mark.variants(20)
def test_the_explorer_shows_the_search(case) -> None:
    sentence = random_sentences(1)[0]
    ids, settings = case.tokenizer(sentence, return_tensors="pt")["input_ids"], {"num_beams": 3, "max_new_tokens": 9}
    expected = case.model.generate(ids, **settings)
    try:
        best = record_search(case.model, ids, **settings).hypotheses[0].ids
    except ValueError as error:
        case.refusal(error)
        assert not case.model.config.use_cache
        return
    assert without_padding(expected, case)[0][1:] == best
    assert sentence.split()[0] in explore(case.model, case.tokenizer, sentence, settings=settings).html


def in_an_engine(case: Case, engine: str) -> None:
    """Asserts that an engine computes the same logits and translations, or refuses the model by a field."""
    try:
        found = pipeline_engine(case.model, case.tokenizer, engine, None, False, False)
    except ValueError as error:
        case.refusal(error)
        return
    assert largest_difference(case.model, found.translator.logits) < 1e-4
    batch, settings = case.ids(), {"num_beams": 1, "max_new_tokens": 12}
    expected = case.model.generate(**batch, **settings)
    rows = found(**batch, **settings)
    assert equal(rows.tolist(), expected.tolist()) >= len(expected) - 1


@pytest.mark.variants(20)
def test_ctranslate2(case) -> None:
    pytest.importorskip("ctranslate2")
    in_an_engine(case, "ctranslate2")


@pytest.mark.slow
def test_onnx_runtime(case) -> None:
    pytest.importorskip("onnxruntime")
    in_an_engine(case, "onnx")


@pytest.mark.variants(20)
@pytest.mark.parametrize("name", CASES)
def test_marian(name, tmp_path) -> None:
    case = made(tmp_path / "ours", **(MARIAN | CASES[name]))
    case.fields = CASES[name]
    try:
        found = marian.save(Loaded(case.model, case.tokenizer, case.folder), tmp_path / "theirs")
    except ValueError as error:
        case.refusal(error)
        return
    assert largest_difference(case.model, found.logits) < 1e-4


@pytest.mark.parametrize("name", ["embedding norm", "segments"])
def test_what_an_encoder_of_its_own_brings_is_computed_by_ctranslate2(name, tmp_path) -> None:
    """And not refused: models that start from such an encoder have both."""
    pytest.importorskip("ctranslate2")
    case = made(tmp_path, **SWITCHES[name])
    assert pipeline_engine(case.model, case.tokenizer, "ctranslate2", None, False, False) is not None
    in_an_engine(case, "ctranslate2")


def test_a_start_of_a_call(tmp_path) -> None:
    """A converted model has its own: it is refused, or left to torch."""
    pytest.importorskip("ctranslate2")
    case = made(tmp_path)
    named, left_open = (
        pipeline_engine(case.model, case.tokenizer, name, None, False, False) for name in ("ctranslate2", "auto")
    )
    settings = {"num_beams": 1, "decoder_start_token_id": 7}
    with pytest.raises(ValueError, match="CTranslate2 cannot translate with decoder_start_token_id=7"):
        named(**case.ids(), **settings)
    assert left_open(**case.ids(), **settings) is None
