"""Every switch of the config, in every way in which a translation model computes: the same, or refused by name."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion import marian
from hf_vaswani.conversion.convert import largest_difference
from hf_vaswani.conversion.engines import EngineOptions, pipeline_engine
from hf_vaswani.conversion.formats import FIELDS, Loaded, Logits, check_expressible, model_type
from hf_vaswani.translation.alignment import attention_to_source
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.visualization.explorer import explore
from hf_vaswani.visualization.search_record import record_search

from ..conftest import dear
from ..model.test_search import TRANSFORMERS, fast_and_stock
from ..networks import random_model
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
# What each way does not have, and says so by the name of the field.
REFUSED = {
    "ctranslate2": {"mish"},
    "onnx": set(),
    "marian": {"d_k", "d_v", "pre", "learned", "tensor2tensor", "offset", "eps", "segments", "embedding norm"},
    "an ensemble": {"no cache"},
    "the explorer": {"no cache"},
}
# Each switch is one small case, and the pairs are left to `make test-all`.
CASES = [("none",), *((name,) for name in SWITCHES), *(dear(pair) for pair in PAIRS)]


@dataclass
class Case:
    """A model with random weights, its switches, and the fields by which an error may refuse it."""

    switches: tuple[str, ...]
    fields: dict[str, Any]
    saved: VaswaniForConditionalGeneration
    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def ids(self) -> dict[str, torch.Tensor]:
        """Returns a batch of sentences, padded on the right."""
        return dict(self.tokenizer(random_sentences(6), return_tensors="pt", padding=True))

    def computed(self, way: str, compute: Callable[[], Any]) -> Any:
        """Returns what a way computes; `None` if it refuses the model, as it should, by the name of a field."""
        if REFUSED[way].isdisjoint(self.switches):
            return compute()
        with pytest.raises(ValueError, match="|".join(self.fields)):
            compute()
        return None


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request, tmp_path_factory) -> Case:
    return made(tmp_path_factory.mktemp("switch"), *request.param)


def made(folder: Path, *switches: str) -> Case:
    fields = {name: value for switch in switches for name, value in SWITCHES.get(switch, {}).items()}
    return Case(switches, fields, save_random(folder, **fields), *load_translator(folder), folder)


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


def test_every_field_has_a_row_for_the_targets_and_is_a_switch_here() -> None:
    fields = inspect.get_annotations(VaswaniConfig).keys()
    assert fields == FIELDS.keys() == NO_SWITCHES | {name for switch in SWITCHES.values() for name in switch}
    default = VaswaniConfig()
    for switch in SWITCHES.values():
        assert all(getattr(default, name) != value for name, value in switch.items()), switch


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        ("Marian", {"norm_position": "pre"}, 'norm_position "pre", but Marian supports only "post".'),
        ("Marian", {"d_k": 5}, "d_k 5, but Marian supports only d_model / num_heads = 512 / 8."),
        ("Marian", {"layer_norm_eps": 1e-6}, "only 1e-05: train the model with model.layer_norm_eps 1e-05."),
        (
            "CTranslate2",
            {"activation_function": "mish"},
            'activation_function "mish", but CTranslate2 supports only "r',
        ),
    ],
)
def test_a_refusal_names_the_field_and_what_is_supported(target, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_expressible(VaswaniConfig(**{"layer_norm_eps": 1e-5} | fields), target)


def test_the_model_type_is_that_of_config_json(tmp_path) -> None:
    assert model_type(tmp_path) is None
    for content, expected in (('{"model_type": "marian"}', "marian"), ("{}", None)):
        (tmp_path / "config.json").write_text(content)
        assert model_type(tmp_path) == expected


def test_a_folder_has_the_whole_model(case) -> None:
    assert not largest_difference(case.saved, lambda *batch: logits_of(case.model, *batch))
    assert {name: getattr(case.model.config, name) for name in case.fields} == case.fields


@torch.no_grad()
def logits_of(model, ids, mask, targets) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits


@pytest.mark.parametrize("num_beams", [dear(1), 3])
def test_the_searches_of_both_and_of_an_ensemble(case, monkeypatch, num_beams) -> None:
    settings = TRANSFORMERS | {"num_beams": num_beams, "max_new_tokens": 8}
    fast, stock = fast_and_stock(monkeypatch, case.model, case.ids(), case.model.config.use_cache, **settings)
    expected = without_padding(stock.sequences, case)
    assert equal(without_padding(fast.sequences, case), expected) >= len(expected) - 1
    found = case.computed("an ensemble", lambda: case.model.generate(**case.ids(), ensemble=[case.model], **settings))
    assert found is None or equal(without_padding(found, case), expected) >= len(expected) - 1


def test_alignment_reads_the_attention_of_the_model(case) -> None:
    eager = copy.deepcopy(case.model)
    eager.set_attn_implementation("eager")
    batch, labels = case.ids(), torch.randint(3, 40, (6, 6), generator=torch.Generator().manual_seed(2))
    layers = range(case.model.config.decoder_layers)
    with torch.no_grad():
        expected = eager(**batch, labels=labels, output_attentions=True).cross_attentions
    found = attention_to_source(case.model, batch, labels, layers)
    for layer in layers:
        torch.testing.assert_close(found[layer], expected[layer].mean(dim=1), atol=1e-5, rtol=0)


@pytest.mark.variants(9)
def test_the_explorer_shows_the_search(case) -> None:
    sentence = random_sentences(1)[0]
    ids, settings = case.tokenizer(sentence, return_tensors="pt")["input_ids"], {"num_beams": 3, "max_new_tokens": 6}
    record = case.computed("the explorer", lambda: record_search(case.model, ids, **settings))
    if record is not None:
        expected = case.model.generate(ids, **settings)
        assert without_padding(expected, case)[0][1:] == record.hypotheses[0].ids
        assert sentence.split()[0] in explore(case.model, case.tokenizer, sentence, settings=settings).html


def in_ctranslate2(case: Case, _: Path) -> Logits:
    pytest.importorskip("ctranslate2")
    engine = pipeline_engine(case.model, case.tokenizer, EngineOptions("ctranslate2"))
    batch, settings = case.ids(), {"num_beams": 1, "max_new_tokens": 8}
    expected = case.model.generate(**batch, **settings)
    assert equal(engine(**batch, **settings).tolist(), expected.tolist()) >= len(expected) - 1
    return engine.translator.logits


def in_marian(case: Case, folder: Path) -> Logits:
    """Of a model that has, beside its switches, the epsilon of MarianMTModel, which is not the default."""
    case.model = random_model(**{"layer_norm_eps": 1e-5} | case.fields)
    return marian.save(Loaded(case.model, case.tokenizer, case.folder), folder).logits


def in_onnx(case: Case, _: Path) -> Logits:
    """The graphs before the exporter writes them (see test_onnx), with a target that is read in parts."""
    onnx = pytest.importorskip("hf_vaswani.conversion.onnx", exc_type=ImportError)
    read, write = onnx.SourceGraph(case.model).eval(), onnx.TargetGraph(case.model).eval()

    @torch.no_grad()
    def logits(ids: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        source = read(ids, mask)
        past = {f"self_{kind}": source[f"cross_{kind}"][:, :, :, :0] for kind in ("keys", "values")}
        found = []
        for part in targets.split(5, dim=1):
            step = write(part, mask, **past, **source)
            past = {f"self_{kind}": step[f"next_self_{kind}"] for kind in ("keys", "values")}
            found.append(step["logits"])
        return torch.cat(found, dim=1)

    return logits


@pytest.mark.parametrize("way", [in_ctranslate2, in_onnx, in_marian])
def test_other_formats(case, way, tmp_path) -> None:
    case = replace(case)
    logits = case.computed(way.__name__.removeprefix("in_"), lambda: way(case, tmp_path))
    assert logits is None or largest_difference(case.model, logits) < 1e-4


def test_a_start_of_a_call(tmp_path) -> None:
    """A converted model has its own: it is refused, or left to torch."""
    pytest.importorskip("ctranslate2")
    case = made(tmp_path)
    named, left_open = (
        pipeline_engine(case.model, case.tokenizer, EngineOptions(name)) for name in ("ctranslate2", "auto")
    )
    settings = {"num_beams": 1, "decoder_start_token_id": 7}
    with pytest.raises(ValueError, match="CTranslate2 cannot translate with decoder_start_token_id=7"):
        named(**case.ids(), **settings)
    assert left_open(**case.ids(), **settings) is None
